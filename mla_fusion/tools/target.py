"""Reads what the command line names: files, chips, releases, and functions, as ``FILE.py:FUNCTION``
or ``MODULE:FUNCTION``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_fusion import machine


class UserError(Exception):
    """Raised for a mistake that the user can correct. The command prints it without a stack
    trace.
    """


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raises UserError for errors of these kinds."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error


def positive(text: str) -> int:
    """Returns a number of the command line that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def existing(text: str) -> Path:
    """Returns the path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise UserError(f"{text} is no regular file" if path.exists() else f"no such file: {text}")
    return path


def output(text: str) -> Path:
    """Returns the path of a file to write. Raises UserError before any work if it cannot be
    written.
    """
    path = Path(text)
    if path.is_dir():
        raise UserError(f"{text} is a folder, not a file to write")
    return _writable(path, path.absolute().parent)


def output_folder(text: str) -> Path:
    """Returns the path of a folder to write into, which may not exist yet. Raises UserError."""
    path = Path(text)
    absolute = path.absolute()
    return _writable(path, next(filter(Path.exists, (absolute, *absolute.parents))))


def _writable(path: Path, folder: Path) -> Path:
    """Returns a path that can be made in ``folder``. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: {folder} is no folder")
    place = path if path.exists() else folder
    if not os.access(place, os.W_OK):
        raise UserError(f"{path} cannot be written: no permission for {place}")
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError: Python names no file if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def target(text: str) -> str:
    """Returns the text if it has the form ``FILE.py:FUNCTION`` and the file exists. It imports
    nothing. Raises UserError.
    """
    file, separator, name = text.rpartition(":")
    if separator and name.isidentifier():
        if file.endswith(".py"):
            existing(file)
        return text
    if not text.endswith(".py"):
        raise UserError(f"{text!r} is not of the form FILE.py:FUNCTION")
    functions = _functions(existing(text))
    raise UserError(
        f"which function of {text}? FILE.py:FUNCTION, as {text}:{functions[0]}; it defines "
        f"{', '.join(functions)}"
        if functions
        else f"{text} defines no function without arguments"
    )


def target_or_dump(text: str) -> str:
    """Returns the text if it names a function or the file of a dump. Raises UserError.

    A Python file of torchair's is a dump: it has no function.
    """
    path = Path(text) if ":" in text else existing(text)
    is_dump = path.is_file() and not (path.suffix == ".py" and _functions(path))
    return text if is_dump else target(text)


def _functions(path: Path) -> list[str]:
    """Returns the names of a file's functions that can be called without arguments."""
    try:
        statements = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [
        node.name
        for node in statements
        if isinstance(node, ast.FunctionDef)
        if len(node.args.args) + len(node.args.kwonlyargs) == len(node.args.defaults)
    ]


def known_name(check: Callable[[str], str], text: str) -> str:
    """Returns the name of the tables that ``check`` returns for a text, or "auto". Raises
    UserError.
    """
    with user_errors(ValueError):
        return text if text == machine.AUTO else check(text)


def load_target(text: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what the function of ``FILE.py:FUNCTION`` returns: a module or function, and its
    arguments. Raises UserError.
    """
    file, _, name = text.rpartition(":")
    with _callers_code(f"{file} cannot be imported", file):
        module = _imported(file)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{file} defines no function {name!r}")
    with _callers_code(f"{name}() failed", module.__file__ or file):
        pair = function()
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    if not (is_pair and callable(pair[0]) and isinstance(pair[1], (tuple, list))):
        raise UserError(
            f"{name}() returned {type(pair).__name__}, expected (module_or_function, arguments) "
            "with the arguments in a tuple or list"
        )
    return pair[0], tuple(pair[1])


@contextmanager
def _callers_code(failure: str, file: str) -> Iterator[None]:
    """Raises UserError, with the last line of the user's file, for all that the file raises,
    sys.exit() too. What the file prints goes to stderr.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        paths = Path(file), Path(file).resolve()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) in paths]
        where = f" (line {lines[-1]})" if lines else ""
        raise UserError(f"{failure}: {type(error).__name__}: {error}{where}") from error


def _imported(name: str) -> ModuleType:
    """Returns the module of a file, or the module of that name if there is no such file."""
    path = Path(name)
    if not path.is_file():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name.startswith(error.name or "?"):
                raise UserError(f"no such file: {name}") from error
            raise
    name = f"_mla_fusion_target_{path.stem}"  # a file named torch.py must not become torch
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # the modules in its folder can be imported, as by a script
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
