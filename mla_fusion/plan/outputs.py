"""What becomes of the graph when the call gives what the claims say: the nodes that read results,
and the nodes that stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from mla_fusion.compat import OpOverload
from mla_fusion.fx.kinds import signature
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, filled_with
from mla_fusion.graph.read import Graph, values_of, written_arguments
from mla_fusion.propose.given import Given


@dataclass
class Settled:
    """
    replaced  nodes whose readers read results, and what they are
    sizes     nodes that ask a tensor for a size
    kept      nodes that are still computed
    """

    replaced: dict[Node, Value] = field(default_factory=dict)
    sizes: set[Node] = field(default_factory=set)
    kept: set[Node] = field(default_factory=set)


def has_effect(graph: Graph, node: Node) -> bool:
    """Does it change memory that is not the graph's own?"""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node in graph.hidden.values():
        return True
    return any(graph.base(one).op != "call_function" for one in written_arguments(node))


def is_replaced(graph: Graph, node: Node, given: Given) -> bool:
    """Is it an operator that writes caches unseen, which the call writes in its place?"""
    if node not in graph.hidden.values():
        return False
    caches = [value for value in values_of(graph.readings[node]) if unmoved(value).op == "write"]
    return all(given.of(value) is not None for value in caches)


def is_size(node: Node) -> bool:
    """Does it ask a tensor for a size?"""
    return isinstance(node.target, OpOverload) and isinstance(node.meta.get("val"), torch.SymInt)


def gives_nothing(node: Node) -> bool:
    """Is it called for what it checks alone?"""
    return signature(node.target).is_check


def _is_statement(graph: Graph, node: Node) -> bool:
    """Does it say of a computed tensor which dtype was traced? (Of an input the next call may bring
    another one.)
    """
    is_one = node.target is torch.ops.aten._assert_tensor_metadata.default
    return is_one and graph.base(node.all_input_nodes[0]).op == "call_function"


def is_made_of_nothing(value: Value) -> bool:
    """Whatever it is called with, is it one number, or memory that nobody has written?"""
    return filled_with(value) is not None or (value.op == "opaque" and not value.sources)


def unmoved(value: Value) -> Value:
    while value.op == "reshape":
        value = value.sources[0]
    return value


def holders(graph: Graph, values: Iterable[Value], given: Given | None = None) -> list[Node]:
    """The nodes from which Values are lowered, beside what results give."""
    found, stack, seen = list[Node](), list(values), set[Value]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        is_given = given is not None and given.of(value) is not None
        if is_given and value.op == "write":
            continue
        held = () if is_given else graph.nodes_holding(value)
        nodes = (node for node in held if not has_effect(graph, node))
        first = next(nodes, None)
        if first is None:
            stack += value.sources
        else:
            found.append(first)
    return found


def _goes_on(graph: Graph, given: Given, node: Node, known: Value) -> bool:
    """Is a step of the model's own, behind what results give as they are: no result itself?"""
    is_given = _is_result(known) and node.meta["val"].dtype != torch.float32
    if is_given or any((node, above) in graph.stale for above in node.all_input_nodes):
        return False
    read = [graph.readings[above] for above in node.all_input_nodes]
    active = [one for one in read if isinstance(one, Value) and one.active]
    return bool(active) and all(given.of(one) is not None for one in active)


def _is_result(known: Value) -> bool:
    return unmoved(known).op in ("leaf", "write")


def _memory(graph: Graph, node: Node) -> list[Node]:
    """The nodes that stay with a node that stays: what it writes into, down to the memory that this
    is a view of, and the steps that write into memory of the graph's own that it reads.
    """
    views = [*written_arguments(node)]
    for view in views:
        if view is not graph.base(view):
            views.append(view.args[0])  # type: ignore[arg-type]
    base = graph.base(node)
    return views + (graph.writers.get(base, []) if base.op == "call_function" else [])


def settled(
    graph: Graph, given: Given, products: Iterable[Value], read: Iterable[Value]
) -> Settled:
    """Walks up from what the graph gives out and writes, and from what calls read. Raises Departure
    where a product is read that a call keeps to itself.
    """
    found, inside, hidden = Settled(), set(products), set(graph.hidden.values())
    stack = [
        (node, node, False)
        for node in graph.gm.graph.nodes
        if node.op == "output"
        or (gives_nothing(node) and not _is_statement(graph, node))
        or (has_effect(graph, node) and not is_replaced(graph, node, given))
    ]
    stack += [(node, node, False) for node in holders(graph, read)]
    while stack:
        node, reader, is_written = stack.pop()
        if node in found.kept or node in found.sizes or (node in found.replaced and not is_written):
            continue
        if is_size(node):
            found.sizes.add(node)
            continue
        is_step = node.op == "call_function" and (node in hidden or not has_effect(graph, node))
        if is_step and not is_written:
            reading = graph.readings[node]
            if isinstance(reading, Value):
                is_filled = is_made_of_nothing(reading) and node.all_input_nodes
                known = reading if is_filled else given.of(reading)
                if known is not None and (reader, node) in graph.stale:
                    detail = f"{node.name} is written after {reader.name} has read it"
                    raise Departure("graph.not_functional", detail, [reading])
                is_inside = reading in inside
                if known is not None and (is_inside or not _goes_on(graph, given, node, known)):
                    found.replaced[node] = known
                    stack += [(one, node, False) for one in holders(graph, [known], given)]
                    continue
        if is_step and not inside.isdisjoint(values_of(graph.readings[node])):
            detail = f"{reader.name} reads {node.name}, which the kernel keeps to itself"
            raise Departure("reader.latent", detail, list(values_of(graph.readings[node])))
        found.replaced.pop(node, None)
        found.kept.add(node)
        stack += [(above, node, False) for above in node.all_input_nodes]
        stack += [(above, node, True) for above in _memory(graph, node)]
    return found
