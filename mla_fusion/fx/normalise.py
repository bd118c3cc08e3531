"""Makes the copy of a graph that the pass reads: the same computation in fewer forms."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx import subgraphs
from mla_fusion.fx.build import describe_attributes
from mla_fusion.fx.kinds import signature
from mla_fusion.fx.workplace import workplace


def normalised(gm: GraphModule) -> GraphModule:
    """Returns a module whose graph has subgraphs inlined and arguments at their places.

    It is ``gm`` itself if that changes nothing.
    """
    if not (subgraphs.calls_of(gm, gm.graph, "") or any(map(_names_to_place, gm.graph.nodes))):
        return gm
    copy = workplace(gm)
    subgraphs.copied(gm, copy.graph)
    describe_attributes(copy)
    for node in copy.graph.nodes:
        _place_arguments(node)
    return copy


def _place_arguments(node: Node) -> None:
    """Moves arguments that are given by name to their places in the schema.

    AOT autograd has them there; ``aten.mm(self=a, mat2=b)`` comes from a graph made by hand. An
    argument that is left out in front of them is its default.
    """
    names = _names_to_place(node)
    if names:
        last = max(place for place, name in enumerate(names) if name in node.kwargs)
        by_name, defaults = dict(node.kwargs), dict(signature(node.target).arguments)
        moved = [by_name.pop(name, defaults[name]) for name in names[len(node.args) : last + 1]]
        node.args, node.kwargs = (*node.args, *moved), by_name


def _names_to_place(node: Node) -> list[str]:
    """Returns the names of the arguments that have a place, if one of them is given by name."""
    if not node.kwargs or not isinstance(node.target, OpOverload):
        return []
    names = [item.name for item in schema_of(node.target).arguments if not item.kwarg_only]
    return names if not node.kwargs.keys().isdisjoint(names[len(node.args) :]) else []
