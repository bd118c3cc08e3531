"""Runs what pairs need of one of the two graphs: raw nodes on CPU tensors, as torch runs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx import registered
from mla_fusion.fx.kinds import attribute, is_float, value_of
from mla_fusion.fx.sizes import Binding, is_size, is_symbolic

aten = torch.ops.aten
Nodes = Iterable[Node]
Values = Mapping[Node, Any]
_RESHAPES = (
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
)


class Unrunnable(Exception):
    """``node`` does not run on the drawn values."""

    def __init__(self, node: Node, reason: object) -> None:
        super().__init__(f"{node.name} does not run on CPU: {reason}")
        self.node = node


def cone_of(wanted: Nodes, leaves: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes from which ``wanted`` are computed, in the order of the graph, and the leaves among
    what they read: nodes of ``leaves``, inputs of the graph, attributes.
    """
    inside, outside, stack = set[Node](), set[Node](), list(wanted)
    while stack:
        node = stack.pop()
        if node in leaves or node.op in ("placeholder", "get_attr"):
            outside.add(node)
        elif node not in inside and not is_size(node):
            inside.add(node)
            stack += node.all_input_nodes
    return sorted(inside), sorted(outside)


def dependent(nodes: Nodes, on: Nodes) -> set[Node]:
    """``on``, and those of ``nodes`` (in order) that are computed from them."""
    found = set(on)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class Side:
    """
    nodes   from leaves to what is wanted, in order
    leaves  what is drawn, and for which leaf of the original graph
    """

    def __init__(self, wanted: Nodes, stands_for: Mapping[Node, Node]) -> None:
        """``stands_for``: of each leaf, itself in the original graph. An attribute stands for the
        one of its name there; another one holds its own tensor.
        """
        self.nodes, found = cone_of(wanted, stands_for)
        named = {leaf.target: leaf for leaf in stands_for.values() if leaf.op == "get_attr"}
        of = {node: stands_for.get(node) or named.get(node.target) for node in found}
        self.leaves = {node: leaf for node, leaf in of.items() if leaf is not None}
        self._held = {node: attribute(node) for node, leaf in of.items() if leaf is None}
        self._writes = any(map(_may_write, self.nodes))

    def run(
        self,
        binding: Binding,
        drawn: Values,
        wide: bool,
        wanted: Nodes,
        others: Values | None = None,
    ) -> dict[Node, Any]:
        """The values of ``wanted`` and of what they are computed from. Raises ``Unrunnable``.

        drawn   by leaves of the original graph
        wide    in float64, so that casts among floats do nothing
        others  values of leaves and nodes that are not as drawn or computed
        """
        env = dict(self._held)
        for node, leaf in self.leaves.items():
            env[node] = value = drawn[leaf]
            if isinstance(value, Tensor):
                # a cache may have another shape in the rewritten graph
                value = _reshape(value, binding.shape_of(node))
                env[node] = value.clone() if self._writes else value
        env = {node: _placed(value, wide) for node, value in env.items()}
        env |= others or {}

        def literal(value: Any) -> Any:
            """An argument as a CPU takes it."""
            if isinstance(value, Node):
                meaning = value_of(value)
                return binding.number(meaning) if is_symbolic(meaning) else value
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return _wide(value) if wide and isinstance(value, torch.dtype) else value

        def computed(node: Node, env: Values) -> Any:
            given = map_aggregate((node.args, node.kwargs), literal)
            body = registered.body(node)
            if isinstance(body, Graph):
                operands = (env.get(one, literal(one)) for one in node.all_input_nodes)
                inner = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
                results: Any = body.output_node().args[0]
                for one in body.nodes:
                    if one.op == "call_function" and not is_size(one):
                        inner[one] = computed(one, inner)
                result: Any = map_arg(map_aggregate(results, literal), inner.__getitem__)
                return result[0] if isinstance(node.meta["val"], Tensor) else result
            args, kwargs = map_arg(given, env.__getitem__)
            # strides on a CPU may be others than the graph's
            call: Any = _reshape if node.target in _RESHAPES else node.target
            return _as_recorded(node, call(*args, **kwargs), wide)

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # random nodes of both graphs draw the same
            for node in cone_of(wanted, env)[0]:
                try:
                    env[node] = computed(node, env)
                except Exception as error:  # any operator may refuse a value
                    raise Unrunnable(node, error) from error
        return env


def _may_write(node: Node) -> bool:
    """Does it write into what it reads? npu operators do so though their schemas do not say it."""
    if not isinstance(node.target, OpOverload):
        return False
    schema = schema_of(node.target)
    is_pure = node.target.namespace == "aten" or schema.name.endswith("_functional")
    return bool(schema.is_mutable) or not is_pure


def _as_recorded(node: Node, result: Any, wide: bool) -> Any:
    if isinstance(result, (tuple, list)):
        return [_placed(part, wide) for part in result]
    if isinstance(result, Tensor) and "empty" in str(node.target):  # nothing was written to it
        result.fill_(math.nan if is_float(result.dtype) else -1)
    if wide or not isinstance(result, Tensor) or not is_float(result.dtype):
        return _placed(result, wide)
    return result.to(node.meta["val"].dtype)  # torch's default dtype may be another one by now


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128 for a float of more than one byte: bytes are read by their format."""
    if dtype.itemsize == 1 or not is_float(dtype):
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64


def _placed(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to("cpu", _wide(value.dtype) if wide else value.dtype)


def _reshape(value: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    """A cache may have fewer blocks than the graph says: the first axis takes what there is."""
    fewer = value.numel() < math.prod(sizes)
    return value.reshape([-1, *sizes[1:]] if fewer else sizes)
