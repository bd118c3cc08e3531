"""Runs the nodes that the pairs need of one of the two graphs, as torch runs them, on the CPU.

``compare.py`` runs both graphs on the values that ``draws.py`` draws.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from mla_fusion.fx import registered
from mla_fusion.fx.kinds import attribute, dtype_of, is_float, is_mutating, signature, value_of
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
    """Raised if ``node`` does not run on the drawn values."""

    def __init__(self, node: Node, reason: object) -> None:
        super().__init__(f"{node.name} does not run on CPU: {reason}")
        self.node = node


def cone_of(targets: Nodes, leaves: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """Returns the nodes from which ``targets`` are computed, in order, and the leaves that they
    read.

    leaves  nodes to stop at, besides inputs and attributes of the graph
    """
    nodes, read_leaves, stack = set[Node](), set[Node](), list(targets)
    while stack:
        node = stack.pop()
        if node in leaves or node.op in ("placeholder", "get_attr"):
            read_leaves.add(node)
        elif node not in nodes and not is_size(node):
            nodes.add(node)
            stack += node.all_input_nodes
    return sorted(nodes), sorted(read_leaves)


def dependents(nodes: Nodes, sources: Nodes) -> set[Node]:
    """Returns ``sources``, and those of ``nodes`` (in order) that are computed from them."""
    reached_nodes = set(sources)
    for node in nodes:
        if not reached_nodes.isdisjoint(node.all_input_nodes):
            reached_nodes.add(node)
    return reached_nodes


class Side:
    """One of the two graphs, cut to what the pairs need.

    nodes   the nodes from leaves to targets, in order
    leaves  the leaves of this graph, with the leaves of the original graph that they stand for
    """

    def __init__(self, targets: Nodes, stands_for: Mapping[Node, Node]) -> None:
        """Cuts a graph.

        stands_for  by leaf of this graph: the leaf of the original graph. An attribute stands for
                    the one of its name there. Any other attribute holds its own tensor
        """
        self.nodes, leaves = cone_of(targets, stands_for)
        attributes_by_name = {
            leaf.target: leaf for leaf in stands_for.values() if leaf.op == "get_attr"
        }
        originals = {
            node: stands_for.get(node) or attributes_by_name.get(node.target) for node in leaves
        }
        self.leaves = {node: leaf for node, leaf in originals.items() if leaf is not None}
        self._own_tensors = {
            node: attribute(node) for node, leaf in originals.items() if leaf is None
        }
        self._may_write = any(map(_may_write, self.nodes))
        self._body_of = cache(registered.body)  # traced once, not for every draw

    def run(
        self,
        binding: Binding,
        drawn: Values,
        wide: bool,
        targets: Nodes,
        others: Values | None = None,
    ) -> dict[Node, Any]:
        """Returns the values of ``targets`` and of all that they are computed from. Raises
        ``Unrunnable``.

        drawn   values by leaves of the original graph
        wide    True: compute in float64, so that casts among floats do nothing
        others  values of leaves and nodes that replace those drawn or computed
        """
        env = dict(self._own_tensors)
        for node, leaf in self.leaves.items():
            env[node] = value = drawn[leaf]
            if isinstance(value, Tensor):
                # a cache may have another shape in the rewritten graph
                value = _reshape(value, binding.shape_of(node))
                env[node] = value.clone() if self._may_write else value
        env = {node: _on_cpu(value, wide) for node, value in env.items()}
        env |= others or {}

        def literal(value: Any) -> Any:
            """Returns an argument as a CPU takes it."""
            if isinstance(value, Node):
                size = value_of(value)
                return binding.number(size) if is_symbolic(size) else value
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return _wide_dtype(value) if wide and isinstance(value, torch.dtype) else value

        def computed(node: Node, env: Values) -> Any:
            """Returns the value of one node."""
            arguments = map_aggregate((node.args, node.kwargs), literal)
            body = self._body_of(node)
            if isinstance(body, Graph):
                operands = (
                    env.get(node_read, literal(node_read)) for node_read in node.all_input_nodes
                )
                inner_values = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
                results: Any = body.output_node().args[0]
                for inner_node in body.nodes:
                    if inner_node.op == "call_function" and not is_size(inner_node):
                        inner_values[inner_node] = computed(inner_node, inner_values)
                result: Any = map_arg(map_aggregate(results, literal), inner_values.__getitem__)
                return result[0] if isinstance(value_of(node), Tensor) else result
            args, kwargs = map_arg(arguments, env.__getitem__)
            if "c10d" in str(node.target):  # no other process takes part: each holds the same
                operand: Any = args[0]
                shape = binding.shape_of(node)
                places = torch.arange(math.prod(shape)) % operand.numel()
                return operand.flatten()[places].reshape(shape)
            # strides on a CPU may differ from the graph's
            call: Any = _reshape if node.target in _RESHAPES else node.target
            return _in_recorded_dtype(node, call(*args, **kwargs), wide)

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # random nodes draw the same in both graphs
            for node in cone_of(targets, env)[0]:
                try:
                    env[node] = computed(node, env)
                except Exception as error:  # any operator may refuse a value
                    raise Unrunnable(node, error) from error
        return env


def _may_write(node: Node) -> bool:
    """Returns True if the node may write into what it reads.

    npu operators do so against their schemas.
    """
    name = signature(node.target).name
    is_pure = not name or name.startswith("aten::") or name.endswith("_functional")
    return is_mutating(node) or not is_pure


def _in_recorded_dtype(node: Node, result: Any, wide: bool) -> Any:
    """Returns a result in the dtype that the graph records for the node."""
    if isinstance(result, (tuple, list)):
        return [_on_cpu(part, wide) for part in result]
    if isinstance(result, Tensor) and "empty" in str(node.target):  # unwritten memory
        result.fill_(math.nan if is_float(result.dtype) else -1)
    if wide or not isinstance(result, Tensor) or not is_float(result.dtype):
        return _on_cpu(result, wide)
    return result.to(dtype_of(node))  # torch's default dtype may have changed since


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 or complex128 for a float of more than one byte, else the dtype itself.

    Bytes are read by their format.
    """
    if dtype.itemsize == 1 or not is_float(dtype):
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64


def _on_cpu(value: Any, wide: bool) -> Any:
    """Returns a value on the CPU, widened if ``wide``."""
    if not isinstance(value, Tensor):
        return value
    return value.to("cpu", _wide_dtype(value.dtype) if wide else value.dtype)


def _reshape(value: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    """Returns the value reshaped. If a cache has fewer blocks than ``sizes``, the first axis is
    shorter.
    """
    has_fewer = value.numel() < math.prod(sizes)
    return value.reshape([-1, *sizes[1:]] if has_fewer else sizes)
