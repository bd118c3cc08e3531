"""Finds the region of a call: the nodes from its products down to what its results replace.

``planner.py`` asks this for each plan.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import MODEL_FLOATS, is_mutating, value_of
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, strip_reshapes
from mla_fusion.graph.read import Graph
from mla_fusion.plan.outputs import departure_at, is_input_free, is_replaced, is_size
from mla_fusion.plan.plan import Plan
from mla_fusion.propose.rewrites import Rewrites


def find_region(
    graph: Graph, rewrites: Rewrites, starts: list[Node]
) -> tuple[list[Node], dict[Node, Value]]:
    """Returns the nodes of the region, in order, and the nodes that the results replace.

    A replaced node is read outside the region. Its Value over the results comes with it.

    starts  the nodes of the products

    Raises Departure if something outside reads a node of the region that no result replaces.
    """
    stack, region = [*starts], set[Node]()
    replaced = dict[Node, Value]()
    producers = dict[Node, Node]()
    while stack:
        node = stack.pop()
        if node in region or is_size(node):
            continue
        region.add(node)
        reading = graph.readings[node]
        is_filled = isinstance(reading, Value) and is_input_free(reading)
        if is_filled and node not in graph.changed:
            continue  # its numbers do not depend on what it reads
        rewrite = rewrites.of(reading)
        if rewrite is not None and node not in graph.effects:
            replaced[node] = rewrite
            continue
        for user in node.users:
            is_effect = user in graph.effects and not is_replaced(graph, user, rewrites)
            if user.op == "output" or is_effect:
                raise _reader_departure(graph, node, user, producers)
            producers.setdefault(user, node)
            stack.append(user)

    def is_read(node: Node) -> bool:
        """Returns True if something outside the region reads the node.

        Users that hold moved results do not count, unless they are read outside themselves.
        """
        for user in node.users:
            has_rewrite = rewrites.of(graph.readings[user]) is not None
            is_effect = is_mutating(user) or user in graph.effects  # memory gets its new rows
            if user not in region and (is_effect or not has_rewrite or is_read(user)):
                return True
        return False

    return sorted(region), {node: value for node, value in replaced.items() if is_read(node)}


def _reader_departure(
    graph: Graph, node: Node, user: Node, producers: dict[Node, Node]
) -> Departure:
    """Returns ``reader.latent`` for a node that is read outside the region, by ``user``.

    The message names the first node above it whose reader no result replaces.

    producers  for each node of the region, the node above it
    """
    path = [node]
    while path[-1] in producers:
        path.append(producers[path[-1]])
    source, reader = path[-1], path[-2] if len(path) > 1 else user
    act = f"{reader.name} reads"
    if user.op == "output" and graph.base(node) is graph.base(source):
        act = "the graph gives out"
    detail = f"{act} {source.name}, which the kernel keeps to itself"
    return departure_at(graph, source, "reader.latent", detail)


def activation_nodes(plan: Plan) -> dict[Node, str]:
    """Returns the nodes from which x is drawn, with their roles for ``witness/``.

    If the graph quantises x, that is x before it. If x comes in quantised, its scales are among the
    nodes.
    """
    names = (("dequant_scale_x", "token_scale"), ("token_x", "x"))
    role_of = {plan.values[name]: role for name, role in names if name in plan.values}
    nodes = _common_nodes(plan.graph, role_of)
    if all(map(_is_float, nodes)):
        return dict.fromkeys(nodes, "x")
    return {
        node: role for value, role in role_of.items() for node in _common_nodes(plan.graph, [value])
    }


def _common_nodes(graph: Graph, values: Iterable[Value]) -> set[Node]:
    """Returns the node that holds Values. If several do, it is what all of them are computed from:
    that they hold the same numbers is the reader's word, which the witness does not take.

    Returns several inputs if they are computed from these.
    """
    holding_nodes = set[Node]()
    for value in values:
        factor, unscaled = graph.form.split(value)  # it may be a number times a moved Value
        inner = graph.form.scaled(strip_reshapes(unscaled), factor)
        holders = (node for form in (inner, value) for node in graph.nodes_in_any_shape(form))
        holding_nodes |= {node for node in holders if isinstance(value_of(node), torch.Tensor)}
    nodes = holding_nodes
    while nodes and (last := max(nodes)).op == "call_function":
        if len(nodes) == 1 and _is_float(last):
            break
        sources = (node for node in last.all_input_nodes if node not in graph.parameters)
        steps = {node for node in sources if _is_float(node) or node.op == "call_function"}
        nodes = nodes - {last} | {node for node in steps if not is_size(node)}
    return nodes if nodes and all(map(_is_float, nodes)) else {min(holding_nodes)}


def _is_float(node: Node) -> bool:
    """Returns True if the node holds one tensor of floats."""
    return getattr(value_of(node), "dtype", None) in MODEL_FLOATS
