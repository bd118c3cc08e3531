"""Runs nodes of a region on CPU tensors, one after the other, as torch would.

Recognition runs nodes by ``fx/program.py``. The witness does not: a mistake there would deceive
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx.kinds import filled_with, is_float
from mla_fusion.fx.sizes import Binding, is_size, is_symbolic
from mla_fusion.operators.known import dtype_of, value_of

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
    """A node of the region does not run on these values."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.name} does not run on CPU: {reason}")
        self.node = node


class Interpreter:
    """Nodes, in an order in which they can be run.

    binding  numbers for symbolic sizes
    wide     all floats are float64, so that casts among them do nothing; else dtypes are the
             graph's
    """

    def __init__(self, nodes: Sequence[Node], binding: Binding, wide: bool = False) -> None:
        self._binding, self._wide = binding, wide
        self._steps = [
            (node, map_aggregate((node.args, node.kwargs), self._literal))
            for node in nodes
            if not is_size(node)
        ]
        self._in_place = any(map(_writes, nodes))

    def run(self, given: Mapping[Node, Any], wanted: Iterable[Node]) -> dict[Node, Any]:
        """The values of all nodes that are run: those from which ``wanted`` are made.

        Raises ``Unrunnable`` where one of ``wanted`` cannot be made.
        """
        env, wanted = dict(given), list(wanted)
        if self._in_place:  # what is drawn is drawn for other runs too
            env = {
                node: value.clone() if isinstance(value, Tensor) else value
                for node, value in env.items()
            }
        needed = set(wanted)
        for node, _ in reversed(self._steps):
            if node in needed and node not in env:
                needed.update(node.all_input_nodes)
        with torch.no_grad():
            for node, arguments in self._steps:
                if node not in env and (node in needed or self._in_place):
                    env[node] = self._value(node, arguments, env)
        for node in wanted:
            if isinstance(env[node], Unrunnable):
                raise env[node]
        return env

    def _value(self, node: Node, arguments: Any, env: Mapping[Node, Any]) -> Any:
        """Of a node; of one that does not run the reason, which is the reason of all that read
        it.
        """
        try:
            filling = filled_with(node)
            if filling is not None:
                return self._filled(node, filling, env)
            args, kwargs = map_arg(arguments, lambda read: _found(env[read]))
            return self._as_recorded(node, _call(node.target)(*args, **kwargs), args)
        except Unrunnable as error:
            return error
        except Exception as error:  # any operator may refuse a value
            return Unrunnable(node, str(error))

    def _literal(self, value: Any) -> Any:
        """An argument as a CPU takes it, each symbolic size a number."""
        if isinstance(value, Node):
            meaning = value_of(value)
            if is_symbolic(meaning):
                return self._binding.number(meaning)
            return meaning if isinstance(meaning, (int, float)) else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return self._dtype(value) if isinstance(value, torch.dtype) else value

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return wide(dtype) if self._wide else dtype

    def _filled(self, node: Node, filling: float, env: Mapping[Node, Any]) -> Tensor:
        """One number everywhere; -1 for memory not yet written where it would hold no NaN."""
        recorded = node.meta["val"]
        lender = node.args[0] if node.args and "_like" in str(node.target) else None
        is_made = isinstance(lender, Node) and lender in env
        shape = _found(env[lender]).shape if is_made else self._binding.shape(recorded.shape)  # type: ignore[index]
        if math.isnan(filling) and not is_float(recorded.dtype):
            filling = -1
        return torch.full(shape, filling, dtype=self._dtype(recorded.dtype))

    def _as_recorded(self, node: Node, result: Any, args: Sequence[Any]) -> Any:
        """A result with the dtype of its kind."""
        if not isinstance(result, Tensor):
            several = isinstance(result, (tuple, list))
            return [widened(part) if self._wide else part for part in result] if several else result
        if self._wide:
            return widened(result)
        if result.is_floating_point() and not any(
            isinstance(arg, Tensor) and is_float(arg.dtype) for arg in args
        ):
            # torch's default dtype may be another one by now
            return result.to(dtype_of(node))
        return result


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128 for any float; numbers of one byte, which products read by their
    format, stay.
    """
    if dtype.itemsize == 1 or not is_float(dtype):
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64


def widened(value: Any) -> Any:
    return value.to(wide(value.dtype)) if isinstance(value, Tensor) else value


def _found(value: Any) -> Any:
    if isinstance(value, Unrunnable):
        raise value
    return value


def _writes(node: Node) -> bool:
    """Does it change an argument? (``kinds.is_mutating`` says no where recognition has a functional
    form for it.)
    """
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)


def _call(target: Any) -> Callable[..., Any]:
    """What a node calls; a view as a reshape, since strides on a CPU may be others than those of
    the graph.
    """
    return _reshape if target in _RESHAPES else _expand if target in _EXPANDS else target


def _reshape(value: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    """A cache may have fewer blocks than the graph says: the first axis takes what there is."""
    if value.numel() < math.prod(sizes):
        first = next(place for place, size in enumerate(sizes) if size > 1)
        sizes = [-1 if place == first else size for place, size in enumerate(sizes)]
    return value.reshape(sizes)


def _expand(value: Tensor, sizes: Sequence[int], **_: Any) -> Tensor:
    own = [1] * (len(sizes) - value.dim()) + list(value.shape)
    return value.expand([size if has == 1 else has for has, size in zip(own, sizes, strict=True)])
