"""Bounds of the elements of a Value.

Arithmetic of integers (slots, positions, indices) is exact as long as the dtype holds the result.
``graph/call.py`` asks here whether it does. The rules of clamps and quotients ask which bounds
matter.

An input is bounded by its dtype, an input of 64 bits by ``_FARTHEST``.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import product as pairs
from math import inf, prod

import torch

from mla_fusion.graph.form import Value, filled_with
from mla_fusion.graph.numbers import is_open

_LONGEST = 1 << 19  # greatest symbolic size: tokens, rows of tables
_FARTHEST = 1 << 42  # greatest position or slot of 64 bits
Bounds = tuple[int, int]


def fits(value: Value, dtype: torch.dtype) -> bool:
    """True if the dtype holds each element exactly. A float dtype holds integers to its
    precision.
    """
    bounds = of(value)
    if bounds is None:
        return False
    least, most = bounds
    if dtype.is_floating_point:
        exact_limit = round(2 / torch.finfo(dtype).eps)
        return -exact_limit <= least and most <= exact_limit
    if dtype == torch.bool:
        return least >= 0 and most <= 1
    limits = torch.iinfo(dtype)
    return limits.min <= least and most <= limits.max


def least_integer(value: Value) -> float:
    """A number that no element of a Value of integers is below; -inf if none is known."""
    limits = of(value)
    return -inf if limits is None else limits[0]


def _greatest_size(size: int) -> int:
    """The size, or the greatest that a symbolic size can be."""
    return max(size, _LONGEST) if is_open(size) else size


def _number_bounds(times: int) -> Bounds:
    """The bounds of a number, which may be a symbolic size, or minus one."""
    if not is_open(abs(times)):
        return times, times
    return (1, _greatest_size(times)) if times > 0 else (-_greatest_size(-times), -1)


def _product_bounds(*factors: Bounds) -> Bounds:
    """The bounds of a product."""
    result = factors[0]
    for factor in factors[1:]:
        products = [left * right for left, right in pairs(result, factor)]
        result = min(products), max(products)
    return result


@lru_cache(maxsize=1 << 15)
def least(value: Value) -> float:
    """A number that no element of a Value of real numbers is below, wherever it is defined."""
    op, sources = value.op, value.sources
    if op == "product":
        factors = [float(value.number)]
        for source, power in value.operands:
            is_even = power.numerator % 2 == 0 or power.denominator % 2 == 0
            base = max(least(source), 0.0) if is_even else least(source)
            factors.append(-inf if base < 0 else base ** float(power) if power > 0 else 0.0)
        return prod(factors) if min(factors) >= 0 else -inf
    if op == "sum":
        terms = [float(times) * least(source) for source, times in value.operands if times > 0]
        return float(value.number) + sum(terms) if len(terms) == len(sources) else -inf
    if op in ("reduce", "reshape", "permute", "expand", "slice", "cast", "join"):
        inner = min(map(least, sources))
        return -inf if op == "reduce" and inner < 0 else inner
    return 0.0 if value.function in ("abs", "exp", "relu", "sigmoid") else -inf


def _remainders(terms: dict[Value, Fraction]) -> Iterator[tuple[Value, int]]:
    """Yields ``s`` and ``b`` for terms ``s - b * (s // b)``, and deletes the quotients from
    terms.
    """
    for quotient, times in [*terms.items()]:
        if quotient.function == "quotient":
            source, filled = quotient.sources[0], filled_with(quotient.sources[1])
            divisor = int(filled.number.ratio) if filled is not None else 0
            if divisor > 0 and terms.get(source, 0) * divisor == -times:
                del terms[quotient]
                yield source, divisor


@lru_cache(maxsize=1 << 15)
def of(value: Value) -> Bounds | None:
    """The bounds of the elements of a Value. None if they are not known, or not integers."""
    op, literal, sources = value.op, value.literal, value.sources
    if value.is_float and op not in ("product", "expand", "cast", "reshape"):
        return None
    if op == "product":
        if value.number.roots or value.number.ratio.denominator != 1:
            return None
        result = _number_bounds(int(value.number.ratio))
        for source, exponent in value.operands:
            inner = of(source)
            if inner is None or exponent.denominator != 1 or exponent < 0:
                return None
            result = _product_bounds(result, *[inner] * int(exponent))
        return result
    if op == "sum":
        if any(part.denominator != 1 for part in (*literal[0], value.number)):
            return None
        terms = dict(value.operands)
        ranges = [_number_bounds(int(value.number))]
        for source, divisor in _remainders(terms):
            ranges.append(
                _product_bounds(
                    _number_bounds(int(terms.pop(source))), (0, _greatest_size(divisor) - 1)
                )
            )
        for source, times in terms.items():
            inner = of(source)
            if inner is None:
                return None
            ranges.append(_product_bounds(_number_bounds(int(times)), inner))
        return sum(least for least, _ in ranges), sum(most for _, most in ranges)
    if op == "constant":
        tensor = literal.tensor
        return (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    if op == "count":
        return 0, _greatest_size(value.shape[0]) - 1
    if op == "reduce":
        inner = of(sources[0])
        count = prod(sources[0].shape[axis] for axis in literal)
        return None if inner is None else _product_bounds(inner, _number_bounds(count))
    if op in ("reshape", "permute", "expand", "slice", "gather"):
        return of(sources[0])
    if op == "cast" and not sources[0].is_float:
        inner = of(sources[0])
        if inner is not None and fits(sources[0], value.dtype):
            return inner
        if inner is not None and value.is_float:  # rounded to a whole number near it
            rounded = torch.tensor(inner, dtype=torch.float64).to(value.dtype).tolist()
            return None if inf in map(abs, rounded) else (int(rounded[0]), int(rounded[1]))
    if op == "join":
        known_bounds = [inner for source in sources if (inner := of(source)) is not None]
        if len(known_bounds) < len(sources):
            return None
        return min(least for least, _ in known_bounds), max(most for _, most in known_bounds)
    if value.function == "quotient":
        inner, divisor_bounds = (of(source) for source in sources)
        if inner is not None and divisor_bounds is not None and divisor_bounds[0] > 0:
            quotients = [left // right for left, right in pairs(inner, divisor_bounds)]
            return min(quotients), max(quotients)
    if value.is_float:
        return None
    if value.dtype == torch.bool:
        return 0, 1
    limits = torch.iinfo(value.dtype)
    if limits.bits == 64:
        return -_FARTHEST, _FARTHEST
    return limits.min, limits.max
