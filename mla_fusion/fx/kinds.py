"""Questions about a node, answered from the operator table and the node's arguments."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import HigherOrderOperator, OpOverload
from mla_fusion.fx.sizes import has_symbols, is_size, is_symbolic
from mla_fusion.operators.known import (
    COUNTS,
    DIAGONALS,
    ELEMENTWISE,
    FILLED,
    FILLED_WITH,
    LENT,
    REDUCTIONS,
    SELECTIONS,
    SIZED,
    VIEWS,
    Form,
    Kind,
    argument,
    is_getitem,
    kind_by_arguments,
    known,
    operator_of,
    shape_of,
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


def holds_at_any_length(node: Node) -> bool:
    """Of a node made of literals and symbolic sizes: is each of its elements the same whatever the
    sizes are?

    So are fills, counts from a literal start, and what moves or combines such values element by
    element; a sum over a symbolic axis, its last element, or a join along it are not.
    """
    inputs = [arg for arg in node.all_input_nodes if isinstance(value_of(arg), torch.Tensor)]
    name = word(node)
    if size_among_numbers(node) is not None:
        return False
    if not any(is_symbolic(size) for arg in inputs for size in shape_of(arg)):
        if name in COUNTS:
            return not any(isinstance(argument(node, part), Node) for part in ("start", "step"))
        ends = (*node.args[1:], *node.kwargs.values())
        return name not in SELECTIONS or not any(isinstance(arg, Node) for arg in ends)
    if name in SELECTIONS:
        axis = argument(node, "dim", 0)
        return isinstance(axis, int) and not is_symbolic(shape_of(inputs[0])[axis])
    return name in ELEMENTWISE or name in LENT or operator_of(node).row.form in VIEWS


def reduces_a_symbolic_axis(node: Node) -> bool:
    """Is the node a sum, or the like, over an axis of symbolic length?"""
    source = node.args[0] if word(node) in REDUCTIONS and node.args else None
    value = value_of(source) if isinstance(source, Node) else None
    if not isinstance(value, torch.Tensor) or not has_symbols(value.shape):
        return False
    return any(is_symbolic(value.shape[axis]) for axis in named_axes(node, value.dim()))


def named_axes(node: Node, rank: int) -> list[int]:
    """The axes that an operator names, counted from the first; all of them where it names none."""
    given = (argument(node, name) for name in ("dim", "dims", "dimension"))
    axes: Any = next((one for one in given if one is not None), [])
    axes = axes if isinstance(axes, (list, tuple)) else [axes]
    return [axis % rank for axis in axes] or list(range(rank))


def diagonal_axes(node: Node) -> set[int] | None:
    """The two axes whose diagonal the node is; None for any other node, or for a diagonal beside
    that one.
    """
    if word(node) not in DIAGONALS or argument(node, "offset", 0) != 0:
        return None
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    axes = {argument(node, name, at) % rank for name, at in (("dim1", 0), ("dim2", 1))}
    return axes if len(axes) == 2 else None


def named_sizes(node: Node) -> list[Any]:
    """The sizes of a value, as numbers where a view names them: of ``view(-1, 8)`` torch has a
    quotient for the 8.
    """
    sizes = list(shape_of(node))
    if word(node) not in SIZED or len(node.args[1]) != len(sizes):  # type: ignore[arg-type]
        return sizes
    named = zip(node.args[1], sizes, strict=True)  # type: ignore[arg-type]
    return [by if isinstance(by, int) and by >= 0 else size for by, size in named]


def size_among_numbers(node: Node) -> Node | None:
    """A symbolic size that the node computes with; one that only says how long the result is does
    not count.
    """
    name = word(node)
    if name in ELEMENTWISE or name == "scalar_tensor":
        given = (*node.args, *node.kwargs.values())
    elif name in FILLED_WITH or name == "full":
        given = (argument(node, "fill_value"),)
    else:
        return None
    return next((arg for arg in given if isinstance(arg, Node) and is_size(arg)), None)


def borrows_only(node: Node) -> bool:
    """Does the node, contiguous, take no more than a shape, a dtype or a device from the tensor it
    is given?
    """
    return word(node) in LENT and bool(node.meta["val"].is_contiguous())


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


_FAITHFUL = (
    frozenset((torch.bfloat16, torch.float32, torch.float64)),
    frozenset((torch.int32, torch.int64)),
)


def cast_ends(node: Node) -> frozenset[torch.dtype]:
    """The dtypes that a cast joins; empty for any other node."""
    if not is_cast(node) or not node.args or not isinstance(node.args[0], Node):
        return frozenset()
    values = (value_of(node.args[0]), value_of(node))
    return frozenset(value.dtype for value in values if isinstance(value, torch.Tensor))


def is_faithful_cast(node: Node) -> bool:
    """A cast that keeps every bfloat16 number, or every index: no float8, float16 or small integer
    in between.
    """
    ends = cast_ends(node)
    return bool(ends) and any(ends <= kept for kept in _FAITHFUL)


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


def tensor_held(node: Node) -> torch.Tensor | None:
    """The tensor that a get_attr node reads, where its numbers can be read: no parameter, no
    subclass, not on meta.
    """
    value = attribute(node)
    is_plain = type(value) is torch.Tensor and value.device.type != "meta"
    return value if is_plain else None


def is_literal(node: Node) -> bool:
    """Does a get_attr node read a literal of the trace? A buffer, or a tensor that the model
    captures, may be written between calls.
    """
    return all(word(user) in ("lift_fresh_copy", "lift_fresh") for user in node.users)
