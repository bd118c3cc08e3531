"""Quantisation to one byte in the field: ``saturate(round(v))`` is one function, however its steps
are written.

The largest of a row is a function of the row's elements in any order. By it, ``v = x * 127 /
max|x|`` is known to be at most 127, so that it is the same with and without saturation.

An element of a float format is the number that its byte stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from mla_fusion.meta.number_formats import BLOCK, FP8, HIFLOAT8, INT8, NumberFormat
from mla_fusion.prove import field
from mla_fusion.prove.field import Num, function, here

FLOOR = 1e-4  # under the largest of a row: that of normed rows is far above (a listed assumption)
STEPS = 127
MOST = {INT8: STEPS, FP8: 448, HIFLOAT8: 32768}  # the number that the largest of a row becomes


@dataclass(frozen=True)
class Whole:
    """``value``, rounded, and kept from ``least`` to ``most``: in either order where the ends are
    whole numbers.
    """

    value: Num
    rounded: bool = False
    least: float = -float("inf")
    most: float = float("inf")


@dataclass(frozen=True)
class Absolute:
    value: Num


@dataclass(frozen=True)
class Bounded:
    """The larger, or the smaller, of two."""

    by: str
    sides: tuple[Num, ...]


@dataclass(frozen=True)
class IsZero:
    """Whether each element is 0; or is not, for ``not_zero``."""

    value: Num
    not_zero: bool


@dataclass(frozen=True)
class End:
    """The largest element of rows, times ``sign``; or the smallest, for ``of_least``."""

    rows: Num
    of_least: bool
    sign: int = 1


def are_both_ends(a: object, b: object) -> bool:
    """Are they the largest of rows, and minus the smallest?"""
    if not isinstance(a, End) or not isinstance(b, End):
        return False
    return {(end.of_least, end.sign) for end in (a, b)} == {(False, 1), (True, -1)} and field.equal(
        a.rows, b.rows
    )


@dataclass(frozen=True)
class Scaled:
    """``value`` times a number above 0: its largest is as many times as large, its int8 is the
    same.
    """

    value: Num
    factor: Num


def scaled(value: Num, factor: float, exactly: Num | None = None) -> Num:
    """``value * factor``, which stands for ``exactly``."""
    times = field.number(factor) if exactly is None else exactly
    found = value * times
    if 0 < factor <= 1:  # of the largest of rows: that of smaller rows
        maxima = here().maxima
        maxima += [(rows * times, found) for rows, largest in maxima if largest is value]
    return found.with_past(Scaled(value, times) if factor > 0 else None)


def largest_of(rows: Num, keep: bool = True) -> Num:
    """``max|row|`` over the last axis; ``keep``: which stays."""
    if isinstance(rows.past, Scaled):
        found = largest_of(rows.past.value) * rows.past.factor
    else:
        sizes = function("size", rows * rows)
        found = function("largest of row", field.total(sizes, [len(rows.shape) - 1], True))
    here().maxima.append((rows, found))
    return found if keep else found.squeeze(-1)


def is_size(value: Num) -> bool:
    """Is it the largest of rows, or a number above 0 times that?"""
    if isinstance(value.past, Scaled):
        return is_size(value.past.value)
    return any(largest is value for _, largest in here().maxima)


def is_floor(value: Num, least: float) -> bool:
    """Is it a floor under the largest of a row, or under a step of it, that no row comes near?"""
    return any(
        0 < least * times <= FLOOR and _is_part(value, largest, times)
        for _, largest in here().of_kernel
        for times in (1, STEPS)
    )


def guarded(chosen: Num, a: Num, b: Num) -> Num | None:
    """Of ``a`` where a condition holds, else ``b``: the largest of a row, or a step of it, that is
    replaced where it is 0. No row is 0 throughout.
    """
    if not isinstance(chosen.past, IsZero):
        return None
    kept = a if chosen.past.not_zero else b
    if kept.shape != chosen.shape:
        return None
    sides = kept, chosen.past.value
    is_guard = any(
        all(any(_is_part(side, largest, times) for times in (1, STEPS)) for side in sides)
        for _, largest in here().of_kernel
    )
    return kept if is_guard else None


def _is_part(value: Num, largest: Num, times: int) -> bool:
    """Is it the largest of a row, divided by so much?"""
    return _same(value * field.number(times), largest)


def _bounds(value: Num) -> Iterator[int]:
    """By which of the maxima it is no larger than 127: places among them."""
    wanted = field.number(STEPS)
    for place, (rows, largest) in enumerate(here().maxima):
        if rows.shape == value.shape and field.equal(value * largest, rows * wanted):
            yield place


def _same(a: Num, b: Num) -> bool:
    if a.shape != b.shape:
        b = b.reshape(a.shape) if b.re.numel() == a.re.numel() else b
    return a.shape == b.shape and field.equal(a, b)


def whole(value: Num) -> Whole:
    return value.past if isinstance(value.past, Whole) else Whole(value)


def made(found: Whole) -> Num:
    name = f"whole {found.rounded} {found.least} {found.most}"
    return function(name, found.value).with_past(found)


def rounded(value: Num) -> Num:
    found = whole(value)
    if not _are_whole(found.least, found.most):
        found = Whole(value)
    return made(replace(found, rounded=True))


def bounded(value: Num, least: float | None, most: float | None) -> Num:
    """Ends that cross, and ends between whole numbers behind a rounding, are a step of their
    own.
    """
    found, given = whole(value), [end for end in (least, most) if end is not None]
    name = f"from {least} to {most}"
    least = found.least if least is None else max(found.least, least)
    most = found.most if most is None else min(found.most, most)
    if least > most or (found.rounded and not _are_whole(*given)):
        return function(name, value)
    return made(replace(found, least=least, most=most))


def _are_whole(*ends: float) -> bool:
    return all(math.isinf(end) or float(end).is_integer() for end in ends)


def to_bytes(
    value: Num, dtype: torch.dtype, is_wide: Callable[[int], bool] = lambda place: True
) -> Num:
    """What a cast to int8, or to a float of one byte, makes of it.

    is_wide  was it computed in float32 at least, from the rows of that maximum on? Where a scale or
             a quotient is rounded to bfloat16, 127 may become 127.5, which is 128
    """
    found = whole(value)
    least, most = ends = found.least, found.most
    if dtype == INT8.element:
        in_range = least <= -STEPS and most >= STEPS and any(map(is_wide, _bounds(found.value)))
        if found.rounded and (ends == (-128, 127) or in_range):
            return saturated(found.value)
    elif dtype == FP8.element and not found.rounded and ends == (-MOST[FP8], MOST[FP8]):
        return saturated(found.value, FP8)
    return function(f"cast to {dtype}", value)


def saturated(value: Num, form: NumberFormat = INT8) -> Num:
    """``saturate(round(value))``"""
    return function(form.name, value)


def read_as(rows: Num, number: int | None) -> Num:
    """Rows of bytes as the operand of a product, whose argument says which format's they are where
    no dtype does.
    """
    return rows if number is None else function(f"of format {number}", rows)


def clipped(value: Num, limit: Num) -> Num:
    """``clamp(value, -limit, limit)``, which is no larger than the limit."""
    found = function("clip", value, limit)
    if any(_is_share(limit, largest) for _, largest in here().maxima):
        here().maxima.append((found, limit))
    return found


def _is_share(limit: Num, largest: Num) -> bool:
    """Is it as many times the largest of each row?"""
    if limit.shape != largest.shape:
        return False
    times = limit / largest
    return field.equal(times, times.moved(lambda part: part.reshape(-1)[:1]))


def as_bytes(value: Num, source: torch.dtype, wanted: torch.dtype = INT8.element) -> Num:
    """Numbers of a dtype, read as as many of one byte each, side by side on the last axis."""
    if source == wanted:
        return value
    each = [function(f"byte {place} of {source}", value) for place in range(source.itemsize)]
    found = field.stacked(each, -1).flatten(-2)
    return found if wanted == INT8.element else function(f"as {wanted}", found)


def by_row(rows: Num, form: NumberFormat = INT8) -> tuple[Num, Num]:
    """Each row in bytes, and its step, with the axis kept."""
    largest = largest_of(rows)
    most = field.number(MOST[form])
    values = saturated(rows * (most / largest), form)
    return values, largest / most


def by_block(rows: Num) -> tuple[Num, Num]:
    """Each row in mxfp8, and its scales [.., n / 32], powers of two."""
    blocks = rows.unflatten(-1, (-1, BLOCK))
    powers = function("power of two", largest_of(blocks))
    values = function("mxfp8", blocks / powers)
    return values.flatten(-2), powers.flatten(-2)


def product_of_blocks(rows: Num, weight: Num, of_rows: Num, of_weight: Num) -> Num:
    """Rows [t, k] times a weight [k, n] in mxfp8, with scales [t, k / 32] and [k / 32, n]."""
    by_blocks = rows.unflatten(-1, (-1, BLOCK)).transpose(0, 1)
    weight = weight.unflatten(0, (-1, BLOCK))
    scaled = by_blocks * of_rows.mT.unsqueeze(-1)
    products = scaled @ weight * of_weight.unsqueeze(1)
    return field.total(products, [0], False)
