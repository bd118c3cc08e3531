"""Numbers plans by structure, so that the layers of a model share their verdicts.

``planner.py`` asks the contract, and ``commit/verify.py`` the witness, once for each number. What
these verdicts depend on is equal for plans of one number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.vector_numbers import HOLDS_BFLOAT16
from mla_fusion.graph.form import Value, numbered
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.plan.outputs import source_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.region import activation_nodes


class Structures:
    """Numbers the plans of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kinds: dict[Node, object] = {}
        self._kinds_of_values: dict[Value, object] = {}
        self._numbers: dict[object, int] = {}

    def number_of(self, plan: Plan) -> int:
        """Returns a number that is equal for plans that differ only in the names of nodes and
        inputs.

        It stands for the nodes from x to what is replaced, with dtypes, strides and what is known
        of parameters. It also stands for the Values and for the call.
        """
        graph, arguments = self._graph, plan.proposal.arguments
        end_nodes = activation_nodes(plan)
        caches = [
            (name, cache, tuple(map(str, shape))) for name, cache, shape in plan.written_caches
        ]
        argument_nodes = source_nodes(graph, plan.values.values())
        nodes = _NodeNumbers(self, end_nodes)
        for node in (*plan.region, *argument_nodes, *(cache for _, cache, _ in caches)):
            nodes.add(node)
        token_x = arguments["token_x"]
        fixed_values = token_x, *plan.results.values()
        sides = [*plan.replaced.values(), *plan.proposal.products]
        for node in plan.replaced:
            sides += values_of(graph.readings[node])
        key, values = numbered(
            [plan.proposal.x, *plan.values.values(), *sides], fixed_values, token_x.serial
        )
        structure = (
            tuple(nodes.parts),
            tuple(nodes.numbers[node] for node in (*argument_nodes, *plan.replaced)),
            tuple(
                (name, nodes.numbers[cache], cache in graph.hidden, shape_names)
                for name, cache, shape_names in caches
            ),
            key,
            tuple(
                self._node_kinds(value) for value in values if value is token_x or not value.active
            ),
            tuple(
                (name, None if isinstance(argument, Value) else argument)
                for name, argument in arguments.items()
            ),
            tuple(plan.attributes.items()),
            type(plan.caches),
        )
        return self._numbers.setdefault(structure, len(self._numbers))

    def _node_kinds(self, value: Value) -> object:
        """Returns the distinct kinds of the nodes that hold a Value."""
        kinds = self._kinds_of_values.get(value)
        if kinds is None:
            nodes = self._graph.nodes.get(value, ())
            kinds = self._kinds_of_values[value] = tuple(dict.fromkeys(map(self.kind_of, nodes)))
        return kinds

    def kind_of(self, node: Node) -> object:
        """Returns the dtype, shape and strides that a node holds, and for an input whose it is."""
        kind = self._kinds.get(node)
        if kind is None:
            is_input = node.op in ("placeholder", "get_attr")
            is_parameter, note = node in self._graph.parameters, node.meta.get(HOLDS_BFLOAT16)
            origin = (node.op, is_parameter, note) if is_input else None
            kind = self._kinds[node] = origin, _describe(node.meta.get("val"))
        return kind


class _NodeNumbers:
    """Numbers nodes, and describes each by its kind and the numbers of what it reads."""

    def __init__(self, structures: Structures, ends: dict[Node, str]) -> None:
        self._structures, self._ends = structures, ends
        self.numbers: dict[Node, int] = {}
        self.parts = list[object]()

    def add(self, root: Node) -> None:
        """Adds a node and all nodes that it is computed from, down to the ends."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.numbers:
                stack.pop()
                continue
            is_end = node in self._ends or node.op in ("placeholder", "get_attr")
            sources = [] if is_end else [n for n in node.all_input_nodes if n not in self.numbers]
            if sources:
                stack += sources[::-1]
                continue
            description = (
                (self._ends.get(node),)
                if is_end
                else (node.target, self._key_of(node.args), self._key_of(node.kwargs))
            )
            self.parts.append((self._structures.kind_of(node), description))
            self.numbers[node] = len(self.numbers)
            stack.pop()

    def _key_of(self, argument: Any) -> object:
        """Returns a node's argument with node numbers in place of nodes."""
        if isinstance(argument, Node):
            return self.numbers[argument]
        if isinstance(argument, (list, tuple)):
            return tuple(map(self._key_of, argument))
        if isinstance(argument, dict):
            return tuple((name, self._key_of(entry)) for name, entry in argument.items())
        return repr(argument)


def _describe(value: Any) -> object:
    """Returns dtype, shape, strides and device of a tensor, or the value as text."""
    if isinstance(value, torch.Tensor):
        shape, strides = _sizes(value.shape), _sizes(value.stride())
        return value.dtype, shape, strides, value.device, value.is_conj()
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    return str(value)


def _sizes(sizes: Iterable[Any]) -> tuple[object, ...]:
    """Returns sizes with symbols as text, so that they can be compared and hashed."""
    return tuple([size if isinstance(size, int) else str(size) for size in sizes])
