"""Joins of one tensor with empty ones: ``cat((rotated, q[..., 64:]))`` where the slice keeps
nothing is ``rotated``.

A slice of width 0 reads no element, so it is no reader of what the kernel replaces.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from mla_fusion.fx.kinds import op_name


def found(graph: Graph) -> bool:
    return any(_only_part(node) is not None for node in graph.nodes if node.op == "call_function")


def drop(graph: Graph) -> None:
    """Let the readers of such a join read its one part, and erase what nobody reads any more."""
    for node in list(graph.nodes):
        part = _only_part(node) if node.op == "call_function" else None
        if part is None:
            continue
        unread = [arg for arg in node.all_input_nodes if arg is not part]
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        while unread:
            empty = unread.pop()
            if not empty.users and empty.op == "call_function":
                unread += empty.all_input_nodes
                graph.erase_node(empty)


def _only_part(node: Node) -> Node | None:
    """The one operand of a join that has elements, where the join is that operand."""
    if (
        op_name(node) != "aten::cat"
        or not isinstance(node.args[0], (list, tuple))
        or len(node.args[0]) < 2
    ):
        return None
    parts = [part for part in node.args[0] if isinstance(part, Node) and not _is_empty(part)]
    if len(parts) != 1:
        return None
    value, whole = parts[0].meta.get("val"), node.meta.get("val")
    if (
        not isinstance(value, torch.Tensor)
        or not isinstance(whole, torch.Tensor)
        or value.dtype != whole.dtype
    ):
        return None
    return parts[0] if str(value.shape) == str(whole.shape) else None


def _is_empty(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(
        isinstance(size, int) and size == 0 for size in value.shape
    )
