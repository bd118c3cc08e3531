"""Steps that are one of their operands: ``cat((rotated, q[..., 64:]))`` where the slice keeps
nothing is ``rotated``, ``slots[:]`` is ``slots``, and what is assigned to all is all. And what
torch.export states before each cast, the dtype of a tensor: nobody reads it, and torch would keep
all that it is about. What it states of an input stays: the next call may bring another.

A slice of width 0 reads no element, so it is no reader of what the kernel replaces. AOT leaves out
slices of the whole only where the size is static.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from mla_fusion.fx import in_place
from mla_fusion.fx.kinds import argument, has_effect, operator_of, word
from mla_fusion.fx.sizes import same_shape
from mla_fusion.fx.walk import INPUTS
from mla_fusion.operators.forms import join_of
from mla_fusion.operators.known import STATEMENTS, calls_of, may_alias, value_of

_SLICES = {"slice": 0, "slice_scatter": 1}  # which argument it may be
_STEPS = frozenset((*_SLICES, "cat"))


def found(graph: Graph) -> bool:
    return bool(_droppable(graph))


def drop(graph: Graph) -> None:
    """Let the readers of such a step read that operand, and erase what nobody reads any more."""
    for node in _droppable(graph):
        part = _only_part(node)
        unread = [arg for arg in node.all_input_nodes if arg is not part]
        if part is not None:
            node.replace_all_uses_with(part)
        graph.erase_node(node)
        while unread:
            empty = unread.pop()
            if not empty.users and empty.op == "call_function" and not _stays(empty):
                unread += empty.all_input_nodes
                graph.erase_node(empty)


def _stays(node: Node) -> bool:
    """Even if nobody reads it."""
    return has_effect(node) or operator_of(node).random


def _droppable(graph: Graph) -> list[Node]:
    """Such steps, but for copies of memory of which one side is written in place."""
    steps = calls_of(graph, _STEPS)
    parts = {node: part for node in steps if (part := _only_part(node)) is not None}
    written = in_place.written(graph) if parts else set()
    return [
        *(node for node in calls_of(graph, STATEMENTS) if not _is_of_input(node)),
        *(
            node
            for node, part in parts.items()
            if may_alias(node.target) or written.isdisjoint(map(in_place.memory_of, (node, part)))
        ),
    ]


def _is_of_input(statement: Node) -> bool:
    return any(in_place.root(node).op in INPUTS for node in statement.all_input_nodes)


def _only_part(node: Node) -> Node | None:
    """What a slice takes or assigns, or the one operand of a join that has elements, where the step
    is that operand.
    """
    name = word(node)
    _, given = join_of(node) or (0, ())
    if name in _SLICES and argument(node, "step", 1) == 1:
        given = (node.args[_SLICES[name]],)
    elif len(given) < 2:
        return None
    parts = [part for part in given if isinstance(part, Node) and not _is_empty(part)]
    if len(parts) != 1:
        return None
    value, whole = value_of(parts[0]), value_of(node)
    if (
        not isinstance(value, torch.Tensor)
        or not isinstance(whole, torch.Tensor)
        or value.dtype != whole.dtype
    ):
        return None
    return parts[0] if same_shape(value.shape, whole.shape) else None


def _is_empty(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and any(
        isinstance(size, int) and size == 0 for size in value.shape
    )
