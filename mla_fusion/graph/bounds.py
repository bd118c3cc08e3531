"""From where to where the integers of a Value lie.

Integers that are slots, positions and indices are exact as far as their dtype holds them: where the
bounds show that. What comes in is bounded by its dtype, of 64 bits by ``_FARTHEST``.
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

_LONGEST = 1 << 19  # symbolic sizes go to it: tokens, rows of tables
_FARTHEST = 1 << 43  # positions and slots of 64 bits stay below it
Bounds = tuple[int, int]


def fits(value: Value, dtype: torch.dtype) -> bool:
    """Does the dtype hold each element? Of a float: as a whole number, exactly."""
    bounds = of(value)
    if bounds is None:
        return False
    least, most = bounds
    if dtype.is_floating_point:
        exact = round(2 / torch.finfo(dtype).eps)
        return -exact <= least and most <= exact
    if dtype == torch.bool:
        return least >= 0 and most <= 1
    ends = torch.iinfo(dtype)
    return ends.min <= least and most <= ends.max


def _most(size: int) -> int:
    return max(size, _LONGEST) if is_open(size) else size


def _range(times: int) -> Bounds:
    """Of a number, which may be a symbolic size, or minus one."""
    if not is_open(abs(times)):
        return times, times
    return (1, _most(times)) if times > 0 else (-_most(-times), -1)


def _multiplied(*factors: Bounds) -> Bounds:
    found = factors[0]
    for factor in factors[1:]:
        ends = [one * other for one, other in pairs(found, factor)]
        found = min(ends), max(ends)
    return found


@lru_cache(maxsize=1 << 15)
def least(value: Value) -> float:
    """A number that no element of a Value of reals is below, wherever it is defined."""
    op, literal, sources = value.op, value.literal, value.sources
    if op == "product":
        ends = [float(literal[1]), *map(_least_of_power, sources, literal[0])]
        return prod(ends) if min(ends) >= 0 else -inf
    if op == "sum":
        terms = zip(literal[0], sources, strict=True)
        added = [float(times) * least(one) if times > 0 else -inf for times, one in terms]
        return sum(added, start=float(literal[1]))
    if op == "reduce":
        count = prod(sources[0].shape[axis] for axis in literal)
        return least(sources[0]) * (1 if is_open(count) else count)
    if op in ("reshape", "permute", "expand", "slice", "cast", "join"):
        return min(map(least, sources))
    return 0.0 if op == "function" and literal[0] in ("abs", "exp", "relu", "sigmoid") else -inf


def _remainders(terms: dict[Value, Fraction]) -> Iterator[tuple[Value, int]]:
    """``s`` and ``b`` of terms ``s - b * (s // b)``, whose quotients are taken out."""
    for quotient, times in [*terms.items()]:
        if quotient.op == "function" and quotient.literal[0] == "quotient":
            source, filled = quotient.sources[0], filled_with(quotient.sources[1])
            divisor = int(filled.literal[1].ratio) if filled is not None else 0
            if divisor > 0 and terms.get(source, 0) * divisor == -times:
                del terms[quotient]
                yield source, divisor


def _least_of_power(value: Value, power: Fraction) -> float:
    is_even = power.numerator % 2 == 0 or power.denominator % 2 == 0
    end = max(least(value), 0.0) if is_even else least(value)
    if end < 0:
        return -inf
    return end ** float(power) if power > 0 else 0.0


@lru_cache(maxsize=1 << 15)
def of(value: Value) -> Bounds | None:
    """None: not known, or no whole numbers."""
    op, literal, sources = value.op, value.literal, value.sources
    if value.is_float and op not in ("product", "expand", "cast", "reshape"):
        return None
    if op == "product":
        if literal[1].roots or literal[1].ratio.denominator != 1:
            return None
        found = _range(int(literal[1].ratio))
        for exponent, source in zip(literal[0], sources, strict=True):
            inner = of(source)
            if inner is None or exponent.denominator != 1 or exponent < 0:
                return None
            found = _multiplied(found, *[inner] * int(exponent))
        return found
    if op == "sum":
        if any(one.denominator != 1 for one in (*literal[0], literal[1])):
            return None
        terms = dict(zip(sources, literal[0], strict=True))
        ranges = [_range(int(literal[1]))]
        for source, divisor in _remainders(terms):
            ranges.append(_multiplied(_range(int(terms.pop(source))), (0, _most(divisor) - 1)))
        for source, times in terms.items():
            inner = of(source)
            if inner is None:
                return None
            ranges.append(_multiplied(_range(int(times)), inner))
        return sum(least for least, _ in ranges), sum(most for _, most in ranges)
    if op == "constant":
        tensor = literal.tensor
        return (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    if op == "count":
        return 0, _most(value.shape[0]) - 1
    if op == "reduce":
        inner = of(sources[0])
        count = _most(prod(sources[0].shape[axis] for axis in literal))
        return None if inner is None else (inner[0] * count, inner[1] * count)
    if op in ("reshape", "permute", "expand", "slice", "gather"):
        return of(sources[0])
    if op == "cast" and not sources[0].is_float:
        inner = of(sources[0])
        if inner is not None and fits(sources[0], value.dtype):
            return inner
        if inner is not None and value.is_float:  # rounded to a whole number near it
            ends = torch.tensor(inner, dtype=torch.float64).to(value.dtype).tolist()
            return None if inf in map(abs, ends) else (int(ends[0]), int(ends[1]))
    if op == "join":
        inners = [of(source) for source in sources]
        known = [inner for inner in inners if inner is not None]
        if len(known) < len(inners):
            return None
        return min(least for least, _ in known), max(most for _, most in known)
    if op == "function" and literal[0] == "quotient":
        inner, by = (of(source) for source in sources)
        if inner is not None and by is not None and by[0] > 0:
            quotients = [one // other for one, other in pairs(inner, by)]
            return min(quotients), max(quotients)
    if value.is_float:
        return None
    if value.dtype == torch.bool:
        return 0, 1
    held = torch.iinfo(value.dtype)
    if held.bits == 64:
        return -_FARTHEST, _FARTHEST
    return held.min, held.max
