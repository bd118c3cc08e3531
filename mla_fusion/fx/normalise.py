"""The forms of a graph that the pass looks at, each the same computation: made beside it, never in
it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from mla_fusion.fx import bound_calls, empty_parts, hidden_writes, pools, subgraphs, writes
from mla_fusion.fx.build import describe_attributes
from mla_fusion.fx.workplace import workplace


def forms(gm: GraphModule, boundary: bool = False) -> Iterator[GraphModule]:
    """The graph, subgraphs inlined, arguments at their places and empty parts dropped; then with
    what was assembled in place as its parts, too.

    ``boundary``: a wrapper can make inputs of what it is given, of each layer of a pool for one.
    """
    rooms = (bound_calls, empty_parts, hidden_writes, *([pools] if boundary else []))
    if subgraphs.found(gm) or any(room.found(gm.graph) for room in rooms):
        gm = _inlined(gm)
        bound_calls.bind(gm.graph)
        empty_parts.drop(gm.graph)
        hidden_writes.give_results(gm)
        if boundary:
            pools.take_apart(gm)
    yield gm
    if writes.found(gm.graph):
        apart = _inlined(gm)
        writes.take_apart(apart)
        yield apart


def _inlined(gm: GraphModule) -> GraphModule:
    opened = workplace(gm)
    subgraphs.copied(gm, opened.graph)
    describe_attributes(opened)
    return opened
