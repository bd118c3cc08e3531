"""Which operators have a converter here, and which of them are in use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from mla_fusion.converters import prolog_v1_v2, prolog_v3

OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_mla_prolog": prolog_v1_v2.v1,
    "npu_mla_prolog_v2": prolog_v1_v2.v2,
    "npu_mla_prolog_v3": prolog_v3.v3,
    "npu_mla_prolog_v3_functional": prolog_v3.v3_functional,
}


def register(force: bool = False) -> dict[str, str]:
    """Register what torchair lacks; ``force`` registers all. Says whose converter each operator has now."""
    torchair = import_module("torchair")
    for name, converter in OPERATORS.items():
        overload = _overload(name)
        if overload is not None and (force or _registered(overload) is None):
            torchair.register_fx_node_ge_converter(overload)(converter)
    return provenance()


def provenance() -> dict[str, str]:
    """Whose converter each operator has: "torchair", "mla_fusion" or "none"."""
    return {name: _owner(_overload(name)) for name in OPERATORS}


def _overload(name: str) -> Any:
    packet = getattr(torch.ops.npu, name, None)
    return None if packet is None else packet.default


def _owner(overload: Any) -> str:
    converter = None if overload is None else _registered(overload)
    if converter is None:
        return "none"
    return "mla_fusion" if converter.__module__.startswith("mla_fusion.") else "torchair"


def _registered(overload: Any) -> Callable[..., Any] | None:
    """torchair keeps a converter on the operator itself, and where that cannot be, in a table."""
    import_module("torchair._ge_concrete_graph.ge_converter.custom")
    table = import_module("torchair._ge_concrete_graph.fx2ge_converter")._CONVERTERS
    return getattr(overload, "_ge_converter", None) or table.get(overload)
