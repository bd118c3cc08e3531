"""What each operator does to values: its row of the table, and what torch says of it.

Every operator is in exactly one class (:class:`Kind`). A fact about a group of nodes is read off
random float64 probes; that proves the fact for all inputs where the group is made of movement and
analytic steps alone: two analytic functions on a connected domain that agree at a random point
agree everywhere, with probability 1. A choice step picks by the values it reads, so what probes
show says nothing of other values, and the group ends there.

What torch can say is taken from torch: randomness from its tag ``nondeterministic_seeded``, writes
and views from the alias annotations of the schema. The rest is in the table. An operator without a
row is OPAQUE until somebody adds one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import OpOverload, OpOverloadPacket, overload_name, packet_name, schema_of
from mla_fusion.operators.table import NO_ROW, ROWS, Form, Kind, Row, row_of, words

VIEWS = frozenset((Form.RESIZE, Form.RESHAPE, Form.EXPAND, Form.RUN, Form.PERMUTE, Form.VIEW))
# Views that keep every element and their order, so that a producer may stand in for them.
RESHAPES = frozenset((Form.RESIZE, Form.RESHAPE))

EXPANDS = words(Form.EXPAND)
STATEMENTS = words(Form.STATED)
ELEMENTWISE = words(Form.ELEMENTWISE, Form.ROTATION, Form.CAST)
LENT = words(Form.ZEROS, Form.ONES, Form.UNWRITTEN, Form.FULL, Form.STRIDED)
GATHER = frozenset(row.word for row in ROWS if row.kind is Kind.GATHER)

# What fills a tensor of a lent shape. A value computed from memory that nothing was written to
# carries no fact.
FILLED = {Form.ZEROS: 0.0, Form.ONES: 1.0, Form.UNWRITTEN: float("nan")}

# Overloads of movement that are told their places by a tensor.
_PLACED_BY_TENSOR = frozenset(
    """
    aten::narrow.Tensor aten::repeat_interleave.self_Tensor aten::repeat_interleave.Tensor
    aten::tensor_split.tensor_indices_or_sections
    """.split()
)

# Operators of npu that a walk or a probe may go through, where they move or are analytic.
_TRANSPARENT = (Form.NORM, Form.ROTATION, Form.CAST, Form.RESHAPE)


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """What is known of a call target. Made once for each: the pass asks for it a dozen times for
    every node.

    name        ``namespace::name`` without the overload; "" for nodes that call nothing
    row         of the table
    kind        its class, as far as the target alone tells; ``kinds.kind_of`` looks at the
                arguments too
    mutates     does the schema say that it changes an argument?
    effect      must a call stay where it is even if nobody reads it?
    runs        pure, and runnable on probes?
    aliases     may a result be memory of an argument?
    functional  of ``add_`` and the like, the operator that makes a new tensor instead
    """

    target: Any
    name: str = ""
    row: Row = NO_ROW
    kind: Kind = Kind.OPAQUE
    mutates: bool = False
    effect: bool = False
    runs: bool = False
    view: bool = False
    reshape: bool = False
    cast: bool = False
    writer: bool = False
    aliases: bool = False
    functional: Operator | None = None

    @property
    def random(self) -> bool:
        return self.kind is Kind.RANDOM

    @classmethod
    def describe(cls, target: Any) -> Operator:
        name = _name_of(target)
        row = row_of(name)
        mutates = isinstance(target, OpOverload) and schema_of(target).is_mutable
        effect = mutates or row.kind is Kind.EFFECT
        kind = _kind(target, name, row, effect)
        pure = name.partition("::")[0] in ("aten", "prims", "_operator", "python") and not effect
        bits = overload_name(target) == "dtype"  # view.dtype reads memory as another type
        return cls(
            target,
            name,
            row,
            kind,
            mutates,
            effect,
            runs=(pure and kind is not Kind.RANDOM and row.form is not Form.LAYER)
            or (name.startswith("npu::") and row.form in _TRANSPARENT),
            view=row.form in VIEWS and not bits and kind is not Kind.GATHER,
            reshape=row.form in RESHAPES and not bits,
            cast=row.form is Form.CAST,
            writer=row.kind is Kind.WRITER,
            aliases=may_alias(target) or row.form in VIEWS,
            functional=_functional(target, name) if mutates else None,
        )


NO_OPERATOR = Operator(None)
KNOWN: dict[int, Operator] = {}  # by id of the target, which its Operator keeps alive


def known(target: Any) -> Operator:
    """The table's entry for a call target."""
    found = KNOWN.get(id(target))
    return found if found is not None else KNOWN.setdefault(id(target), Operator.describe(target))


def _kind(target: Any, name: str, row: Row, effect: bool) -> Kind:
    """Torch's own tag first, then the row, then what the schema says of aliases."""
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        return Kind.RANDOM
    if effect:
        return Kind.EFFECT
    if overload_name(target) == "dtype" and row.form in VIEWS:
        return Kind.CHOICE  # a float's bits as integers are no analytic function of it
    if f"{name}.{overload_name(target)}" in _PLACED_BY_TENSOR:
        return Kind.GATHER
    if row.kind is not None:
        return row.kind
    if name.startswith("aten::") and _is_alias(target):
        return Kind.MOVEMENT
    return Kind.OPAQUE


def _is_alias(target: Any) -> bool:
    """Does the schema say that every result is a view of the first argument?"""
    if not isinstance(target, OpOverload) or "as_strided" in schema_of(target).name:
        return False  # as_strided reads memory, whose layout a probe need not have
    arguments, results = schema_of(target).arguments, schema_of(target).returns
    return bool(arguments and results) and all(
        side.alias_info is not None and not side.alias_info.is_write
        for side in (arguments[0], *results)
    )


def may_alias(target: Any) -> bool:
    """Does the schema say of any result that it may be an argument's memory?"""
    if not isinstance(target, OpOverload):
        return False
    return any(result.alias_info is not None for result in schema_of(target).returns)


def _functional(target: Any, name: str) -> Operator | None:
    """``aten::add`` of ``aten::add_``: decompositions update values of their own making in
    place.
    """
    namespace, _, base = name.partition("::")
    arguments = schema_of(target).arguments
    changed = [arg.alias_info is not None and arg.alias_info.is_write for arg in arguments]
    if (
        namespace != "aten"
        or not base.endswith("_")
        or changed != [True] + [False] * (len(arguments) - 1)
    ):
        return None
    functional = getattr(getattr(torch.ops.aten, base[:-1], None), overload_name(target), None)
    return Operator.describe(functional) if functional is not None else None


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverload):
        return schema_of(target).name
    if isinstance(target, OpOverloadPacket):
        return packet_name(target)
    return f"python::{getattr(target, '__name__', target)}"


# -- operators whose class depends on their arguments


def _division(node: Node) -> Kind:
    return Kind.ANALYTIC if argument(node, "rounding_mode", None) is None else Kind.CHOICE


def _vector_norm(node: Node) -> Kind:
    """The Euclidean one alone is analytic away from zero."""
    order = argument(node, "ord", argument(node, "p", 2))
    return Kind.ANALYTIC if order in (2, 2.0, None) else Kind.CHOICE


def _clamped_logit(node: Node) -> Kind:
    """With an epsilon it clamps first."""
    return Kind.ANALYTIC if argument(node, "eps", None) is None else Kind.CHOICE


_BY_ARGUMENTS: dict[str, Callable[[Node], Kind]] = {
    "div": _division,
    "linalg_vector_norm": _vector_norm,
    "norm": _vector_norm,
    "logit": _clamped_logit,
}


def kind_by_arguments(node: Node, entry: Operator) -> Kind:
    """The class of a call, where its arguments decide it; else the operator's."""
    by_arguments = _BY_ARGUMENTS.get(entry.row.word)
    if by_arguments is not None:
        return by_arguments(node)
    return _quiet(node, entry) if entry.kind is Kind.RANDOM else entry.kind


def _quiet(node: Node, entry: Operator) -> Kind:
    """A call that may draw numbers, and by its arguments draws none."""
    if entry.row.form is Form.DROPOUT and (
        argument(node, "train", True) is False or argument(node, "p", 0.5) == 0
    ):
        return Kind.MOVEMENT
    return Kind.OPAQUE if argument(node, "dropout_p", None) == 0 else Kind.RANDOM  # attention, say


# -- what the tracer noted of a node


def value_of(node: Node) -> Any:
    """What stands for its value: a fake tensor, several, or a size; None where nothing does."""
    return node.meta.get("val")


def shape_of(node: Node) -> Any:
    """Of a node that holds one tensor."""
    return node.meta["val"].shape


def dtype_of(node: Node) -> torch.dtype:
    """Of a node that holds one tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_TORCHS_OWN = ("aten", "prims", "prim", "npu", "_operator", "quantized", *_COLLECTIVES)


def is_torchs_own(target: Any) -> bool:
    """Is it an operator of torch's or torch_npu's, or none?"""
    return _namespace(target) in ("", *_TORCHS_OWN)


def _namespace(target: Any) -> str:
    return target.namespace if isinstance(target, OpOverload) else ""


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


# -- one node


def operator_of(node: Node) -> Operator:
    """What the node calls; of an in-place step on a tensor that nothing else reads, the functional
    form.
    """
    entry = KNOWN.get(id(node.target))
    if entry is None:
        if node.op != "call_function":
            return NO_OPERATOR
        entry = known(node.target)
    functional = entry.functional
    return entry if functional is None or not _owns_its_target(node) else functional


def _owns_its_target(node: Node) -> bool:
    base = node.args[0]
    if not isinstance(base, Node) or base.op != "call_function" or len(base.users) > 1:
        return False
    made_by = operator_of(base)
    return not (made_by.aliases or made_by.effect or is_getitem(base))


def word(node: Node) -> str:
    """What every room calls the operator: the word of its row; "" for anything without one."""
    return operator_of(node).row.word


def calls_of(graph: Graph, words: Container[str]) -> Iterator[Node]:
    """The nodes whose word is among these, in the order of the graph. A graph has thousands of
    nodes, and calls few operators.
    """
    # by their ids: to hash an operator is a call of Python's
    called = {id(node.target): node.target for node in graph.nodes if node.op == "call_function"}
    rows = ((name, known(target)) for name, target in called.items())
    targets = {
        name
        for name, entry in rows
        if any(form and form.row.word in words for form in (entry, entry.functional))
    }
    for node in graph.nodes if targets else ():
        if id(node.target) in targets and node.op == "call_function" and word(node) in words:
            yield node


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument by its schema name; where the graph omits it, the schema's own default.

    AOT drops arguments that equal the schema default, and the defaults differ from operator to
    operator (epsilon: 1e-6 in npu_rms_norm, 1e-5 in npu_mla_prolog), so they are never guessed.
    """
    target = node.target
    if isinstance(target, OpOverload):
        for position, arg in enumerate(schema_of(target).arguments):
            if arg.name == name:
                if name in node.kwargs:
                    return node.kwargs[name]
                if position < len(node.args) and not arg.kwarg_only:
                    return node.args[position]
                return arg.default_value if arg.has_default_value() else default
    return node.kwargs.get(name, default)
