"""Defines the npu:: operators once torch is loaded, so that ``import mla_fusion`` needs no torch.

Operators must exist before anything uses them. But torch takes seconds to load, and ``mla-fusion
--help`` and a wrong call need not wait for it. So a finder waits for the first import of torch, or
of a module that needs torch.

A second finder waits for torch_npu. torch_npu defines the same operators, so ours are withdrawn
for its import. Without CANN it is loaded over the offline stand-ins: a model file that imports it
works on a laptop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_fusion._autoload import cann_location

# Modules that load without torch. tests/project/test_import.py checks that.
LIGHT = frozenset(
    f"mla_fusion.{name}"
    for name in """
    _autoload _lazy _version cli machine report report.text_tables
    tools tools.cli
    tools.target tools.installed tools.profile
    """.split()
)


write_page: Callable[[Any, Path], Path]
"""Writes the page of a report. The package sets this: other rooms may not import tools."""


def operators_with_torch() -> None:
    """Defines the operators: now if torch is loaded, otherwise when it is."""
    if "torch" in sys.modules:
        _define()
    else:
        _Torch().install()


def _define() -> None:
    """Defines the operators. Raises ImportError for a torch that is too old."""
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


class _Loaded(Loader):
    """Returns a module that was loaded during the search for it. A second load would define its
    classes twice.
    """

    def __init__(self, module: ModuleType, spec: ModuleSpec) -> None:
        self._module, self._spec, self._loader = module, spec, spec.loader
        spec.loader = self

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._loader


class _Finder(MetaPathFinder):
    """Lets other finders find a module, and decides what happens around its execution."""

    awaited: str

    def load(self, execute: Callable[[], None]) -> None:
        """Calls ``execute``, which executes the module."""
        raise NotImplementedError

    def install(self) -> None:
        """Puts the finder before all others, once."""
        if all(getattr(finder, "awaited", None) != self.awaited for finder in sys.meta_path):
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of the awaited module, which executes it by ``load``."""
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
    """Defines the operators after torch, and loads torch before a module that needs it."""

    awaited = "torch"

    def load(self, execute: Callable[[], None]) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        execute()
        _define()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of torch. Loads torch for other modules that need it."""
        needs_torch = fullname.startswith("mla_fusion.") and fullname not in LIGHT
        if needs_torch or fullname == _TorchNpu.awaited:
            # before the import: no such module is incomplete when the operators are defined
            import_module("torch")
            loaded = sys.modules.get(fullname)
            # torch or the operators have loaded it; Python uses its spec
            if loaded is not None and loaded.__spec__ is not None:
                _Loaded(loaded, loaded.__spec__)
                return loaded.__spec__
            if not needs_torch:
                return find_spec(fullname)  # by the finder that the operators have installed
        return super().find_spec(fullname, path, target)


class _TorchNpu(_Finder):
    """Withdraws our operators while torch_npu is loaded: without CANN, over the stand-ins."""

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
