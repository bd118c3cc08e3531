"""Which memory the steps of a graph change in place."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx import hidden_writes
from mla_fusion.fx.walk import origin, shared_memory


def written(graph: Graph) -> set[object]:
    """All of it, that of steps included which change what nothing else reads."""
    by_schema = (target for step in graph.nodes for target in changed(step))
    unseen = (cache for _, cache, _ in hidden_writes.of(graph))
    return set(map(memory_of, (*by_schema, *unseen)))


def changed(step: Node) -> Iterator[Node]:
    """The arguments that a step changes, by its schema."""
    if not isinstance(step.target, OpOverload) or not schema_of(step.target).is_mutable:
        return
    for place, argument in enumerate(schema_of(step.target).arguments):
        given = step.args[place] if place < len(step.args) else step.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            several = given if isinstance(given, (tuple, list)) else (given,)
            yield from (item for item in several if isinstance(item, Node))


def root(node: Node) -> Node:
    """What the memory of a node may belong to: up through views, casts that may copy nothing, and
    in-place results.
    """
    return origin(node, shared_memory)


def memory_of(node: Node) -> object:
    """Equal for nodes that may share memory: the root, of an attribute (each reading of which is a
    node) its name.
    """
    above = root(node)
    return (above.op, above.target) if above.op == "get_attr" else above
