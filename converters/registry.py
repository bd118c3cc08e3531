"""Which operators have a converter here, and which of them are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from mla_fusion.converters import format_cast, prolog, unfused
from mla_fusion.meta.prolog import PROLOGS

from mla_fusion.compat import ge_converter, set_ge_converter

OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: prolog.converter(operator) for name, operator in PROLOGS.items()},
    "npu_format_cast": format_cast.format_cast,
}

# operators of unfused graphs, by overload: converters that are in use only where asked for
UNFUSED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.index_copy.default: unfused.index_copy,
    torch.ops.aten.index_put.default: unfused.index_put,
    torch.ops.aten.repeat_interleave.self_int: unfused.repeat_interleave,
}


def register(force: bool = False) -> dict[str, str]:
    """Register what torchair lacks; ``force`` registers all. Says whose converter each operator has
    now.
    """
    torchair = import_module("torchair")
    for name, converter in OPERATORS.items():
        overload = _overload(name)
        if overload is not None and (force or ge_converter(overload) is None):
            torchair.register_fx_node_ge_converter(overload)(converter)
    return provenance()


def register_unfused() -> dict[str, str]:
    """Let torchair convert unfused MLA graphs too: index_copy, index_put and repeat_interleave.

    Not part of `register`: without them torchair refuses such a graph by name, which tells a user
    that a prologue was not fused. A converter of torchair's own that does more than raise stays.
    Says whose converter each operator has now, as `provenance` does.
    """
    torchair = import_module("torchair")
    for overload, converter in UNFUSED.items():
        existing = ge_converter(overload)
        if existing is None or only_raises(existing):
            torchair.register_fx_node_ge_converter(overload)(converter)
    return {str(overload): _owner(overload) for overload in UNFUSED}


@contextmanager
def unfused_registered() -> Iterator[dict[str, str]]:
    """`register_unfused` for the length of a ``with`` block; afterwards torchair refuses again what
    it refused.
    """
    kept = {overload: ge_converter(overload) for overload in UNFUSED}
    try:
        yield register_unfused()
    finally:
        for overload, converter in kept.items():
            set_ge_converter(overload, converter)


def provenance() -> dict[str, str]:
    """Whose converter each operator has: "torchair", "mla_fusion" or "none"."""
    return {name: _owner(_overload(name)) for name in OPERATORS}


def _overload(name: str) -> Any:
    packet = getattr(torch.ops.npu, name, None)
    return None if packet is None else packet.default


def _owner(overload: Any) -> str:
    converter = None if overload is None else ge_converter(overload)
    if converter is None:
        return "none"
    return "mla_fusion" if converter.__module__.startswith("mla_fusion.") else "torchair"


def only_raises(converter: Callable[..., Any]) -> bool:
    """torchair declares a converter for most of ATen, and many do nothing but raise."""
    code = getattr(converter, "__wrapped__", converter).__code__
    return code.co_names in (("NotImplementedError",), ("RuntimeError",))
