"""Partitions the nodes of a graph: which stay, and which are replaced by results of calls.

``pipeline.py`` asks this for all plans at once, before ``commit/`` writes the new graph. The
functions about single nodes serve the rest of ``plan/`` too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.compat import OpOverload
from mla_fusion.fx.aliases import written_arguments
from mla_fusion.fx.kinds import dtype_of, signature, value_of
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, filled_with, order, strip_reshapes
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.propose.rewrites import Rewrites


@dataclass
class Partition:
    """Says what becomes of each node of a graph.

    replaced  nodes whose readers read results, and the Value over results that replaces each
    sizes     nodes that return the size of a tensor
    kept      nodes that are still computed
    """

    replaced: dict[Node, Value]
    sizes: set[Node]
    kept: set[Node]


def is_replaced(graph: Graph, node: Node, rewrites: Rewrites) -> bool:
    """Returns True if the node writes caches unlike its schema; the call writes them instead."""
    if node not in graph.hidden.values():
        return False
    return all(
        rewrites.of(value) is not None
        for value in values_of(graph.readings[node])
        if strip_reshapes(value).op == "write"
    )


def is_size(node: Node) -> bool:
    """Returns True if the node returns the size of a tensor."""
    return isinstance(value_of(node), torch.SymInt) and isinstance(node.target, OpOverload)


def _is_metadata_check(graph: Graph, node: Node) -> bool:
    """Returns True if the node asserts the traced dtype of a computed tensor.

    An assertion about an input is different: the next call may pass another dtype.
    """
    is_assertion = node.target is torch.ops.aten._assert_tensor_metadata.default
    return is_assertion and graph.base(node.all_input_nodes[0]).op == "call_function"


def is_input_free(value: Value) -> bool:
    """Returns True if no input matters to the Value: it is one number everywhere, or unwritten
    memory.
    """
    is_memory = value.op == "opaque" and not value.sources and "empty" in value.literal[0]
    return filled_with(value) is not None or is_memory


def departure_at(graph: Graph, node: Node, code: str, detail: str) -> Departure:
    """Returns the departure of what a node holds."""
    return Departure(code, detail, [*values_of(graph.readings[node])])


def first_nodes(graph: Graph, values: Iterable[Value]) -> list[Node]:
    """Returns the first node that holds each Value, or a number times it, in order."""
    return sorted({nodes[0] for value in values if (nodes := holders(graph, value))})


def holders(graph: Graph, value: Value) -> list[Node]:
    """Returns the nodes that hold a Value, or a number times it, in any shape."""
    same_shape = [same for same in graph.multiples_of(value) if same.shape == value.shape]
    return [node for same in same_shape or [value] for node in graph.nodes_in_any_shape(same)]


def source_nodes(
    graph: Graph, values: Iterable[Value], rewrites: Rewrites | None = None
) -> list[Node]:
    """Returns the nodes from which Values are lowered.

    rewrites  Values that results replace: these need no node
    """
    nodes, stack, seen = list[Node](), list(values), set[Value]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        has_rewrite = rewrites is not None and rewrites.of(value) is not None
        if has_rewrite and value.op == "write":
            continue
        candidates = () if has_rewrite else graph.nodes_holding(value)
        first = next((node for node in candidates if node not in graph.effects), None)
        if first is None:
            stack += value.sources
        else:
            nodes.append(first)
    return nodes


def _is_step_after_results(graph: Graph, rewrites: Rewrites, node: Node, rewrite: Value) -> bool:
    """Returns True if the node is a step of the model after results, and no result itself.

    Such a step stays in the graph and reads the results.

    rewrite  what the node's Value is over the results
    """
    is_result = strip_reshapes(rewrite).op in ("leaf", "write")  # or a written cache
    if is_result and dtype_of(node) != torch.float32:
        return False
    if any((node, producer) in graph.stale for producer in node.all_input_nodes):
        return False
    operands = [graph.readings[producer] for producer in node.all_input_nodes]
    active = [operand for operand in operands if isinstance(operand, Value) and operand.active]
    return bool(active) and all(rewrites.of(operand) is not None for operand in active)


def _has_known_sizes(graph: Graph, rewrite: Value) -> bool:
    """Returns True if the graph says every size that it takes to lower the Value."""
    if not graph.sizes:
        return True
    try:
        for value in order([rewrite], is_followed=lambda value: value.op != "write"):
            start = value.literal[1:2] if value.op == "slice" else ()
            for number in (*value.shape, *start):
                graph.unbound(number)
    except LookupError:
        return False
    return True


def _kept_with(graph: Graph, node: Node) -> list[Node]:
    """Returns the nodes that must stay if this node stays.

    They are the views that it writes into, down to their memory. If it reads memory of the graph's
    own, they are also the steps that write into that memory.
    """
    views = [*written_arguments(node)]
    for view in views:
        if view is not graph.base(view):
            views += filter(None, [graph.viewed(view)])
    base = graph.base(node)
    return views + (graph.writers.get(base, []) if base.op == "call_function" else [])


def partition_nodes(
    graph: Graph, rewrites: Rewrites, products: Iterable[Value], arguments: Iterable[Value]
) -> Partition:
    """Returns the partition of the graph's nodes.

    It walks up from outputs, from nodes with effects, and from the arguments of calls.

    rewrites   what results replace
    products   Values that the calls compute inside
    arguments  arguments of the calls
    """
    parts, inner_products = Partition({}, set(), set()), set(products)
    stack = [
        (node, node, False)
        for node in graph.gm.graph.nodes
        if node.op in ("output", "call_module")
        or (signature(node.target).is_check and not _is_metadata_check(graph, node))
        or (node in graph.effects and not is_replaced(graph, node, rewrites))
    ]
    stack += [(node, node, False) for node in source_nodes(graph, arguments)]
    while stack:
        node, reader, is_memory = stack.pop()
        if node in parts.kept or node in parts.sizes:
            continue
        # what memory held before it was written is read from the memory
        is_memory = is_memory or (reader, node) in graph.stale
        if node in parts.replaced and not is_memory:
            continue
        if is_size(node):
            parts.sizes.add(node)
            continue
        may_replace = node not in graph.effects or node in graph.hidden.values()
        is_step = node.op == "call_function" and may_replace
        if is_step and not is_memory:
            reading = graph.readings[node]
            if isinstance(reading, Value):
                is_rebuilt = is_input_free(reading) and node.all_input_nodes
                rewrite = reading if is_rebuilt else rewrites.of(reading)
                is_inner = reading in inner_products
                if (
                    rewrite is not None
                    and _has_known_sizes(graph, rewrite)
                    and (is_inner or not _is_step_after_results(graph, rewrites, node, rewrite))
                ):
                    parts.replaced[node] = rewrite
                    stack += [
                        (source, node, False) for source in source_nodes(graph, [rewrite], rewrites)
                    ]
                    continue
        parts.replaced.pop(node, None)
        parts.kept.add(node)
        producers = (producer for producer in node.all_input_nodes if producer not in parts.kept)
        stack += [(producer, node, False) for producer in producers]
        stack += [(writer, node, True) for writer in _kept_with(graph, node)]
    return parts
