"""The few places where this project touches torchair's internals, so that no other module does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_fusion.compile import offline


def default_decompositions() -> dict[Any, Any]:
    """The decompositions that torchair hands to AOT autograd."""
    return dict(_module("npu_fx_compiler")._get_merged_decompositions(compiler_config(), {}))


def compiler_config() -> Any:
    """A fresh ``torchair.CompilerConfig``."""
    return _module("configs.compiler_config").CompilerConfig()


def _module(name: str) -> Any:
    offline.activate()
    import_module("torchair")
    return import_module(f"torchair.{name}")
