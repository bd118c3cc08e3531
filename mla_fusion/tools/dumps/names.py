"""The list of what a name in a dump may become: an operator of four namespaces, an entry of a fixed
table, or nothing.

A dump is data that somebody else wrote. No name of it is looked up on a module, no module is
imported for it, and reading one calls no operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.compat import OpOverload, has_schema, schema_of
from mla_fusion.tools.dumps.python_text import BINARY

NAMESPACES = ("aten", "prims", "npu", "atb")
_SIZES = "sym_max sym_min sym_sum sym_ite sym_not sym_int sym_float".split()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{one.__name__: one for one in (*BINARY.values(), operator.neg, operator.getitem)},
    **{f"torch.{name}": vars(torch)[name] for name in _SIZES if name in vars(torch)},
}
del FUNCTIONS["pow"]  # one line of a dump could ask for a number of any length
_OBJECTS = (torch.dtype, torch.layout, torch.memory_format)
_FILES = {"filename", "fd", "fd_to_close"}


class Unknown(ValueError):
    """A name among the arguments that stands for nothing which a graph may hold."""


def target(name: str) -> Any:
    """The operator of a name such as ``aten.mm.default``, ``getitem`` or ``torch.sym_max``; None
    for none.

    Asked of torch each time: torch_npu, where it is loaded later, defines operators anew.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    # The dispatcher is asked first, so that an attribute is read only where it is that of an
    # operator. What names a file, or is made of no tensor by somebody else than torch, is not on
    # the list.
    namespace, _, rest = name.partition(".")
    packet, _, last = rest.partition(".")
    schema = f"{namespace}::{packet}" + (f".{last}" if last != "default" else "")
    if namespace not in NAMESPACES or not last.isidentifier() or not has_schema(schema):
        return None
    overload = getattr(getattr(getattr(torch.ops, namespace), packet), last, None)
    if not isinstance(overload, OpOverload):
        return None
    arguments = {one.name: str(one.type) for one in schema_of(overload).arguments}
    is_safe = namespace in ("aten", "prims") or "Tensor" in str(arguments)
    return overload if is_safe and not arguments.keys() & _FILES else None


def literal(name: str) -> Any:
    """The object of a dotted name among the arguments. A device becomes the CPU, on which
    everything here runs.
    """
    if name.startswith("device:"):
        return torch.device("cpu")
    if name.lstrip("-") in ("inf", "nan"):
        return float(name)
    if name == "Ellipsis":
        return ...
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, _OBJECTS):
        raise Unknown(name)
    return found


def dtype(name: str) -> torch.dtype | None:
    """torch's dtype of that name."""
    found = vars(torch).get(name)
    return found if isinstance(found, torch.dtype) else None
