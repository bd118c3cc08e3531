"""Arguments that a graph gives by name, moved to their places in the schema.

AOT autograd gives what a schema lets stand at a place there; a graph made by hand may write
``aten.mm(self=a, mat2=b)``. All that reads a call reads places.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from mla_fusion.compat import OpOverload, schema_of


def found(graph: Graph) -> bool:
    return any(node.kwargs and _places(node) for node in graph.nodes)


def bind(graph: Graph) -> None:
    """Rewrites the calls. What is left out in front of a named argument is its default."""
    for node in graph.nodes:
        places = _places(node) if node.kwargs else []
        if places:
            last = max(index for index, name in enumerate(places) if name in node.kwargs)
            given, args = dict(node.kwargs), list(node.args)
            defaults = {one.name: one.default_value for one in schema_of(node.target).arguments}
            for name in places[len(args) : last + 1]:
                args.append(given.pop(name, defaults[name]))
            node.args, node.kwargs = tuple(args), given


def _places(node: Node) -> list[str]:
    """The arguments that have a place, where one is given by name."""
    if not isinstance(node.target, OpOverload):
        return []
    names = [one.name for one in schema_of(node.target).arguments if not one.kwarg_only]
    return names if any(name in node.kwargs for name in names[len(node.args) :]) else []
