"""What verdicts on a plan depend on, in a form that is equal for prologues of equal layers: what
the dtypes of a model are, what the operator's contract says, what the witness sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.held import numbers
from mla_fusion.graph.form import Value, numbered
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.plan.outputs import source_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.region import activation_nodes


class Structures:
    """Of the plans of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kinds: dict[Node, object] = {}
        self._held: dict[Value, object] = {}
        self._numbers: dict[object, int] = {}

    def of(self, plan: Plan) -> int:
        """Equal for plans that differ in the names of nodes and inputs alone: nodes from x to what
        is replaced, with dtypes, strides and what is known of parameters; Values of both; the call.
        """
        graph, arguments = self._graph, plan.proposal.arguments
        ends = activation_nodes(plan)
        held = [(name, cache, tuple(map(str, shape))) for name, cache, shape in plan.written_caches]
        read = source_nodes(graph, plan.values.values())
        nodes = _Numbered(self, ends)
        for node in (*plan.region, *read, *(cache for _, cache, _ in held)):
            nodes.add(node)
        first = arguments["token_x"]
        known = first, *plan.results.values()
        sides = [*plan.replaced.values(), *plan.proposal.products]
        for node in plan.replaced:
            sides += values_of(graph.readings[node])
        key, values = numbered(
            [plan.proposal.x, *plan.values.values(), *sides], known, first.serial
        )
        structure = (
            tuple(nodes.parts),
            tuple(nodes.numbers[node] for node in (*read, *plan.replaced)),
            tuple((n, nodes.numbers[cache], cache in graph.hidden, s) for n, cache, s in held),
            key,
            tuple(self._nodes_of(one) for one in values if one is first or not one.active),
            tuple((n, None if isinstance(a, Value) else a) for n, a in arguments.items()),
            tuple(plan.attributes.items()),
            type(plan.caches),
        )
        return self._numbers.setdefault(structure, len(self._numbers))

    def _nodes_of(self, value: Value) -> object:
        """What the nodes are that hold a Value: the first of each kind."""
        found = self._held.get(value)
        if found is None:
            nodes = self._graph.nodes.get(value, ())
            found = self._held[value] = tuple(dict.fromkeys(map(self.kind, nodes)))
        return found

    def kind(self, node: Node) -> object:
        """What a node holds, and whose it is where it is an input."""
        found = self._kinds.get(node)
        if found is None:
            is_input = node.op in ("placeholder", "get_attr")
            own = (node.op, node in self._graph.parameters, numbers(node)) if is_input else None
            found = self._kinds[node] = own, _described(node.meta.get("val"))
        return found


class _Numbered:
    """Nodes by number, with what they read."""

    def __init__(self, structures: Structures, ends: dict[Node, str]) -> None:
        self._structures, self._ends = structures, ends
        self.numbers: dict[Node, int] = {}
        self.parts = list[object]()

    def add(self, node: Node) -> None:
        """With all that it is computed from, down to the ends."""
        stack = [node]
        while stack:
            one = stack[-1]
            if one in self.numbers:
                stack.pop()
                continue
            is_end = one in self._ends or one.op in ("placeholder", "get_attr")
            above = [] if is_end else [n for n in one.all_input_nodes if n not in self.numbers]
            if above:
                stack += above[::-1]
                continue
            called = (
                (self._ends.get(one),)
                if is_end
                else (one.target, self._argument(one.args), self._argument(one.kwargs))
            )
            self.parts.append((self._structures.kind(one), called))
            self.numbers[one] = len(self.numbers)
            stack.pop()

    def _argument(self, given: Any) -> object:
        if isinstance(given, Node):
            return self.numbers[given]
        if isinstance(given, (list, tuple)):
            return tuple(map(self._argument, given))
        if isinstance(given, dict):
            return tuple((name, self._argument(one)) for name, one in given.items())
        return repr(given)


def _described(held: Any) -> object:
    if isinstance(held, torch.Tensor):
        shape, strides = _sizes(held.shape), _sizes(held.stride())
        return held.dtype, shape, strides, held.device, held.is_conj()
    if isinstance(held, (list, tuple)):
        return tuple(map(_described, held))
    return str(held)


def _sizes(sizes: Iterable[Any]) -> tuple[object, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in sizes)
