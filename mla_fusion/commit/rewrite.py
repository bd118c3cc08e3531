"""Writes the new graph of a set of plans.

``pipeline.py`` calls this after verification, and ``verify.py`` for one plan. Nodes that stay are
copied in order. Readers of replaced nodes read results of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from mla_fusion.compat import take_name
from mla_fusion.fx import memory
from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.walk import INPUTS, reached
from mla_fusion.fx.workplace import copied
from mla_fusion.graph.form import Value, nearest
from mla_fusion.graph.lower import Lowering
from mla_fusion.graph.read import Graph
from mla_fusion.plan.call import emit_call
from mla_fusion.plan.operands import rows_in_cache
from mla_fusion.plan.outputs import Partition
from mla_fusion.plan.plan import Plan

aten = torch.ops.aten
_METADATA = ("stack_trace", "nn_module_stack", "source_fn_stack", "stream_label", "original_aten")


class _ResultLowering(Lowering):
    """Lowers Values over results. Reads new rows from the caches that the call has written."""

    def _gather(self, value: Value, base: Value, index: Value) -> Any:
        """Returns the rows of a base at an index; new rows are read from the written cache."""
        is_new = base.op == "write" and base in self.known
        if not is_new or (base.literal is None and index is not base.sources[1]):
            return super()._gather(value, base, index)
        rows, shape = self.of(index), self._shape(value.shape)
        return rows_in_cache(self.b, self.known[base], rows, shape, base.literal or "")


class Writer:
    """Writes the new graph.

    partition       what becomes of the graph's nodes
    values          new nodes in place of replaced nodes and of sizes
    replaced_reads  each new node that is read, with the replaced node that was read before
    """

    def __init__(
        self, graph: Graph, partition: Partition, plans: Sequence[Plan], builder: GraphBuilder
    ) -> None:
        self.graph, self.partition, self._plans = graph, partition, plans
        self.b = builder
        # leaves of Values stand for results
        self._plan_by_leaf = {leaf: plan for plan in plans for leaf in plan.results.values()}
        self.b.copy = self._copy
        self.replaced_reads: dict[tuple[Node, Node], None] = {}
        self._lower = _ResultLowering(self.b, graph, self._is_usable)
        self._called = set[Plan]()
        self.values: dict[Node, Node] = {}
        self._open = set[Node]()
        # the plans that read a node, other than as a cache
        self._readers: dict[Any, list[Plan]] = {}
        for node in graph.gm.graph.find_nodes(op="placeholder"):
            self.b.value(node)
        for plan in plans:
            for node in set(plan.inputs).difference(cache for _, cache, _ in plan.written_caches):
                self._readers.setdefault(graph.base(node), []).append(plan)

    def write(self) -> None:
        """Writes all nodes of the new graph."""
        old_graph = self.graph.gm.graph
        late = sorted(self.partition.replaced, reverse=True)
        for node in old_graph.nodes:
            if node.op == "output":
                self._write_hidden_caches()
            if node.target is aten.copy_.default:
                # calls must read the memory before it is written
                for plan in self._readers.get(self.graph.base(node.args[0]), ()):
                    self._call(plan)
                # and so must all that may be read later
                while late and late[-1] < node:
                    self.write_replaced(late.pop())
            if node in self.partition.kept:
                self.b.value(node)

    def _write_hidden_caches(self) -> None:
        """Copies the results into caches that the model's operator wrote against its schema."""
        for plan in self._plans:
            for name, cache, shape in plan.written_caches:
                if cache not in self.graph.hidden:
                    continue
                self._call(plan)
                result = self._lower.known[plan.results[name]]
                self.b.at(None, {})
                target = self.b.cache(cache, shape)
                self.b.insert(aten.copy_.default, (target, result), {}, target.meta["val"])

    def _is_usable(self, node: Node) -> bool:
        """Returns True if lowering may read the node."""
        if node.op in INPUTS or node in self.b.copies:
            return not self._is_overwritten(node, node)
        if node not in self.partition.kept or node in self.graph.effects:
            return False
        nodes = list(
            reached(
                [node],
                lambda current: (
                    source for source in current.all_input_nodes if not self._is_written(source)
                ),
            )
        )
        return self._open.isdisjoint(nodes) and not any(
            self._is_overwritten(source, reader)
            for reader in nodes
            for source in reader.all_input_nodes
        )

    def _is_overwritten(self, source: Node, reader: Node) -> bool:
        """Returns True if a step that is not in the new graph yet writes the memory of a node
        before a reader of it. Of nodes that read one attribute, the first counts.
        """
        base = self.graph.base(source)
        start, steps = base if source.op == "get_attr" else source, self.graph.writers.get(base, ())
        return any(start < step < reader and step not in self.b.copies for step in steps)

    def _is_written(self, node: Node) -> bool:
        """Returns True if the new graph has a node for this one."""
        return node in self.b.copies or node in self.values

    def _copy(self, node: Node) -> Node:
        """Returns a copy of a node that stays, after copies of what it reads. Raises RecursionError
        in a cycle.
        """
        self._open.add(node)
        for source in node.all_input_nodes:
            if source in self.partition.sizes:
                self.values[source] = self.b.size(source.meta["val"])
            elif source in self.partition.replaced:
                self.replaced_reads[self.write_replaced(source), source] = None
            elif source not in self.b.copies:
                self.b.value(source)
        copy = copied(
            node, self.b.gm.graph, lambda source: self.values.get(source) or self.b.copies[source]
        )
        self.b.copies[node] = copy
        return copy

    def write_replaced(self, node: Node) -> Node:
        """Returns the node that takes the place of a replaced node, over results."""
        if node not in self.values:
            self._open.add(node)
            value = self.partition.replaced[node]
            for leaf in nearest([value], self._plan_by_leaf):
                self._call(self._plan_by_leaf[leaf])
            self.b.at(None, _metadata_of(node))
            tensor = node.meta["val"]
            is_uint8 = tensor.dtype == torch.uint8
            new_node = self._lower.of(value, None if is_uint8 else tensor.dtype)
            if is_uint8 and self.b.dtype(new_node) == torch.float8_e8m0fnu:
                new_node = self.b.call(aten.view.dtype, new_node, torch.uint8)
            self.values[node] = new_node
        return self.values[node]

    def _call(self, plan: Plan) -> None:
        """Writes the call of a plan, once."""
        if plan in self._called:
            return
        self._called.add(plan)
        self.b.at(None, _metadata_of(plan.products[0]))
        self._lower.known.update(emit_call(self.b, self._lower, plan))


def _metadata_of(node: Node) -> dict[str, Any]:
    """Returns the metadata that says where a node comes from."""
    return {key: node.meta[key] for key in _METADATA if key in node.meta}


def keep_output_names(old_graph: FxGraph, new_graph: FxGraph) -> None:
    """Gives the outputs of the new graph the names that they have in the old one.

    The signature of an exported program has these names.
    """
    pairs = dict(zip(memory.leaving(old_graph), memory.leaving(new_graph), strict=True))
    outputs = list(pairs.values())
    nodes_by_name = {node.name: node for node in new_graph.nodes}
    for old, new in pairs.items():
        owner = nodes_by_name.get(old.name)
        if owner is new or owner in outputs or new.op == "placeholder" or outputs.count(new) > 1:
            continue
        if owner is not None:  # the node with this name is still read
            owner.name = new.name
        take_name(new, old.name)
