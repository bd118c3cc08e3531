"""``import mla_fusion`` without torch: the npu:: operators are defined once torch is there.

They have to stand before anybody uses them, and torch takes seconds to load, for which ``mla-fusion
--help`` and a wrong call need not wait. So a finder watches for the first import of torch, or of a
module that needs it.

A second finder watches for torch_npu. torch_npu defines the same operators, so ours make way for
its import. Without CANN it is loaded over the offline stand-ins: a model file that imports it works
on a laptop.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_fusion._autoload import cann_location

# Modules that load without torch; tests/project/test_import.py holds them to it.
LIGHT = frozenset(
    f"mla_fusion.{name}"
    for name in """
    _autoload _gone _lazy _version cli machine report report.text_tables
    tools tools.cli
    tools.target tools.installed tools.profile
    """.split()
)


write_page: Callable[[Any, Path], Path]
"""Writes the page of a report. Pages are tools, which only the package itself may name: it sets
this.
"""


def operators_with_torch() -> None:
    """Define the operators now, if torch is loaded, or else as soon as it is."""
    if "torch" in sys.modules:
        _define()
    else:
        _Torch().install()


def _define() -> None:
    import torch

    if not hasattr(torch, "float8_e8m0fnu"):  # before torch 2.7: a dtype of the operator's table
        releases = import_module("mla_fusion.releases")
        pair = releases.command(releases.for_torch(torch.__version__))
        raise ImportError(
            f"mla_fusion needs torch 2.7 or newer, and torch {torch.__version__} is "
            f"installed: {pair}"
        )
    import_module("mla_fusion.ops")
    _TorchNpu().install()


class _Loaded(importlib.abc.Loader):
    """Gives a module that was loaded while it was looked for; loaded again, it would have its
    classes twice.
    """

    def __init__(self, module: ModuleType, spec: importlib.machinery.ModuleSpec) -> None:
        self._module, self._spec, self._loader = module, spec, spec.loader
        spec.loader = self

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._loader


class _Finder(importlib.abc.MetaPathFinder):
    """Lets a module be found by the others, and decides what happens around its execution."""

    awaited: str

    def load(self, execute: Callable[[], None]) -> None:
        """Calls ``execute``, which executes the module."""
        raise NotImplementedError

    def install(self) -> None:
        """In front of the others, once."""
        if all(getattr(finder, "awaited", None) != self.awaited for finder in sys.meta_path):
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.awaited:
            return None
        others = (other for other in sys.meta_path if other is not self)
        specs = (other.find_spec(fullname, path, target) for other in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self.load(partial(execute, module))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Torch(_Finder):
    """Defines the operators behind torch, and has torch loaded before what needs it."""

    awaited = "torch"

    def load(self, execute: Callable[[], None]) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        execute()
        _define()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        needs_torch = fullname.startswith("mla_fusion.") and fullname not in LIGHT
        if needs_torch or fullname == _TorchNpu.awaited:
            # first: no module that needs it is half imported when the operators are defined
            import_module("torch")
            loaded = sys.modules.get(fullname)
            # it came with torch or the operators; Python takes its spec
            if loaded is not None and loaded.__spec__ is not None:
                _Loaded(loaded, loaded.__spec__)
                return loaded.__spec__
            if not needs_torch:
                return find_spec(fullname)  # by the finder that came with the operators
        return super().find_spec(fullname, path, target)


class _TorchNpu(_Finder):
    """Our operators make way for torch_npu and come back behind it; without CANN it is loaded over
    the offline stand-ins.
    """

    awaited = "torch_npu"

    def load(self, execute: Callable[[], None]) -> None:
        ops = import_module("mla_fusion.ops")
        offline = import_module("mla_fusion.compile.offline.runtime")
        with offline.standins_loaded() if cann_location() is None else nullcontext():
            ops.withdraw()
            try:
                execute()
            finally:
                ops.provide()
