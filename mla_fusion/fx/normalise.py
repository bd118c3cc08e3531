"""The graph that the pass reads: the same computation, written beside the given graph."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx import subgraphs
from mla_fusion.fx.build import describe_attributes
from mla_fusion.fx.workplace import workplace


def normalised(gm: GraphModule) -> GraphModule:
    """A module whose graph has subgraphs inlined and arguments at their places; ``gm`` itself where
    that changes nothing.
    """
    if not (subgraphs.found(gm) or any(map(_names_to_place, gm.graph.nodes))):
        return gm
    opened = workplace(gm)
    subgraphs.copied(gm, opened.graph)
    describe_attributes(opened)
    _place_arguments(opened.graph)
    return opened


def _place_arguments(graph: Graph) -> None:
    """Moves arguments that a graph gives by name to their places in the schema, as AOT autograd has
    them; ``aten.mm(self=a, mat2=b)`` in a graph made by hand is one. An argument that is left out
    in front of them is its default.
    """
    for node in graph.nodes:
        names = _names_to_place(node)
        if names:
            last = max(place for place, name in enumerate(names) if name in node.kwargs)
            by_name, args = dict(node.kwargs), list(node.args)
            defaults = {one.name: one.default_value for one in schema_of(node.target).arguments}
            for name in names[len(args) : last + 1]:
                args.append(by_name.pop(name, defaults[name]))
            node.args, node.kwargs = tuple(args), by_name


def _names_to_place(node: Node) -> list[str]:
    """The names of the arguments that have a place, if one of them is given by name."""
    if not node.kwargs or not isinstance(node.target, OpOverload):
        return []
    names = [one.name for one in schema_of(node.target).arguments if not one.kwarg_only]
    return names if any(name in node.kwargs for name in names[len(node.args) :]) else []
