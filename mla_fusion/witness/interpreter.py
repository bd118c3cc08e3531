"""Runs raw FX nodes on CPU tensors, as torch runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx.kinds import filled_with, is_float
from mla_fusion.fx.sizes import Binding, is_size, is_symbolic
from mla_fusion.operators.known import value_of

aten = torch.ops.aten
_EXPANDS = (aten.expand.default, aten.expand_copy.default)
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


def cone_of(wanted: Iterable[Node], leaves: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes from which ``wanted`` are computed, in the order of the graph, and the leaves among
    what they read: inputs of the graph, attributes, and nodes of ``leaves``.
    """
    inside, outside, stack = set[Node](), dict[Node, None](), list(wanted)
    while stack:
        node = stack.pop()
        if node in inside or node in outside or is_size(node):
            continue
        if node in leaves or node.op in ("placeholder", "get_attr"):
            outside[node] = None
            continue
        inside.add(node)
        if filled_with(node) is None:
            stack += node.all_input_nodes
    return sorted(inside), sorted(outside)


def dependent(nodes: Iterable[Node], on: Iterable[Node]) -> set[Node]:
    """``on``, and those of ``nodes`` (in order) that are computed from them."""
    found = set(on)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class Interpreter:
    """Runs ``nodes`` in their order.

    of_x      nodes that are computed from x: they run last, behind indices that may be out of range
    changing  nodes that differ from draw to draw. The others are kept in ``known``, which a caller
              shares among draws of equal weights
    binding   numbers for symbolic sizes
    wide      floats are float64, so that casts among floats do nothing
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        of_x: Collection[Node],
        changing: Collection[Node],
        binding: Binding,
        wide: bool = False,
    ) -> None:
        self._changing, self._binding, self._wide = changing, binding, wide
        self._writes = any(map(_writes, nodes))
        ordered = nodes if self._writes else sorted(nodes, key=lambda node: node in of_x)
        self._steps = [
            (node, *map_aggregate((node.args, node.kwargs), self._literal)) for node in ordered
        ]

    def run(
        self, given: Mapping[Node, Any], known: dict[Node, Any], wanted: Iterable[Node]
    ) -> dict[Node, Any]:
        """The values of ``wanted`` and of what they are computed from. Raises ``Unrunnable``.

        given  values of leaves, and of nodes, which are then not run
        """
        env, needed = dict(given), set(cone_of(wanted, given)[0])
        if self._writes:  # other runs read what was drawn too
            env = {node: _copied(value) for node, value in env.items()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # random nodes of both graphs draw the same
            for node, args, kwargs in self._steps:
                if node in env or (node not in needed and not self._writes):
                    continue
                keeps = node not in self._changing and not self._writes
                if keeps and node in known:
                    env[node] = known[node]
                    continue
                env[node] = self._value(node, args, kwargs, env)
                if keeps:
                    known[node] = env[node]
        return env

    def _value(self, node: Node, args: Any, kwargs: Any, env: Mapping[Node, Any]) -> Any:
        try:
            filling = filled_with(node)
            if filling is not None:
                return self._filled(node, filling, env)
            args, kwargs = map_arg((args, kwargs), env.__getitem__)
            result = _call(node.target)(*args, **kwargs)
        except Exception as error:  # any operator may refuse a value
            raise Unrunnable(node, error) from error
        if self._wide:
            several = isinstance(result, (tuple, list))
            return [widened(part) for part in result] if several else widened(result)
        recorded = getattr(value_of(node), "dtype", None)
        if isinstance(result, Tensor) and recorded is not None and is_float(result.dtype):
            return result.to(recorded)  # torch's default dtype may be another one by now
        return result

    def _filled(self, node: Node, filling: float, env: Mapping[Node, Any]) -> Tensor:
        """One number everywhere: for memory not yet written NaN, or -1 among integers."""
        recorded = node.meta["val"]
        lender = node.args[0] if node.args and "_like" in str(node.target) else None
        made = env.get(lender) if isinstance(lender, Node) else None
        shape = self._binding.shape(recorded.shape) if made is None else made.shape
        if math.isnan(filling) and not is_float(recorded.dtype):
            filling = -1
        return torch.full(shape, filling, dtype=self._literal(recorded.dtype))

    def _literal(self, value: Any) -> Any:
        """An argument as a CPU takes it, each symbolic size a number."""
        if isinstance(value, Node):
            meaning = value_of(value)
            if is_symbolic(meaning):
                return self._binding.number(meaning)
            return meaning if isinstance(meaning, (int, float)) else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return wide(value) if self._wide and isinstance(value, torch.dtype) else value


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128 for a float of more than one byte: bytes are read by their format."""
    if dtype.itemsize == 1 or not is_float(dtype):
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64


def widened(value: Any) -> Any:
    return value.to(wide(value.dtype)) if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)


def _call(target: Any) -> Callable[..., Any]:
    """What a node calls. A view is a reshape: strides on a CPU may be others than the graph's."""
    return reshaped if target in _RESHAPES else _expand if target in _EXPANDS else target


def reshaped(value: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    """A cache may have fewer blocks than the graph says: the first axis takes what there is."""
    if value.numel() < math.prod(sizes):
        first = next(place for place, size in enumerate(sizes) if size > 1)
        sizes = [-1 if place == first else size for place, size in enumerate(sizes)]
    return value.reshape(sizes)


def _expand(value: Tensor, sizes: Sequence[int], **_: Any) -> Tensor:
    own = [1] * (len(sizes) - value.dim()) + list(value.shape)
    return value.expand([size if has == 1 else has for has, size in zip(own, sizes, strict=True)])
