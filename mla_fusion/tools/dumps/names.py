"""Lists what a name in a dump may become: an operator of four namespaces, an entry of a table, or
nothing.

A dump is data that somebody else wrote. No name of it is looked up on a module, no module is
imported for it, and reading a dump calls no operator.
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
    **{call.__name__: call for call in (*BINARY.values(), operator.neg, operator.getitem)},
    **{f"torch.{name}": vars(torch)[name] for name in _SIZES if name in vars(torch)},
}
del FUNCTIONS["pow"]  # a single line of a dump could make a number of any length
_OBJECTS = (torch.dtype, torch.layout, torch.memory_format)
_FILES = {"filename", "fd", "fd_to_close"}


class Unknown(ValueError):
    """Raised for a name among the arguments that is none of a graph's objects."""


def target(name: str) -> Any:
    """Returns the operator of a name such as ``aten.mm.default``, ``getitem``, ``torch.sym_max``.

    Returns None for any other name. An operator whose arguments name a file, or that takes no
    tensor and is not torch's, is not on the list. Nothing is cached: torch_npu may be loaded later,
    and defines operators again.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    namespace, _, name = name.partition(".")
    packet, _, last = name.partition(".")
    schema = f"{namespace}::{packet}" + (f".{last}" if last != "default" else "")
    # an attribute is read only if the dispatcher knows an operator of that name
    if namespace not in NAMESPACES or not last.isidentifier() or not has_schema(schema):
        return None
    overload = getattr(getattr(getattr(torch.ops, namespace), packet), last, None)
    if not isinstance(overload, OpOverload):
        return None
    arguments = {argument.name: str(argument.type) for argument in schema_of(overload).arguments}
    is_safe = namespace in ("aten", "prims") or "Tensor" in str(arguments)
    return overload if is_safe and not arguments.keys() & _FILES else None


def literal(name: str) -> Any:
    """Returns the object of a dotted name among the arguments. Raises Unknown.

    A device becomes the CPU, because everything here runs there.
    """
    if name.startswith("device:"):
        return torch.device("cpu")
    if name.lstrip("-") in ("inf", "nan"):
        return float(name)
    if name == "Ellipsis":
        return ...
    value = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(value, _OBJECTS):
        raise Unknown(name)
    return value


def dtype(name: str) -> torch.dtype | None:
    """Returns torch's dtype of a name, or None."""
    value = vars(torch).get(name)
    return value if isinstance(value, torch.dtype) else None
