"""What a call stands for: from its products down to what its results replace."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch.fx import Node

from mla_fusion.fx.walk import reached
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, order
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.plan.outputs import (
    has_effect,
    is_free_of_inputs,
    is_replaced_writer,
    is_size,
    strip_reshapes,
)
from mla_fusion.plan.plan import Plan
from mla_fusion.propose.given import Given
from mla_fusion.propose.quantised import unquantised


def region_of(
    graph: Graph, given: Given, starts: list[Node]
) -> tuple[list[Node], dict[Node, Value]]:
    """The nodes from ``starts`` on, in order, and those that are read elsewhere, with what they are
    over the results.

    Raises Departure where something reads what the kernel keeps to itself.
    """
    stack, inside = [*starts], dict[Node, None]()
    replaced = dict[Node, Value]()
    above = dict[Node, Node]()
    while stack:
        node = stack.pop()
        if node in inside or is_size(node):
            continue
        inside[node] = None
        reading = graph.readings[node]
        if isinstance(reading, Value) and is_free_of_inputs(reading):
            continue  # it takes no number of what it reads
        known = given.of(reading) if isinstance(reading, Value) else None
        if known is not None and not (has_effect(graph, node) and node not in graph.hidden):
            replaced[node] = known
            continue
        for user in node.users:
            is_effect = has_effect(graph, user) and not is_replaced_writer(graph, user, given)
            if user.op == "output" or is_effect:
                raise _kept(graph, node, above)
            above.setdefault(user, node)
            stack.append(user)

    def is_read(node: Node) -> bool:
        """By more than the region, and what is moved on the way back into it?"""
        for user in node.users:
            reading = None if user.op == "output" else graph.readings[user]
            is_moved = isinstance(reading, Value) and given.of(reading) is not None
            is_end = has_effect(graph, user)  # a cache gets its new rows
            if user not in inside and (is_end or not is_moved or is_read(user)):
                return True
        return False

    return sorted(inside), {node: value for node, value in replaced.items() if is_read(node)}


def _kept(graph: Graph, node: Node, above: dict[Node, Node]) -> Departure:
    """``node`` leaves the region: the first of its sources that no result gives is named."""
    path = [node]
    while path[-1] in above:
        path.append(above[path[-1]])
    read, reader = path[-1], path[-2] if len(path) > 1 else node
    detail = f"{reader.name} reads {read.name}, which the kernel keeps to itself"
    return Departure("reader.latent", detail, list(values_of(graph.readings[read])))


def computed(starts: Iterable[Node], ends: Iterable[Node]) -> set[Node]:
    """The nodes from which ``starts`` are made, behind ``ends``."""
    ends = set(ends)

    def is_computed(node: Node) -> bool:
        return node not in ends and node.op == "call_function"

    return set(
        reached(filter(is_computed, starts), lambda node: filter(is_computed, node.all_input_nodes))
    )


def drawn(plan: Plan) -> dict[Node, str]:
    """The nodes that hold x, with their roles: before it is quantised, where the graph does that;
    else its scales too.
    """
    graph, values = plan.graph, plan.values
    before = _before_quantisation(graph, values["token_x"])
    if before is not None:
        return {_first(graph, before): "x"}
    found = dict[Node, str]()
    for name, role in (("token_x", "x"), ("dequant_scale_x", "token_scale")):
        if name in values:
            found[_first(graph, values[name])] = role
    return found


def _first(graph: Graph, value: Value) -> Node:
    """The first node that holds the numbers of a Value, in whatever shape: others are views."""
    times, rest = graph.form.split(value)  # a number stands in front of a move
    inner = graph.form.scaled(strip_reshapes(rest), times)
    nodes = (node for one in (inner, value) for node in graph.nodes_in_any_shape(one))
    return min(node for node in nodes if isinstance(node.meta["val"], torch.Tensor))


def _before_quantisation(graph: Graph, rows: Value) -> Value | None:
    before = unquantised(graph.form, rows)
    if before is None and not rows.active and rows.dtype.itemsize == 1:
        wide = (one for one in order([rows]) if one.dtype == torch.bfloat16)
        alike = [one for one in wide if prod(one.shape) == prod(rows.shape)]
        before = next((one for one in alike if one in graph.nodes), None)
    return before if before in graph.nodes else None
