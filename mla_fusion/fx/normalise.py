"""The graph that the pass reads: the same computation, made beside the given one, never in it."""

from __future__ import annotations

from torch.fx import GraphModule

from mla_fusion.fx import bound_calls, pools, subgraphs
from mla_fusion.fx.build import describe_attributes
from mla_fusion.fx.workplace import workplace


def normalised(gm: GraphModule, boundary: bool = False) -> GraphModule:
    """The graph with subgraphs inlined and arguments at their places.

    ``boundary``: a wrapper can make inputs of what it is given, of each layer of a pool for one.
    """
    rooms = (bound_calls, *([pools] if boundary else []))
    if not subgraphs.found(gm) and not any(room.found(gm.graph) for room in rooms):
        return gm
    opened = workplace(gm)
    subgraphs.copied(gm, opened.graph)
    describe_attributes(opened)
    bound_calls.bind(opened.graph)
    if boundary:
        pools.take_apart(opened)
    return opened
