"""A new graph: nodes that stay are copied, in order; what is replaced reads results of calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from mla_fusion.fx import memory
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.workplace import copied
from mla_fusion.graph.form import Value, nearest
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.read import Graph
from mla_fusion.plan.call import emit_call
from mla_fusion.plan.operands import rows_in_cache
from mla_fusion.plan.outputs import Partition, has_effect
from mla_fusion.plan.plan import Plan

_CARRIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "stream_label", "original_aten")


class _OfResults(Lowering):
    """Reads rows of the call's caches as these hold them."""

    def _gather(self, value: Value, base: Value, index: Value) -> Any:
        is_new = base.op == "write" and base in self.known
        if not is_new or (base.literal is None and index is not base.sources[1]):
            return super()._gather(value, base, index)
        rows, shape = self.of(index), self._shape(value.shape)
        return rows_in_cache(self.b, self.known[base], rows, shape, base.literal or "")


class Writer:
    """
    settled    what becomes of the graph's nodes
    values     what stands for the nodes that are replaced, and for sizes
    handed_on  each new value that is read, with the one of the graph that it is read in place of
    """

    def __init__(
        self, graph: Graph, settled: Partition, plans: Mapping[Value, Plan], builder: GraphBuilder
    ) -> None:
        """``plans``: by each leaf that stands for a result."""
        self.graph, self.settled, self._plans = graph, settled, plans
        self.b = builder
        self.b.copy = self._copy
        self.handed_on: dict[tuple[Node, Node], None] = {}
        self._lower = _OfResults(self.b, graph, {}, self._is_usable)
        self._called: set[Plan] = set()
        self.values: dict[Node, Node] = {}
        self._begun: set[Node] = set()
        self._readers: dict[Node, list[Plan]] = {}  # of nodes beside the caches of a call
        for plan in dict.fromkeys(plans.values()):
            for node in set(plan.inputs).difference(cache for _, cache, _ in plan.written_caches):
                self._readers.setdefault(node, []).append(plan)

    def write(self) -> None:
        source = self.graph.gm.graph
        for node in source.find_nodes(op="placeholder"):
            self.b.value(node)
        for node in source.nodes:
            if node.op == "output":
                self._close()
            if node.target is torch.ops.aten.copy_.default:
                self._call_before(node.args[0])
                if _ends(node):  # what is given out may read what is overwritten now
                    for read in source.output_node().all_input_nodes:
                        if read in self.settled.replaced:
                            self.given(read)
            if node in self.settled.kept and node.op != "placeholder":
                self.b.value(node)

    def _call_before(self, written: Any) -> None:
        """What a call reads may be written when all else is done."""
        for plan in self._readers.get(written, ()):
            self._call(plan)

    def drawn(self, node: Node) -> Node:
        """A copy that is computed from nothing."""
        if node.op == "placeholder":
            return self.b.value(node)
        made = self.b.gm.graph.placeholder(node.name)
        made.meta.update(node.meta)
        self.b.copies[node] = made
        return made

    def _close(self) -> None:
        """Caches that the model's operator wrote unseen get their new rows."""
        for plan in dict.fromkeys(self._plans.values()):
            for name, cache, shape in plan.written_caches:
                if cache not in self.graph.hidden:
                    continue
                self._call(plan)
                result = self._lower.known[plan.results[name]]
                self.b.at(None, {})
                held = self.b.cache(cache, shape)
                args = held, result
                self.b.insert(torch.ops.aten.copy_.default, args, {}, held.meta["val"])

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
            if one in seen or one in self.b.copies or one in self.values:
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
            if read in self._begun and read not in self.b.copies and read not in self.values:
                raise RuntimeError(f"{read.name} waits for itself")
            if read in self.settled.sizes:
                self.values[read] = self.b.size(read.meta["val"])
            elif read in self.settled.replaced:
                self.given(read)
            elif read not in self.b.copies:
                self.b.value(read)
        made = copied(node, self.b.gm.graph, self._input)
        self.b.copies[node] = made
        return made

    def _input(self, read: Node) -> Node:
        is_replaced = read in self.settled.replaced
        if is_replaced:
            self.handed_on[self.values[read], read] = None
        return (
            self.values[read] if is_replaced or read in self.settled.sizes else self.b.copies[read]
        )

    def given(self, node: Node) -> Node:
        """What a replaced node is, of the results."""
        if node not in self.values:
            self._begun.add(node)
            value = self.settled.replaced[node]
            for leaf in nearest([value], self._plans):
                self._call(self._plans[leaf])
            self.b.at(None, _carried(node))
            held = node.meta["val"]
            is_code = held.dtype == torch.uint8
            made = self._lower.of(value, None if is_code else held.dtype)
            if is_code and self.b.dtype(made) == torch.float8_e8m0fnu:
                made = self.b.call(torch.ops.aten.view.dtype, made, torch.uint8)
            self.values[node] = made
        return self.values[node]

    def _call(self, plan: Plan) -> None:
        if plan in self._called:
            return
        self._called.add(plan)
        self.b.at(None, _carried(plan.products[0]))
        self._lower.known.update(emit_call(self.b, self._lower, plan))


def _ends(node: Node) -> bool:
    """Do copies alone come behind it?"""
    while node.target is torch.ops.aten.copy_.default:
        node = node.next
    return node.op == "output"


def _carried(node: Node) -> dict[str, Any]:
    """Where a node comes from."""
    return {key: node.meta[key] for key in _CARRIED if key in node.meta}


def keep_output_names(source: FxGraph, graph: FxGraph) -> None:
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
