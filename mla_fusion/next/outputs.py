"""What becomes of the graph when the call gives what the claims say: the nodes that read results,
and the nodes that stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.exact.prove import Claim
from mla_fusion.graph.form import Form, Value
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.propose.departure import Departure


class Given:
    """Values of the graph, as Values over the results of the call."""

    def __init__(self, form: Form, claims: Iterable[Claim] = ()) -> None:
        self._form = form
        self._of = {claim.graph: claim.kernel for claim in claims}

    def add(self, value: Value, given: Value) -> None:
        self._of[value] = given

    def of(self, value: Value) -> Value | None:
        """Through reshapes, and numbers in front."""
        known = self._of.get(value)
        if known is not None:
            return known
        times, rest = self._form.split(value)
        if rest is not value:
            inner = self.of(rest)
            return None if inner is None else self._form.scaled(inner, times)
        if value.op == "reshape":
            inner = self.of(value.sources[0])
            return None if inner is None else self._form.reshape(inner, value.shape)
        return None


@dataclass
class Settled:
    """
    replaced  nodes whose readers read results, and what they are
    kept      nodes that are still computed
    """

    replaced: dict[Node, Value] = field(default_factory=dict)
    kept: set[Node] = field(default_factory=set)


def has_effect(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)


def holders(graph: Graph, values: Iterable[Value]) -> list[Node]:
    """The nodes from which Values are lowered."""
    found, stack, seen = list[Node](), list(values), set[Value]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        nodes = [node for node in graph.nodes.get(value, ()) if graph.readings[node] is value and not (node.op == "call_function" and has_effect(node))]
        if nodes:
            found.append(nodes[0])
        else:
            stack += value.sources
    return found


def settled(
    graph: Graph, given: Given, products: Iterable[Value], read: Iterable[Value]
) -> Settled:
    """Walks up from what the graph gives out and writes, and from what calls read. Raises Departure
    where a product is read that a call keeps to itself.
    """
    found, inside = Settled(), set(products)
    stack = [
        (node, node)
        for node in graph.gm.graph.nodes
        if node.op == "output" or (node.op == "call_function" and has_effect(node))
    ]
    stack += [(node, node) for node in holders(graph, read)]
    while stack:
        node, reader = stack.pop()
        if node in found.kept or node in found.replaced:
            continue
        if node.op == "call_function" and not has_effect(node):
            reading = graph.readings[node]
            if isinstance(reading, Value):
                known = given.of(reading)
                if known is not None:
                    found.replaced[node] = known
                    continue
            if not inside.isdisjoint(values_of(reading)):
                detail = f"{reader.name} reads {node.name}, which the kernel keeps to itself"
                raise Departure("reader.latent", detail, list(values_of(reading)))
        found.kept.add(node)
        stack += [(above, node) for above in node.all_input_nodes]
    return found
