"""What a name in a dump may become: an operator of a fixed list of namespaces, an entry of a fixed
table, or nothing.

A dump is data that somebody else wrote. No name of it is looked up on a module, no module is
imported for it, and nothing is called but operators without effects, on tensors without storage and
with a bounded result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.compat import OpOverload, has_kernel, has_schema, schema_of, tree_leaves
from mla_fusion.operators.known import JOINERS, SELECTIONS, Kind, known
from mla_fusion.operators.table import row_of
from mla_fusion.tools.dumps.fx_text import OPERATORS

NAMESPACES = ("aten", "prims", "npu", "atb")
_SIZES = "sym_max sym_min sym_sum sym_ite sym_not sym_int sym_float".split()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **OPERATORS, **{f"torch.{name}": vars(torch)[name] for name in _SIZES if name in vars(torch)},
}  # fmt: skip
_WORDS = {"Ellipsis": Ellipsis, "true": True, "false": False}
_OBJECTS = (torch.dtype, torch.layout, torch.memory_format)
_KERNELS = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
_FILES = {"filename", "fd", "fd_to_close"}
_IMPURE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)

MOST_PARTS = 1 << 12  # of a value that is taken apart; models have a few
MOST_ELEMENTS = 1 << 12  # of a list among the arguments
MOST_AXES = 64  # of a tensor (torch's own limit), and of a list that may become axes
_LARGEST = 1 << 63  # of an integer
_EXPONENT = 64

Args = Sequence[Any]
Kwargs = dict[str, Any]


class Unknown(ValueError):
    """A name among the arguments that stands for nothing which a graph may hold."""


def target(name: str) -> Any:
    """The operator of a name such as ``aten.mm.default``, ``getitem`` or ``torch.sym_max``; None
    for none.

    Asked of torch each time: torch_npu, where it is loaded later, defines operators anew.
    """
    return FUNCTIONS[name] if name in FUNCTIONS else _overload(name)


def _overload(name: str) -> OpOverload | None:
    """The dispatcher is asked first, so that an attribute is read only where it is that of an
    operator.
    """
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    schema = f"{namespace}::{packet}" + (f".{overload}" if overload != "default" else "")
    if namespace not in NAMESPACES or not overload.isidentifier() or not has_schema(schema):
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload, None)
    return found if isinstance(found, OpOverload) and _computes(found, namespace) else None


def _computes(found: OpOverload, namespace: str) -> bool:
    """Is the result made of tensors, or of numbers by torch itself, and not of a file or a
    socket?
    """
    arguments = schema_of(found).arguments
    made = namespace in ("aten", "prims") or any(
        "Tensor" in str(argument.type) for argument in arguments
    )
    return made and not {argument.name for argument in arguments} & _FILES


def literal(name: str) -> Any:
    """The object of a dotted name among the arguments. A device becomes the CPU, on which
    everything here runs.
    """
    if name.startswith("device:"):
        return torch.device("cpu")
    if name.lstrip("-") in ("inf", "nan"):
        return float(name)
    if name in _WORDS:
        return _WORDS[name]
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, _OBJECTS):
        raise Unknown(name)
    return found


def dtype(name: str) -> torch.dtype | None:
    """torch's dtype of that name."""
    found = vars(torch).get(name)
    return found if isinstance(found, torch.dtype) else None


# -- which calls say what a result is


def computable(found: Any, args: Args, kwargs: Kwargs, writes: bool = False) -> bool:
    """May a call that a dump names be made, with tensors without storage, to learn the shape of its
    result?

    ``writes``: also one that writes into such a tensor, but leaves it its shape.
    """
    if isinstance(found, OpOverload) and not (pure(found, writes) and _is_cheap(found)):
        return False
    return bounded(found, args, kwargs)


def fits(found: Any, args: Args, kwargs: Kwargs) -> bool:
    """Are there as many arguments as the schema of an operator asks for, tensors where it says
    so?
    """
    if not isinstance(found, OpOverload):
        return True
    arguments, given = schema_of(found).arguments, by_name(found, args, kwargs)
    return len(args) <= len(arguments) and all(
        argument.has_default_value()
        if argument.name not in given
        else str(argument.type) != "Tensor"
        or isinstance(given[argument.name], (torch.Tensor, *_NUMBERS))
        for argument in arguments
    )


def by_name(found: OpOverload, args: Args, kwargs: Kwargs) -> Kwargs:
    """The arguments of a call by the schema's names, as far as it has so many."""
    names = (argument.name for argument in schema_of(found).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_cheap(found: OpOverload) -> bool:
    """Is it one step, or known to come down to few? An LSTM unrolls its input, and combinations are
    without number.
    """
    entry = known(found)
    name = schema_of(found).name
    return (
        (entry.functional or entry).kind not in (Kind.OPAQUE, Kind.EFFECT)
        or not name.startswith("aten::")
        or has_kernel(found.name(), "Meta")
    )


def bounded(found: Any, args: Args, kwargs: Kwargs) -> bool:
    """Is the call made quickly, whatever numbers the dump holds?"""
    leaves = tree_leaves((list(args), kwargs))
    if any(_is_large(leaf) for leaf in leaves):
        return False
    if isinstance(found, OpOverload):
        if len(leaves) > MOST_ELEMENTS or any(
            isinstance(leaf, torch.Tensor) and leaf.dim() > MOST_AXES for leaf in leaves
        ):
            return False
        long = any(
            isinstance(arg, (list, tuple)) and len(arg) > MOST_AXES
            for arg in (*args, *kwargs.values())
        )
        return (not long or _takes_lists(found)) and _parts(found, args, kwargs) <= MOST_PARTS
    if found is operator.getitem:
        return isinstance(args[0], (tuple, list)) and all(
            isinstance(place, int) for place in args[1:]
        )
    if found is operator.pow and not (_is_small(args[0]) and _is_small(args[1])):
        return False
    return bool(args) and not kwargs and all(isinstance(side, _NUMBERS) for side in args)


def _takes_lists(found: OpOverload) -> bool:
    """Does a list of any length cost in proportion? (The axes of a mesh are as many as its list is
    long.)
    """
    namespace, _, name = schema_of(found).name.partition("::")
    return (
        namespace not in ("aten", "prims") or row_of(f"aten::{name}").word in JOINERS | SELECTIONS
    )


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_large(leaf: Any) -> bool:
    return (isinstance(leaf, int) and abs(leaf) > _LARGEST) or (
        isinstance(leaf, str) and len(leaf) > MOST_ELEMENTS
    )


def _is_small(side: Any) -> bool:
    return not isinstance(side, int) or abs(side) <= _EXPONENT


def pure(found: OpOverload, writes: bool = False) -> bool:
    """Says the schema that a call computes tensors or sizes, and changes nothing?

    Only operators that torch runs without storage count: an operator outside of the dispatcher has
    no such kernel.
    """
    schema = schema_of(found)
    kinds = {str(value.type) for value in schema.returns}
    mutates = schema.is_mutable and not (writes and torch.Tag.inplace_view not in found.tags)
    if mutates or not kinds or not kinds <= {"Tensor", "List[Tensor]", "int", "SymInt"}:
        return False
    runs = any(has_kernel(found.name(), key) for key in _KERNELS)
    return runs and not any(tag in found.tags for tag in _IMPURE)


def _parts(found: OpOverload, args: Args, kwargs: Kwargs) -> int:
    """At most so many tensors are in the result; more than are allowed where that is not told."""
    schema = schema_of(found)
    if all(str(value.type) != "List[Tensor]" for value in schema.returns):
        return 1
    given = by_name(found, args, kwargs)
    counts = [
        len(value)
        for name, value in given.items()
        if name != "self" and isinstance(value, (tuple, list))
    ]
    shape, axis = getattr(given.get("self"), "shape", ()), given.get("dim", 0)
    if counts or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return max(counts, default=MOST_PARTS + 1)
    each = given.get("split_size", 1)
    whole = shape[axis]
    known = (
        isinstance(whole, int) and isinstance(each, int) and each > 0 and "sections" not in given
    )
    return -(-whole // each) if known else MOST_PARTS + 1
