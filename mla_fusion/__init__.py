"""Fuse DeepSeek MLA prologues in FX graphs into the single Ascend NPU kernel.

The names below are the whole public surface; each loads its module on first use, and torch with it.
Whoever imports torch has the npu:: operators, before or after this package.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from mla_fusion import _autoload, _lazy

if not Path(__file__).with_name("meta").exists():
    # A source tree, perhaps before its installation on sys.path: meta/, converters/ and examples/
    # stand beside it.
    __path__.append(str(Path(__file__).parents[1]))

_autoload.keep_torch_importable()
_lazy.operators_with_torch()
_lazy.write_page = lambda report, path: import_module("mla_fusion.tools.page.page").write(
    report, path
)

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_MODULES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_MODULES.keys() - {"__version__"})


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module == "mla_fusion":
        return import_module(f"mla_fusion.{name}")
    if module is not None:
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'mla_fusion' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
