"""Questions about a node, answered from the operator table and the node's arguments."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import HigherOrderOperator, OpOverload
from mla_fusion.operators.known import (
    FILLED,
    LENT,
    Form,
    Kind,
    argument,
    is_getitem,
    kind_by_arguments,
    known,
    operator_of,
    value_of,
    word,
)

__all__ = ["Kind", "argument", "is_getitem", "operator_of", "word"]

# Casts among these are looked through when a group of nodes is asked what it means. float16 is
# among them so that a float16 model is recognised, and then refused by name; float8 and integers
# are quantisation.
MODEL_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def kind_of(node: Node) -> Kind:
    """The class of the call, its arguments looked at. (Whether a mask or an index is a literal, the
    view knows.)
    """
    return kind_by_arguments(node, operator_of(node))


def op_name(node: Node) -> str:
    """``namespace::name`` of the operator without its overload; "" for anything that is not one."""
    return operator_of(node).name if called(node) is node.target else known(called(node)).name


def called(node: Node) -> Any:
    """What the node calls: of a call in which AOT autograd wraps an operator that writes its
    arguments, that operator.
    """
    target = node.target
    wraps = isinstance(target, HigherOrderOperator) and "functionalized" in target.name()
    return node.args[0] if wraps else target


def filled_with(node: Node) -> float | None:
    """The number that every element of the node is, where its operator says so; NaN for memory not
    yet written.
    """
    row = operator_of(node).row
    if row.word not in LENT:  # most are such
        return None
    if row.form is Form.FULL:
        value, held = argument(node, "fill_value"), value_of(node)
        if not isinstance(value, (int, float)) or not isinstance(held, torch.Tensor):
            return None
        return _as_dtype(float(value), held.dtype)
    return FILLED.get(row.form)


@cache
def _as_dtype(value: float, dtype: torch.dtype) -> float:
    """The number as a tensor of the dtype holds it: 1.5 is 1 in an int64 one."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).to(torch.float64).item()


def is_view(node: Node) -> bool:
    """Does the node re-index one tensor, changing no element? (A getitem of a split counts.)"""
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, Node) and operator_of(source).view
    return operator_of(node).view


def is_reshape(node: Node) -> bool:
    """Does the node keep elements, their order and their number?"""
    return operator_of(node).reshape


def is_float(dtype: torch.dtype) -> bool:
    """Real or complex."""
    return dtype.is_floating_point or dtype.is_complex


def one_dtype(node: Node) -> torch.dtype | None:
    """Of the one tensor that the node holds; None where it holds another thing, or nothing."""
    value = value_of(node)
    return value.dtype if isinstance(value, torch.Tensor) else None


def holds_integers(node: Node) -> bool:
    """Integers, or bools."""
    dtype = one_dtype(node)
    return dtype is not None and not is_float(dtype)


def is_cast(node: Node) -> bool:
    return operator_of(node).cast


def cast_ends(node: Node) -> frozenset[torch.dtype]:
    """The dtypes that a cast joins; empty for any other node."""
    if not is_cast(node) or not node.args or not isinstance(node.args[0], Node):
        return frozenset()
    values = (value_of(node.args[0]), value_of(node))
    return frozenset(value.dtype for value in values if isinstance(value, torch.Tensor))


def is_model_cast(node: Node) -> bool:
    """A cast from one of a model's floats to another."""
    ends = cast_ends(node)
    return bool(ends) and ends <= _MODEL_FLOATS


_MODEL_FLOATS = frozenset(MODEL_FLOATS)


def is_writer(node: Node) -> bool:
    return operator_of(node).writer


def has_effect(node: Node) -> bool:
    """Must the node stay where it is even if nobody reads it?"""
    return operator_of(node).effect


def is_mutating(node: Node) -> bool:
    """Does the operator's schema say that it changes an argument?"""
    return operator_of(node).mutates


def attribute(node: Node) -> Any:
    """What a get_attr node reads of its module; None for another node, or where the module has
    nothing of that name.
    """
    if node.op != "get_attr":
        return None
    try:
        return attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return None


def reads_by_strides(node: Node) -> bool:
    """Does the node read memory by strides of its own?"""
    return op_name(node).startswith("aten::as_strided")


def has_reader_by_strides(graph: Graph) -> bool:
    one_of_each = {node.target: node for node in graph.nodes}
    return any(map(reads_by_strides, one_of_each.values()))


def heeds_strides(node: Node) -> bool:
    """May the result depend on how operands lie in memory? So it is of random operators, whose
    numbers come in the order of the memory, of custom ones, but for those that say otherwise, and
    of operators that run other graphs: these were traced with strides.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return isinstance(target, HigherOrderOperator)
    if operator_of(node).random:
        return True
    return target.namespace not in _BUILT_IN and torch.Tag.flexible_layout not in target.tags


_BUILT_IN = ("aten", "prims", "npu", "_c10d_functional")


def is_literal(node: Node) -> bool:
    """Does a get_attr node read a literal of the trace? A buffer, or a tensor that the model
    captures, may be written between calls.
    """
    return all(word(user) in ("lift_fresh_copy", "lift_fresh") for user in node.users)
