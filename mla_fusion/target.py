"""A function that the command line names, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``, and what it returns."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class UserError(Exception):
    """Something the caller can put right; printed without a stack trace."""


def positive(text: str) -> int:
    """A number of the command line that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def load_target(text: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``FILE.py:FUNCTION`` returns. Raises UserError for everything that is wrong with it."""
    file, separator, name = text.rpartition(":")
    if not separator or not name.isidentifier():
        raise UserError(f"{text!r} is not of the form FILE.py:FUNCTION")
    module = _imported(file)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{file} defines no function {name!r}")
    try:
        found = function()
    except Exception as error:
        raise UserError(f"{name}() failed: {_brief(error, module.__file__ or file)}") from error
    pair = isinstance(found, tuple) and len(found) == 2
    if not (pair and callable(found[0]) and isinstance(found[1], (tuple, list))):
        raise UserError(f"{name}() returned {type(found).__name__}, expected (module_or_function, arguments)")
    return found[0], tuple(found[1])


def _imported(name: str) -> ModuleType:
    """The module of a file, or the one of that name where there is no such file."""
    path = Path(name)
    if not path.is_file() and (path.suffix == ".py" or not _is_module(name)):
        raise UserError(f"no such file: {name}")
    try:
        return _of_file(path) if path.is_file() else importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} cannot be imported: {_brief(error, name)}") from error


def _is_module(name: str) -> bool:
    try:
        return all(map(str.isidentifier, name.split("."))) and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it would stand in
        return False


def _of_file(path: Path) -> ModuleType:
    name = f"_mla_fusion_target_{path.stem}"  # a file named torch.py must not become torch
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: its neighbours can be imported
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _brief(error: Exception, file: str) -> str:
    """The error with the last line of the caller's file that led to it."""
    path = Path(file)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) in (path.resolve(), path)]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
