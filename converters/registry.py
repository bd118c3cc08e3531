"""Registers the converters, and tells which of them are in use."""

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

# converters of unfused graphs, by overload; only `register_unfused` registers them
UNFUSED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.index_copy.default: unfused.index_copy,
    torch.ops.aten.index_put.default: unfused.index_put,
    torch.ops.aten.repeat_interleave.self_int: unfused.repeat_interleave,
}


def register(force: bool = False) -> dict[str, str]:
    """Registers the converters that torchair lacks, or all if ``force``. Returns `provenance`."""
    for name, converter in OPERATORS.items():
        overload = _overload(name)
        if force or ge_converter(overload) is None:
            import_module("torchair").register_fx_node_ge_converter(overload)(converter)
    return provenance()


def register_unfused() -> dict[str, str]:
    """Registers converters of unfused MLA graphs: index_copy, index_put and repeat_interleave.

    `register` leaves them out: torchair then refuses such a graph by name, which shows a user that
    a prologue was not fused. A converter of torchair's own that does more than raise stays. Returns
    whose converter each operator has now, as `provenance` does.
    """
    for overload, converter in UNFUSED.items():
        existing = ge_converter(overload)
        if existing is None or only_raises(existing):
            import_module("torchair").register_fx_node_ge_converter(overload)(converter)
    return {str(overload): _owner(overload) for overload in UNFUSED}


@contextmanager
def unfused_registered() -> Iterator[dict[str, str]]:
    """Yields what `register_unfused` returns, and restores torchair's converters afterwards."""
    converters = {overload: ge_converter(overload) for overload in UNFUSED}
    try:
        yield register_unfused()
    finally:
        for overload, converter in converters.items():
            set_ge_converter(overload, converter)


def provenance() -> dict[str, str]:
    """Returns whose converter each operator has: "torchair", "mla_fusion" or "none"."""
    return {name: _owner(_overload(name)) for name in OPERATORS}


def _overload(name: str) -> Any:
    return getattr(torch.ops.npu, name).default


def _owner(overload: Any) -> str:
    """Returns "torchair", "mla_fusion" or "none"."""
    converter = ge_converter(overload)
    if converter is None:
        return "none"
    return "mla_fusion" if converter.__module__.startswith("mla_fusion.") else "torchair"


def only_raises(converter: Callable[..., Any]) -> bool:
    """Returns True if a converter only raises, as many of torchair's converters of ATen do."""
    code = getattr(converter, "__wrapped__", converter).__code__
    return code.co_names in (("NotImplementedError",), ("RuntimeError",))
