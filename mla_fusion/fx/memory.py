"""Lets results of the graph share memory as they did before.

Then a write into one result changes no other result than before. The kernel returns a value once.
A copy of it that the model made, or a view, is made of that result: a copy becomes a copy again,
and a view becomes a view of the other result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from mla_fusion.compat import tree_leaves
from mla_fusion.fx.aliases import memory_of, viewed_by
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import is_getitem, is_mutating, value_of
from mla_fusion.fx.walk import origin

aten = torch.ops.aten


def follow(builder: GraphBuilder, old_graph: Graph, keeps_strides: bool) -> None:
    """Makes the results of the builder's graph share memory as those of ``old_graph`` do.

    keeps_strides  True if they keep their strides, so that one can be a view of another
    """
    graph = builder.gm.graph
    before, after = leaving(old_graph), leaving(graph)
    values = map(value_of, (*old_graph.find_nodes(op="placeholder"), *before))
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    if len({id(getattr(tensor, "fake_mode", None)) for tensor in tensors}) > 1:
        return  # nothing says which tensors of different modes share memory
    # behind the inputs of the old graph, the source may have parts of pools
    inputs = zip(
        *(graph.find_nodes(op="placeholder") for graph in (old_graph, builder.source)), strict=False
    )
    # by the new root: the old memory for which it stands
    memory_by_root = {builder.copies[source]: memory_of(old) for old, source in inputs}
    first: dict[object, int] = {}  # by old memory: the first result that lies there
    builder.at(graph.output_node(), {})
    with builder.propagating():
        for place, old in enumerate(before):
            memory = memory_of(old)
            if memory is None:
                continue
            if memory_by_root.get(_root(after[place]), memory) != memory:
                after[place] = builder.call(aten.clone.default, after[place])
            memory_by_root.setdefault(_root(after[place]), memory)
            other = first.setdefault(memory, place)
            if keeps_strides and _root(after[other]) is not _root(after[place]):
                _as_view(builder, before, after, other, place)
    results, end = iter(after), graph.output_node()
    end.args = map_arg(end.args, lambda _: next(results))


def leaving(graph: Graph) -> list[Node]:
    """Returns the nodes that a graph returns, in order."""
    results = tree_leaves(graph.output_node().args)
    return [item for item in results if isinstance(item, Node)]


def _as_view(
    builder: GraphBuilder, before: Sequence[Node], after: list[Node], first: int, second: int
) -> None:
    """Makes one of two results a view of the other, if it is one in the old graph."""
    for base, view in ((first, second), (second, first)):
        steps = _steps_between(before[base], before[view])
        if steps is not None:
            value = after[base]
            for step in steps:
                value = builder.call(step.target, value, *step.args[1:], **step.kwargs)
            after[view] = value
            return


def _steps_between(base: Node, view: Node) -> list[Node] | None:
    """Returns the views of ``base`` that make ``view``, first to last.

    Returns None if it is no view of that, or if symbolic sizes take part.
    """
    steps: list[Node] = []
    while view is not base:
        above = viewed_by(view, True)
        is_step = not (is_getitem(view) or is_mutating(view))
        if above is None or not is_step or len(view.all_input_nodes) > 1:
            return None
        steps.insert(0, view)
        view = above
    return steps


def _root(node: Node) -> Node:
    """Returns the node whose memory a node lies in."""
    return origin(node, lambda view: viewed_by(view, True))
