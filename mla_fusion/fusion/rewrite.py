"""Commit a plan as a transaction: prove that the call can stand somewhere, then change the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.fusion import replace, strides
from mla_fusion.fusion.build import GraphBuilder
from mla_fusion.fusion.plan import InPlace, Plan
from mla_fusion.fusion.rejection import Refuse
from mla_fusion.fusion.verdict import projections
from mla_fusion.graph.kinds import has_effect

_CARRIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "stream_label", "original_aten")


@dataclass(frozen=True)
class Place:
    """Where the call goes: before ``point``, after ``hoisted`` (its late inputs) have moved there."""

    point: Node
    hoisted: tuple[Node, ...]


def prove(plan: Plan) -> Place:
    """Find a place where every input is defined and every reader still to come. Raises ``Refuse``."""
    readers = [user for replacement in plan.replacements for user in _rewired(plan, replacement.node)]
    if not readers:
        raise Refuse("graph.unread", f"{plan.candidate.query.down.node.name} and what follows it", plan.candidate.nodes)
    point = min(readers)
    replaced = {replacement.node for replacement in plan.replacements}
    late: list[Node] = []
    seen: set[Node] = set()
    stack = [node for node in replace.inputs(plan) if not node < point]
    while stack:
        node = stack.pop()
        if node in replaced or (has_effect(node) and not node < point):
            raise Refuse("order.cycle", f"{node.name} is needed by the kernel before it can exist", (node,))
        if node in seen or node < point:
            continue
        seen.add(node)
        late.append(node)
        stack.extend(node.all_input_nodes)
    return Place(point, tuple(sorted(late)))


def commit_all(builder: GraphBuilder, plans: Sequence[Plan]) -> None:
    """Insert every call and rewire its readers; on any failure put everything back and raise."""
    rewired: list[tuple[Node, Node, Node]] = []
    try:
        with builder.propagating():
            for plan in plans:
                commit(builder, plan, prove(plan), rewired)
    except Exception:
        for user, new, old in reversed(rewired):
            user.replace_input_with(new, old)
        builder.withdraw()
        raise
    strides.follow(builder, dict.fromkeys((new, old) for _, new, old in rewired))


def sweep(graph: Graph, plans: Sequence[Plan]) -> None:
    """Erase what the fusions have left without readers, walking up from it: far fewer nodes than a graph has.

    Where that leaves a product of a region alive (an unread sibling holds it), the whole graph is cleaned.
    """
    erased: set[Node] = set()
    stack = [node for plan in plans for node in _left_over(plan)]
    while stack:
        node = stack.pop()
        if node in erased or node.users or node.op != "call_function" or has_effect(node):
            continue
        stack.extend(node.all_input_nodes)
        erased.add(node)
        graph.erase_node(node)
    if any(item.node not in erased for plan in plans for item in projections(plan.candidate)):
        graph.eliminate_dead_code()
    graph.lint()


def _left_over(plan: Plan) -> list[Node]:
    """What may have lost its last reader: replaced values, the products, the model's cache operator."""
    operator = plan.candidate.key.operator
    replaced = [item.node for item in plan.replacements]
    return [*replaced, *plan.borrowers, *plan.candidate.nodes, *([operator.node] if operator else [])]


def commit(builder: GraphBuilder, plan: Plan, place: Place, rewired: list[tuple[Node, Node, Node]]) -> None:
    """Insert the call, hand its results to the readers, drop nothing (one clean-up follows for all layers).

    Each change of a reader's input is appended to ``rewired`` as (reader, new input, old input).
    """
    point = place.point
    for node in place.hoisted:
        if node is point:
            point = node.next
        else:
            point.prepend(node)
    for borrower in plan.borrowers:
        builder.at(borrower, borrower.meta)
        value = replace.lend(builder, plan, borrower)
        for user in list(borrower.users):
            user.replace_input_with(borrower, value)
            rewired.append((user, value, borrower))
    builder.at(point, _carried_meta(plan))
    results = replace.call_kernel(builder, plan)
    for replacement in plan.replacements:
        readers = _rewired(plan, replacement.node)
        value = replace.fit(builder, replacement, results[replacement.output])
        for user in readers:
            user.replace_input_with(replacement.node, value)
            rewired.append((user, value, replacement.node))
    if isinstance(plan.caches, InPlace) and plan.caches.copies:
        _write_back(builder, plan.caches, results)


def _rewired(plan: Plan, node: Node) -> list[Node]:
    """Users that get the kernel's result; the query's up-projections die with the region."""
    q = plan.candidate.query
    region = {part.node for item in (q.up_nope, q.up_rope) for part in item.parts}
    return [user for user in node.users if user not in region]


def _write_back(builder: GraphBuilder, caches: InPlace, results: dict[str, Any]) -> None:
    """The model's operator changed its caches unseen; say so in the graph, where torchair looks for it."""
    output = next(iter(reversed(builder.gm.graph.nodes)))
    with builder.gm.graph.inserting_before(output):
        for name, given, shape in caches.held:
            cache = builder.cache(given, shape)
            copied = builder.gm.graph.call_function(torch.ops.aten.copy_.default, (cache, results[name]))
            copied.meta["val"] = cache.meta["val"]
            builder.made.append(copied)


def _carried_meta(plan: Plan) -> dict[str, Any]:
    meta = plan.candidate.query.down.node.meta
    return {key: meta[key] for key in _CARRIED if key in meta}
