"""A new graph: nodes that stay are copied, in order; what is replaced reads results of calls."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.workplace import copied, workplace
from mla_fusion.graph.form import Value
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.read import Graph
from mla_fusion.next.caches import InPlace, Staged
from mla_fusion.next.call import called
from mla_fusion.next.outputs import Settled, has_effect
from mla_fusion.propose.prologue import Proposal


class Writer:
    """
    settled   what becomes of the graph's nodes
    proposal  of the call, and where its caches are
    """

    def __init__(
        self, graph: Graph, settled: Settled, plans: dict[Value, tuple[Proposal, InPlace | Staged]]
    ) -> None:
        """``plans``: by each leaf that stands for a result."""
        self.graph, self.settled, self._plans = graph, settled, plans
        self.work = workplace(graph.gm)
        self.b = GraphBuilder(self.work, graph.gm.graph)
        self.b.copy = self._copy
        self._lower = Lowering(self.b, graph, {}, self._is_usable)
        self._called: set[int] = set()
        self._values: dict[Node, Node] = {}
        self._begun: set[Node] = set()

    def write(self) -> GraphModule:
        source = self.graph.gm.graph
        for node in source.find_nodes(op="placeholder"):
            self.b.value(node)
        for node in source.nodes:
            if node.op == "output":
                self._close()
            if node in self.settled.kept and node.op != "placeholder":
                self.b.value(node)
        self.work.graph.lint()
        return self.work

    def _close(self) -> None:
        """Caches that the model's operator wrote unseen get their new rows."""
        written = {
            plan[1].kv.value: plan[1]
            for plan in self._plans.values()
            if isinstance(plan[1], InPlace)
        }
        for caches in written.values():
            for write in (caches.kv, caches.kr):
                if write.cache not in self.graph.hidden:
                    continue
                self._call(write.value)
                cache = self.b.value(write.cache)
                made = self._lower.of(write.value, shape=self.graph.shape(cache.meta["val"].shape))
                self.b.at(None, {})
                self.b.call(torch.ops.aten.copy_.default, cache, made)

    def _is_usable(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr") or node in self.b.copies:
            return True
        if node not in self.settled.kept or has_effect(self.graph, node):
            return False
        return not self._waits(node)

    def _waits(self, node: Node) -> bool:
        """Is it made of what is being made just now?"""
        stack, seen = [node], set[Node]()
        while stack:
            one = stack.pop()
            if one in seen or one in self.b.copies or one in self._values:
                continue
            if one in self._begun:
                return True
            seen.add(one)
            stack += one.all_input_nodes
        return False

    def _copy(self, node: Node) -> Node:
        if node in self._begun:
            raise RuntimeError(f"{node.name} waits for itself")
        self._begun.add(node)
        for read in node.all_input_nodes:
            if read in self._begun and read not in self.b.copies and read not in self._values:
                raise RuntimeError(f"{read.name} waits for itself")
            if read in self.settled.sizes:
                self._values[read] = self._lower.size(read.meta["val"])
            elif read in self.settled.replaced:
                self._given(read)
            elif read not in self.b.copies:
                self.b.value(read)
        made = copied(node, self.work.graph, lambda read: self._input(read))
        self.b.copies[node] = made
        return made

    def _input(self, read: Node) -> Node:
        is_made = read in self.settled.replaced or read in self.settled.sizes
        return self._values[read] if is_made else self.b.copies[read]

    def _given(self, node: Node) -> Node:
        """What a replaced node is, of the results."""
        if node not in self._values:
            self._begun.add(node)
            value = self.settled.replaced[node]
            for leaf in _leaves(value):
                self._call(leaf)
            self.b.at(None, dict(node.meta))
            self._values[node] = self._lower.of(value, node.meta["val"].dtype)
        return self._values[node]

    def _call(self, leaf: Value) -> None:
        plan = self._plans.get(leaf)
        if plan is None or id(plan[0]) in self._called:
            return
        self._called.add(id(plan[0]))
        self.b.at(None, {})
        self._lower.known.update(called(self.b, self._lower, *plan))


def _leaves(value: Value) -> list[Value]:
    found, stack = list[Value](), [value]
    while stack:
        one = stack.pop()
        if one.op == "leaf" or one.op == "write":
            found.append(one)
        else:
            stack += one.sources
    return found
