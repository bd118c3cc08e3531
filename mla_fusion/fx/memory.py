"""What leaves the graph shares memory as it did: who writes into one result changes no other than
before.

The kernel returns a value once, and a copy that the model made of it, or a view, is made of that
one. A copy is made a copy again, and a view a view of the other result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from mla_fusion.compat import storage_id
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import has_effect, is_getitem, is_view, signature, value_of, word
from mla_fusion.fx.walk import input_of, origin

aten = torch.ops.aten


def follow(builder: GraphBuilder, given: Graph, views: bool) -> None:
    """Let the results of the builder's graph share memory as those of ``given`` do. ``views``: they
    have the strides that they have there, so that one can be a view of another.
    """
    graph = builder.gm.graph
    before, after = leaving(given), leaving(graph)
    if not _in_one_mode([*given.find_nodes(op="placeholder"), *before]):
        return  # nothing says which of them share memory
    # behind the given inputs, the source may have parts of pools
    inputs = zip(*(of.find_nodes(op="placeholder") for of in (given, builder.source)), strict=False)
    # by the new root, what lies there in given
    held = {builder.copies[copied]: _memory(old) for old, copied in inputs}
    first: dict[object, int] = {}  # by the memory in given, the first result that lies there
    builder.at(graph.output_node(), {})
    with builder.propagating():
        for place, old in enumerate(before):
            memory = _memory(old)
            if memory is None:
                continue
            if held.get(_root(after[place]), memory) != memory:
                after[place] = builder.call(aten.clone.default, after[place])
            held.setdefault(_root(after[place]), memory)
            other = first.setdefault(memory, place)
            if views and _root(after[other]) is not _root(after[place]):
                _as_view(builder, before, after, other, place)
    values, end = iter(after), graph.output_node()
    unread = end.all_input_nodes
    end.args = map_arg(end.args, lambda _: next(values))
    for node in unread:
        while node.op == "call_function" and not node.users and not has_effect(node):
            above = input_of(node) or end
            graph.erase_node(node)
            node = above


def leaving(graph: Graph) -> list[Node]:
    """The nodes that a graph returns, in order."""
    found: list[Node] = []

    def take(node: Node) -> Node:
        found.append(node)
        return node

    map_arg(graph.output_node().args, take)
    return found


def _as_view(
    builder: GraphBuilder, before: Sequence[Node], after: list[Node], one: int, other: int
) -> None:
    """Make one of two results by the views that make it of the other in the given graph."""
    for base, made in ((one, other), (other, one)):
        path = _path(before[base], before[made])
        if path is not None:
            value = after[base]
            for step in path:
                value = builder.call(step.target, value, *step.args[1:], **step.kwargs)
            after[made] = value
            return


def _path(base: Node, made: Node) -> list[Node] | None:
    """The views of ``base`` that make it, first to last; None where it is none, or symbolic sizes
    take part.
    """
    path: list[Node] = []
    while made is not base:
        above = _lies_in(made)
        if above is None or is_getitem(made) or len(made.all_input_nodes) > 1:
            return None
        path.insert(0, made)
        made = above
    return path


def _root(node: Node) -> Node:
    return origin(node, _lies_in)


def _lies_in(node: Node) -> Node | None:
    """What a view is a view of."""
    if is_getitem(node):
        parts = node.args[0]
        return input_of(parts) if isinstance(parts, Node) and is_view(parts) else None
    aliases = signature(node.target).may_alias or word(node) == "_unsafe_view"
    return input_of(node) if aliases and is_view(node) else None


def _memory(node: Node) -> object:
    value: Any = value_of(node)
    return storage_id(value) if isinstance(value, torch.Tensor) else None


def _in_one_mode(nodes: Sequence[Node]) -> bool:
    values = [value_of(node) for node in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len({id(getattr(value, "fake_mode", None)) for value in tensors}) <= 1
