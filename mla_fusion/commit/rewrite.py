"""Find a place in the graph where a call can go; write a new graph with the calls in place of what
they replace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.commit import padding
from mla_fusion.emit import results, targets
from mla_fusion.fx import memory, strides
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.in_place import is_closing, memory_of
from mla_fusion.fx.kinds import has_effect, word
from mla_fusion.fx.walk import reached
from mla_fusion.fx.workplace import copied
from mla_fusion.match.candidate import Candidate
from mla_fusion.plan.plan import Plan
from mla_fusion.report.rejection import Refuse

_CARRIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "stream_label", "original_aten")


def prove(plan: Plan) -> tuple[Node, set[Node]]:
    """The node before which the call goes: every reader is still to come, and every input is
    defined or can be by then; with the nodes that move ahead of it for that.

    Raises ``Refuse`` where there is none.
    """
    products = _products_of_query(plan)
    readers = [
        user for item in plan.replacements for user in item.node.users if user not in products
    ]
    if not readers:
        raise Refuse(
            "graph.unread",
            f"{plan.candidate.down.node.name} and what follows it",
            plan.candidate.nodes,
        )
    point = _ahead_of_copies(min(readers), plan)
    replaced = {replacement.node for replacement in plan.replacements}
    seen: set[Node] = set()
    stack = [node for node in targets.target_of(plan).inputs(plan) if not node < point]
    while stack:
        node = stack.pop()
        if node in replaced or (has_effect(node) and not node < point):
            raise Refuse(
                "order.cycle", f"{node.name} is needed by the kernel before it can exist", (node,)
            )
        if node in seen or node < point:
            continue
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return point, seen


def _ahead_of_copies(reader: Node, plan: Plan) -> Node:
    """The copies into inputs that end a functional graph stand in the order of the inputs, not in
    that of the model: the first of those in front of the reader that leave the caches alone.
    """
    caches = set(map(memory_of, plan.caches.inputs))
    first = reader
    while is_closing(first) and word(first.prev) == "copy_":
        if not caches.isdisjoint(map(memory_of, first.prev.all_input_nodes)):
            break
        first = first.prev
    return first


def write(
    builder: GraphBuilder, plans: Sequence[Plan], given: Graph, exact_strides: bool = True
) -> None:
    """Write the builder's graph: its source, with the calls of the plans and without what these
    leave unread. What leaves it shares memory as in the ``given`` graph.

    ``exact_strides``: what leaves the graph has the strides that it has in the source.
    """
    writer = _Writer(builder, plans)
    with builder.propagating():
        writer.write()
    strides.follow(builder, writer.handed_on, exact_strides)
    memory.follow(builder, given, exact_strides)


def clean(builder: GraphBuilder, plans: Sequence[Plan]) -> None:
    """Eliminate dead code where a product of a region is still in the graph, kept by a node nobody
    reads; then lint.
    """
    graph = builder.gm.graph
    if any(plan.heads_of_call > plan.heads for plan in plans):
        padding.carry(builder)
    if any(item.node in builder.copies for plan in plans for item in plan.candidate.projections):
        graph.eliminate_dead_code()
    keep_output_names(builder.source, graph)
    graph.lint()


def keep_output_names(source: Graph, graph: Graph) -> None:
    """Let what leaves the graph have the name that it has in the source: an exported program's
    signature has names.
    """
    pairs = dict(zip(memory.leaving(source), memory.leaving(graph), strict=True))
    after = list(pairs.values())
    named = {node.name: node for node in graph.nodes}
    for old, new in pairs.items():
        other = named.get(old.name)
        if other is new or other in after or new.op == "placeholder" or after.count(new) > 1:
            continue
        if other is not None:  # still read inside
            other.name = new.name
        new.name = old.name


class _Writer:
    """Copies the source node by node.

    handed_on   each new value that is read, with the one of the source that it is read in place of
    """

    def __init__(self, builder: GraphBuilder, plans: Sequence[Plan]) -> None:
        self.b = builder
        self.handed_on: dict[tuple[Node, Node], None] = {}
        self._copies = builder.copies
        self._values: dict[Node, Node] = {}
        # of the calls made so far, by the plan's place in the list
        self._results: dict[int, dict[str, Any]] = {}
        self._begun: set[int] = set()
        self._plans = plans
        self._calls: dict[Node, list[int]] = {}
        self._plan_of: dict[Node, int] = {}
        # readers of a replaced value that go on reading it
        self._keeps: dict[Node, frozenset[Node]] = {}
        self._borrowers: dict[Node, Plan] = {}
        for number, plan in enumerate(plans):
            self._calls.setdefault(prove(plan)[0], []).append(number)
            self._plan_of |= {item.node: number for item in plan.replacements}
            self._keeps |= dict.fromkeys(
                (item.node for item in plan.replacements), _products_of_query(plan)
            )
            self._borrowers |= dict.fromkeys(plan.borrowers, plan)
        self._given = self._find_given()
        self._unread = self._find_unread() - self._given
        builder.copy = self._copy_with_inputs

    def write(self) -> None:
        source = self.b.source
        for node in source.find_nodes(op="placeholder"):
            self._copy(node)
        for node in source.nodes:
            for number in self._calls.get(node, ()):
                self._call(number)
            if node.op == "output":
                self._write_caches_back()
            if node in self._borrowers:
                self._lend(node)
            elif (
                node not in self._copies
                and node not in self._unread
                and not self._is_written_already(node)
            ):
                self._copy(node)
        for node in sorted(self._given, reverse=True):
            made = self._copies.get(node)
            if made is not None and not made.users:  # the call had no need of it
                self.b.gm.graph.erase_node(made)
                del self._copies[node]

    def _is_written_already(self, node: Node) -> bool:
        """Would it copy into a cache what the call has written there?"""
        if word(node) != "copy_":
            return False
        target, source = node.args[:2]
        number = self._plan_of.get(source)  # type: ignore[arg-type]
        if number is None:
            return False
        plan = self._plans[number]
        return plan.writes_inputs and target in plan.caches.inputs

    def _copy(self, node: Node) -> Node:
        made = self._copies[node] = copied(
            node, self.b.gm.graph, lambda read: self._input(node, read)
        )
        return made

    def _input(self, reader: Node, read: Node) -> Node:
        if not self._is_handed_on(reader, read):
            return self._copies.get(read) or self._copy_with_inputs(read)
        if read not in self._values:
            self._call(self._plan_of[read])
        value = self._values[read]
        self.handed_on[value, read] = None
        return value

    def _reads(self, reader: Node) -> list[Node]:
        """What it reads that is not handed on."""
        return [read for read in reader.all_input_nodes if not self._is_handed_on(reader, read)]

    def _is_handed_on(self, reader: Node, read: Node) -> bool:
        return read in self._borrowers or (read in self._keeps and reader not in self._keeps[read])

    def _copy_with_inputs(self, node: Node) -> Node:
        """A node that is read ahead of its turn, or that only new nodes read."""
        missing = reached(
            [node],
            lambda reader: (read for read in self._reads(reader) if read not in self._copies),
        )
        for reader in sorted(missing):
            if reader not in self._copies:
                self._copy(reader)
        return self._copies[node]

    def _call(self, number: int) -> None:
        """Make the call of a plan and what its readers read; of calls that wait for each other this
        raises.
        """
        if number in self._results:
            return
        plan = self._plans[number]
        if number in self._begun:
            raise RuntimeError(f"the call for {plan.candidate.down.node.name} waits for itself")
        self._begun.add(number)
        self.b.at(None, _carried_meta(plan))
        made = self._results[number] = targets.call_kernel(self.b, plan)
        lying: dict[Node, Node] = {}
        for item in plan.replacements:
            value = results.fit(self.b, item, made[item.output])
            like = lying.setdefault(value, item.node)
            if not strides.lie_alike(
                like.meta["val"], item.node.meta["val"]
            ):  # a copy of the other
                axes = range(item.node.meta["val"].dim())
                value = self.b.call(torch.ops.aten.permute.default, value, list(axes))
            self._values[item.node] = value

    def _lend(self, borrower: Node) -> None:
        self.b.at(None, borrower.meta)
        self._values[borrower] = results.lend(self.b, self._borrowers[borrower], borrower)

    def _write_caches_back(self) -> None:
        """The model's operator changed its caches unseen; say so in the graph, where torchair looks
        for it.
        """
        self.b.at(None, {})
        for number, plan in enumerate(self._plans):
            for name, given, shape in plan.caches.held if plan.caches.copies else ():
                cache = self.b.cache(given, shape)
                args = cache, self._results[number][name]
                self.b.insert(torch.ops.aten.copy_.default, args, {}, cache.meta["val"])

    def _find_given(self) -> set[Node]:
        """What the calls are given, with all that it is made of. It keeps its place: what it reads
        may be written later, and random numbers come in the order in which they are drawn.
        """

        def is_made(node: Node) -> bool:
            return node.op == "call_function" and node not in self._keeps

        starts = (node for plan in self._plans for node in targets.target_of(plan).inputs(plan))
        return set(
            reached(filter(is_made, starts), lambda node: filter(is_made, self._reads(node)))
        )

    def _find_unread(self) -> set[Node]:
        """What nobody reads once the new values are handed on, walking up from the regions: far
        fewer than all nodes.
        """
        unread: set[Node] = set()
        stack = [node for plan in self._plans for node in _left_over(plan)]
        while stack:
            node = stack.pop()
            if node in unread or node.op != "call_function" or has_effect(node):
                continue
            if any(
                user not in unread and not self._is_handed_on(user, node) for user in node.users
            ):
                continue
            unread.add(node)
            stack.extend(node.all_input_nodes)
        return unread


def _left_over(plan: Plan) -> list[Node]:
    """What may have lost its last reader: replaced values, the products, the model's cache
    operator.
    """
    operator = plan.candidate.key.operator
    replaced = [item.node for item in plan.replacements]
    return [
        *replaced,
        *plan.borrowers,
        *plan.candidate.nodes,
        *([operator.node] if operator else []),
    ]


def _products_of_query(plan: Plan) -> frozenset[Node]:
    """The query's up-projections, where the call computes them: they die with the region, whatever
    they read.
    """
    if not isinstance(plan.candidate, Candidate) or not plan.projects_up:
        return frozenset()
    q = plan.candidate.query
    return frozenset(part.node for item in (q.up_nope, q.up_rope) for part in item.by_weight)


def _carried_meta(plan: Plan) -> dict[str, Any]:
    meta = plan.candidate.down.node.meta
    return {key: meta[key] for key in _CARRIED if key in meta}
