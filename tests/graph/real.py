"""Values evaluated on real numbers, to be compared with eager torch.

Floats are float64 and are never rounded; integers are int64. Only a cast to one byte rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mla_fusion.graph.form import MOVES, Value, order
from mla_fusion.graph.numbers import Number


class Unknown(Exception):
    """A Value of which no more is known than its name and what it reads: ``args`` is it."""


class Real:
    """
    leaves  the tensors of leaves by name; that of a Value given is not computed
    """

    def __init__(
        self, leaves: Mapping[str, Tensor], given: Mapping[Value, Tensor] | None = None
    ) -> None:
        self.leaves = leaves
        self.tensors = {value: wide(tensor) for value, tensor in (given or {}).items()}

    def __call__(self, value: Value) -> Tensor:
        for one in order([value], self.tensors):
            found = wide(self._computed(one, [self.tensors[source] for source in one.sources]))
            assert found.shape == one.shape, (one, found.shape)
            self.tensors[one] = found
        return self.tensors[value]

    def _computed(self, value: Value, read: list[Tensor]) -> Tensor:
        op, literal = value.op, value.literal
        if op in _OPERATIONS:
            return _OPERATIONS[op](value, *read)
        if op == "leaf" and str(literal).startswith("size "):
            return torch.tensor(int(literal.removeprefix("size ")))
        if op == "leaf":
            return self.leaves[literal]
        if op == "function" and is_known_alone(value):
            return _FUNCTIONS[literal[0]](value, literal[1], *read)
        raise Unknown(value)


def wide(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def is_known(values: Iterable[Value]) -> bool:
    """Can they be evaluated?"""
    return all(map(is_known_alone, order(values)))


def is_known_alone(value: Value) -> bool:
    """Is it, of sources that are?"""
    if value.op != "function":
        return value.op != "opaque"
    name, literals = value.literal
    return name in _FUNCTIONS and not str(literals).startswith("([")  # a call without a rule


# -- operations


def _sum(value: Value, *read: Tensor) -> Tensor:
    return _weighted(*value.literal, read, value.shape)


def _weighted(
    coefficients: Iterable[Fraction], offset: Fraction, read: Iterable[Tensor], shape: Any
) -> Tensor:
    coefficients, read = tuple(coefficients), tuple(map(_number, read))
    is_whole = all(one.denominator == 1 for one in (*coefficients, offset))
    kind = int if is_whole and not any(map(Tensor.is_floating_point, read)) else float
    parts = [kind(by) * one for by, one in zip(coefficients, read, strict=True)]
    start = wide(torch.tensor(kind(offset), dtype=torch.float64 if kind is float else None))
    return reduce(torch.add, parts, start.expand(shape))


def _product(value: Value, *read: Tensor) -> Tensor:
    exponents, times = value.literal
    return _raised(exponents, times, read, value.is_float).expand(value.shape)


def _raised(
    exponents: Iterable[Fraction], times: Number, read: Iterable[Tensor], is_float: bool
) -> Tensor:
    found = torch.tensor(float(times), dtype=torch.float64)
    found = found if is_float else torch.tensor(int(times.ratio))
    for exponent, one in zip(exponents, map(_number, read), strict=True):
        if exponent.denominator == 1 and exponent > 0:
            found = found * one ** int(exponent)
        elif exponent.denominator == 3:  # of what is below 0 too
            found = found * one.sign() * one.abs().double() ** float(exponent)
        else:
            found = found * one.double() ** float(exponent)
    return found


def _number(tensor: Tensor) -> Tensor:
    return tensor.long() if tensor.dtype == torch.bool else tensor


def _reduce(value: Value, read: Tensor) -> Tensor:
    """What a reduction of sizes or elements stands for is the largest of them."""
    (source,) = value.sources
    while source.op in MOVES:
        source = source.sources[0]
    if source.op == "function" and source.literal[0] in ("size", "element"):
        return read.amax(value.literal)
    return _number(read).sum(value.literal)


def _dot(value: Value, left: Tensor, right: Tensor) -> Tensor:
    if left.is_floating_point() or right.is_floating_point():
        left, right = left.double(), right.double()
    return left @ right


def _slice(value: Value, read: Tensor) -> Tensor:
    axis, start, step = value.literal
    return read.index_select(axis, torch.arange(value.shape[axis]) * step + start)


def _gather(value: Value, base: Tensor, index: Tensor) -> Tensor:
    return base.index_select(value.literal, index.reshape(-1)).reshape(value.shape)


def _write(value: Value, base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    if value.literal is not None:
        raise Unknown(value)
    return base.index_copy(0, index, rows.to(base.dtype))


def _cast(value: Value, read: Tensor) -> Tensor:
    dtype: torch.dtype = value.literal
    return read.double() if dtype.is_floating_point and dtype.itemsize > 1 else read.to(dtype)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "constant": lambda value: value.literal.tensor,
    "count": lambda value: torch.arange(*value.shape),
    "sum": _sum,
    "product": _product,
    "reduce": _reduce,
    "dot": _dot,
    "reshape": lambda value, read: read.reshape(value.shape),
    "permute": lambda value, read: read.permute(value.literal),
    "expand": lambda value, read: read.expand(value.shape),
    "slice": _slice,
    "join": lambda value, *read: torch.cat(read, value.literal),
    "gather": _gather,
    "write": _write,
    "cast": _cast,
}


# -- functions


def _whole(value: Value, state: tuple[bool, float, float], read: Tensor) -> Tensor:
    is_rounded, least, most = state
    return (read.round() if is_rounded else read).clamp(least, most)


def _clamp(value: Value, ends: tuple[Any, Any], read: Tensor, *limits: Tensor) -> Tensor:
    """Its ends are literals of an activation; else they are read, but for those left out."""
    if value.active:
        return read.clamp(*ends)
    given = iter(limits)
    least, most = (None if is_out else next(given) for is_out in ends)
    return torch.clamp(read, least, most)


def _saturated(most: float, dtype: torch.dtype) -> Callable[..., Tensor]:
    def function(value: Value, _: Any, read: Tensor) -> Tensor:
        return read.clamp(-most, most).to(dtype)

    return function


def _power_of_two(value: Value, _: Any, read: Tensor) -> Tensor:
    """Of a block's largest: its exponent, less that of 448."""
    return torch.exp2(read.log2().floor() - 8)


def _divided(mode: str) -> Callable[..., Tensor]:
    return lambda value, _, one, other: torch.div(one, other, rounding_mode=mode)


def _plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda value, _, *read: function(*read)


def _same(value: Value, _: Any, read: Tensor) -> Tensor:
    return read


def _as_dtype(value: Value, name: str, read: Tensor) -> Tensor:
    return read.to(getattr(torch, name.removeprefix("torch.")))


def _overflowing(value: Value, _: Any, read: Tensor) -> Tensor:
    return read.to(value.dtype)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: _plain(getattr(torch, name))
    for name in "sigmoid exp sin cos tanh relu abs where eq ne gt ge lt le maximum minimum".split()
} | {
    "and": _plain(torch.logical_and),
    "number": lambda value, text: torch.tensor(float(text), dtype=torch.float64),
    "sum": lambda value, literals, *read: _weighted(*literals, read, value.shape),
    "product": lambda value, literals, *read: _raised(*literals, read, value.is_float),
    "sum that overflows": _overflowing,
    "product that overflows": _overflowing,
    "quotient": _divided("floor"),
    "quotient, floor": _divided("floor"),
    "quotient, trunc": _divided("trunc"),
    "whole": _whole,
    "clamp": _clamp,
    "clip": lambda value, _, read, most: torch.clamp(read, -most, most),
    "size": lambda value, _, squares: squares.sqrt(),
    "element": _same,
    "largest": _same,
    "greatest": _same,
    "int8": lambda value, _, read: read.round().clamp(-128, 127),
    "fp8": _saturated(448, torch.float8_e4m3fn),
    "mxfp8": _saturated(448, torch.float8_e4m3fn),
    "power of two": _power_of_two,
    "to": _as_dtype,
    "to whole": _as_dtype,
}
