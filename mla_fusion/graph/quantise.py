"""Quantisation to one byte: ``saturate(round(v))`` is one function, however its steps are written.

The largest of a row is a function of the row's elements in any order. By it ``v = x * 127 /
max|x|`` is known to be at most 127, so that it is the same with and without saturation. An element
of a float format is the number that its byte stands for.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf, prod
from typing import Any

import torch

from mla_fusion.graph import bounds
from mla_fusion.graph.call import Call, Departs, operator
from mla_fusion.graph.form import Form, Value, filled_with
from mla_fusion.graph.numbers import MINUS_ONE, Number, number
from mla_fusion.meta.number_formats import BLOCK, FP8, HIFLOAT8, INT8, NumberFormat

FLOOR = 1e-4  # under the largest of a row: that of normed rows is far above (a listed assumption)
STEPS = 127
_ROUNDING = 1 + 1e-9  # of a root, for a comparison
MOST = {INT8: STEPS, FP8: 448, HIFLOAT8: 32768}  # the number that the largest of a row becomes


def largest(form: Form, rows: Value) -> Value:
    """``max|row|`` over the last axis, which stays."""
    times, rest = form.split(rows)
    inner = rest.sources[0] if rest.op == "reshape" else rest
    if inner is not rest and inner.shape[-1:] == rest.shape[-1:]:
        found = form.reshape(largest(form, inner), (*rest.shape[:-1], 1))
        return form.scaled(found, absolute(times))
    sizes = form.function("size", (), form.power(rest, 2))
    found = form.function("largest", (), form.reduce(sizes, [-1], keep=True))
    return form.scaled(found, absolute(times))


def absolute(times: Number) -> Number:
    return times if times.ratio >= 0 else times * MINUS_ONE


def is_size(value: Value) -> bool:
    """Is it the largest of rows, or a number times that?"""
    while value.op in ("reshape", "expand", "permute"):
        value = value.sources[0]
    is_scaled = value.op == "product" and value.literal[0] == (1,)
    inner = value.sources[0] if is_scaled else value
    while inner.op in ("reshape", "expand", "permute"):
        inner = inner.sources[0]
    return inner.op == "function" and inner.literal[0] == "largest"


def _whole(value: Value) -> tuple[Value, bool, float, float]:
    """What is rounded and kept between two ends: it, was it rounded, and the ends."""
    if value.op == "function" and value.literal[0] == "whole":
        return (value.sources[0], *value.literal[1])
    return value, False, -inf, inf


def _made(c: Call, value: Value, *state: Any) -> Value:
    return c.function("whole", state, value)


def _are_whole(*ends: float) -> bool:
    return all(abs(end) == inf or float(end).is_integer() for end in ends)


def rounded(c: Call, value: Value) -> Value:
    inner, _, least, most = _whole(value)
    if not _are_whole(least, most):
        return _made(c, value, True, -inf, inf)
    return _made(c, inner, True, least, most)


def bounded(c: Call, value: Value, least: float, most: float) -> Value:
    """Ends that cross, and ends between whole numbers behind a rounding, are a step of their
    own.
    """
    if -inf < least <= bounds.least(value):
        least = -inf
        if most == inf:
            return value
    inner, is_rounded, low, high = _whole(value)
    ends = max(low, least), min(high, most)
    if ends[0] > ends[1] or (is_rounded and not _are_whole(least, most)):
        return c.function("clamp", (least, most), value)
    return _made(c, inner, is_rounded, *ends)


def _is_within(form: Form, value: Value) -> bool:
    """Is it at most 127 by the largest of its row?"""
    if value.op != "product":
        return False
    exponents, times = value.literal
    pairs = list(zip(value.sources, exponents, strict=True))
    for factor, exponent in pairs:
        if exponent == -1 and is_size(factor):
            rest = [pair for pair in pairs if pair[0] is not factor]
            rows = form.expand(form.product(rest, times), value.shape)
            own, inner = form.split(rows)
            if inner.op == "function" and inner.literal[0] == "clip":
                by, found = form.split(inner.sources[1])
                if found is factor and float(by) * float(absolute(own)) <= STEPS * _ROUNDING:
                    return True
            by, found = form.split(largest(form, rows))
            if found is factor and float(by) <= STEPS:
                return True
    return False


def cast(c: Call, value: Any, dtype: torch.dtype) -> Value:
    """A cast; of an activation to one byte, what saturates it."""
    form = c.form
    if not isinstance(value, Value):
        raise Departs
    if not value.active or dtype.itemsize > 1 or dtype == torch.bool:
        if value.active and dtype.is_floating_point:
            return value
        if value.op == "function" and value.literal[0] == INT8.name:
            return value  # whole numbers are held by all of them
        if value.active and dtype in (torch.int32, torch.int64) and _whole(value)[1]:
            form.assumed.append("rounded rows are below 2**31")
            return value
        if value.active:
            return c.function("to whole", str(dtype), value)
        return form.cast(value, dtype)
    inner, is_rounded, least, most = _whole(value)
    ends = least, most
    if dtype == INT8.element and is_rounded:
        if ends == (-128, 127):
            return saturated(form, inner)
        if least <= -STEPS and most >= STEPS and _is_within(form, inner):
            return saturated(form, inner)
    if dtype == FP8.element and not is_rounded and ends == (-MOST[FP8], MOST[FP8]):
        return saturated(form, inner, FP8)
    return form.function("to", str(dtype), value)


def saturated(form: Form, value: Value, kind: NumberFormat = INT8) -> Value:
    """``saturate(round(value))``"""
    return form.function(kind.name, (), form.bare(value))


def read_as(form: Form, rows: Value, given: int | None) -> Value:
    """Rows of bytes as the operand of a product, whose argument says which format's they are where
    no dtype does.
    """
    return rows if given is None else form.function("of format", given, rows)


def by_row(form: Form, rows: Value, kind: NumberFormat = INT8) -> tuple[Value, Value]:
    """Each row in bytes, and its step, with the axis kept."""
    size, most = largest(form, rows), number(MOST[kind])
    values = saturated(form, form.product([(rows, 1), (size, -1)], most), kind)
    return values, form.product([(size, 1)], _inverse(most))


def _inverse(of: Number) -> Number:
    found = of.power(-1)
    assert found is not None
    return found


def by_block(form: Form, rows: Value) -> tuple[Value, Value]:
    """Each row in mxfp8, and its scales [.., n / 32], powers of two."""
    lead, size = rows.shape[:-1], rows.shape[-1]
    blocks = form.reshape(rows, (*lead, size // BLOCK, BLOCK))
    powers = form.function("power of two", (), largest(form, blocks))
    values = form.function("mxfp8", (), form.product([(blocks, 1), (powers, -1)]))
    return form.reshape(values, rows.shape), form.reshape(powers, (*lead, size // BLOCK))


def product_of_blocks(
    form: Form, rows: Value, weight: Value, of_rows: Value, of_weight: Value
) -> Value:
    """Rows [t, k] times a weight [k, n] in mxfp8, with scales [t, k / 32] and [k / 32, n]."""
    (tokens, size), columns = rows.shape, weight.shape[-1]
    count = size // BLOCK
    parts, steps = (
        form.reshape(value, shape)
        for value, shape in (
            (rows, (tokens, count, BLOCK)),
            (form.bare(of_rows), (tokens, count, 1)),
        )
    )
    blocks = form.reshape(weight, (count, BLOCK, columns))
    scales = form.reshape(form.bare(of_weight), (count, 1, columns))
    left = form.reshape(form.times(parts, steps), rows.shape)
    return form.dot(left, form.reshape(form.times(blocks, scales), weight.shape))


def as_bytes(
    form: Form, value: Value, source: torch.dtype, wanted: torch.dtype = torch.int8
) -> Value:
    """Numbers of a dtype, read as as many of one byte each, side by side on the last axis."""
    if source == wanted:
        return value
    each = [form.function("byte", (place, str(source)), value) for place in range(source.itemsize)]
    lead, size = value.shape[:-1], value.shape[-1]
    found = form.join([form.reshape(one, (*value.shape, 1)) for one in each], -1)
    found = form.reshape(found, (*lead, size * source.itemsize))
    return found if wanted == INT8.element else form.function("as", str(wanted), found)


# -- operators


@operator("round")
def _(c: Call, x: Value, decimals: int = 0) -> Value:
    if decimals or not x.active:
        raise Departs
    return rounded(c, x)


@operator("clamp", "clip", "clamp_min", "clamp_max")
def _(c: Call, x: Value, min: Any = None, max: Any = None) -> Value:
    ends = min, max
    if not x.active:
        return _beside_clamp(c, x, *ends)
    is_pair = isinstance(min, Value) and isinstance(max, Value) and filled_with(min) is None
    if is_pair and c.form.negated(min) is max:
        return c.function("clip", (), x, max)
    least, most = (_end(c, end, default) for end, default in zip(ends, (-inf, inf), strict=True))
    if most == inf and _is_floor(c.form, x, least):
        return x
    return bounded(c, x, least, most)


def _end(c: Call, given: Any, default: float) -> float:
    return default if given is None else float(c.number_of(given))


def _is_floor(form: Form, value: Value, least: float) -> bool:
    """Is it a floor under the largest of a row, or under a step of it, that no row comes near?"""
    times = 1.0
    if not least > 0:
        return False
    if not _is_length(value):
        if not is_size(value):
            return False
        times = float(value.literal[1]) if value.op == "product" else 1.0
    if least / times > FLOOR:
        return False
    form.assumed.append(f"no row comes near the floor of {least:g}")
    return True


def _is_length(value: Value) -> bool:
    """Is it the root of a row's sum of squares?"""
    if value.op != "product" or set(value.literal[0]) != {Fraction(1, 2)}:
        return False
    inner = value.sources[0]
    while inner.op in ("reshape", "expand"):
        inner = inner.sources[0]
    return inner.op == "reduce" and inner.sources[0].op == "product"


def _beside_clamp(c: Call, x: Value, least: Any, most: Any) -> Value:
    """Ends that no number comes near are left out."""
    found = bounds.of(x)
    if found is not None:
        ends = [None if end is None else float(c.number_of(end)) for end in (least, most)]
        if (ends[0] is None or ends[0] <= found[0]) and (ends[1] is None or found[1] <= ends[1]):
            return x
    values = [c.value(end) for end in (least, most) if end is not None]
    return c.function("clamp", (least is None, most is None), x, *values)


@operator("amax", "amin", "max", "min")
def _(c: Call, x: Value, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    if other is not None:
        return _greater(c, x, other)
    if not x.active or dim in (None, []):
        raise Departs
    axes = dim if isinstance(dim, (list, tuple)) else [dim]
    if [axis % len(x.shape) for axis in axes] != [len(x.shape) - 1]:
        raise Departs
    form = c.form
    if c.name in ("amax", "max") and x.op == "function" and x.literal[0] == "abs":
        found = largest(form, x.sources[0])
    elif c.name in ("amax", "max"):
        found = _greatest(form, x)
    else:
        found = form.negated(_greatest(form, form.negated(x)))
    found = found if keepdim else form.reshape(found, x.shape[:-1])
    if c.name in ("amax", "amin"):
        return found
    return [found, form.opaque("place of", c.name, [x], found.shape, torch.int64)]


def _greatest(form: Form, rows: Value) -> Value:
    elements = form.function("element", (), rows)
    return form.function("greatest", (), form.reduce(elements, [-1], keep=True))


@operator("maximum", "minimum")
def _greater(c: Call, x: Any, other: Any) -> Value:
    one, two = c.value(x), c.value(other)
    is_most = c.name in ("maximum", "max")
    name, wanted = ("maximum", "minimum") if is_most else ("minimum", "maximum")
    if not (one.active or two.active):
        return c.function(name, (), *sorted((one, two), key=lambda value: value.serial))
    form = c.form
    for value, end in ((one, two), (two, one)):
        filled = filled_with(end)
        if filled is None:
            continue
        limit = float(filled.literal[1])
        if is_most and _is_floor(c.form, value, limit):
            return form.expand(value, c.shape)
        ends = (limit, inf) if is_most else (-inf, limit)
        return form.expand(bounded(c, value, *ends), c.shape)
    if is_most and one.shape == two.shape:
        ends_of = [_end_of_rows(value) for value in (one, two)]
        if None not in ends_of and form.negated(ends_of[0]) is ends_of[1]:  # type: ignore[arg-type]
            found = largest(form, ends_of[0])  # type: ignore[arg-type]
            return form.reshape(found, one.shape)
    for value, limit_of in ((one, two), (two, one)):  # minimum(maximum(v, -limit), limit)
        if value.op == "function" and value.literal[0] == wanted:
            for inner, bound in (value.sources, value.sources[::-1]):
                if form.negated(bound) is limit_of:
                    top = bound if is_most else limit_of
                    if not is_most or is_size(top):
                        return c.function("clip", (), inner, top)
    return c.function(name, (), *sorted((one, two), key=lambda value: value.serial))


def _end_of_rows(value: Value) -> Value | None:
    """The rows of which it is the greatest element."""
    while value.op == "reshape":
        value = value.sources[0]
    if value.op != "function" or value.literal[0] != "greatest":
        return None
    (elements,) = value.sources
    while elements.op in ("reshape", "reduce"):
        elements = elements.sources[0]
    return elements.sources[0] if elements.op == "function" else None


@operator("eq", "ne")
def _(c: Call, x: Any, other: Any) -> Value:
    values = sorted((c.value(x), c.value(other)), key=lambda value: value.serial)
    return c.function(c.name, (), *values)


def guarded(c: Call, condition: Value, one: Value, other: Value) -> Value | None:
    """Of ``one`` where a condition holds, else ``other``: the largest of a row, or a step of it,
    that is replaced where it is 0. No row is 0 throughout.
    """
    if condition.op != "function" or condition.literal[0] not in ("eq", "ne"):
        return None
    kept = other if condition.literal[0] == "eq" else one
    is_zero = any(
        (filled := filled_with(side)) is not None and not filled.literal[1].ratio
        for side in condition.sources
    )
    sizes = [side for side in condition.sources if is_size(side)]
    if not is_zero or len(sizes) != 1 or not is_size(kept):
        return None
    c.form.assumed.append("no row is 0 throughout, which is asked")
    return kept


def _kind(given: int | None, in_blocks: bool = False) -> NumberFormat:
    from mla_fusion.meta import number_formats

    found = number_formats.of_dst_type(given, in_blocks)
    if found is None:
        raise Departs
    return found


@operator("npu::npu_dynamic_quant")
def _(
    c: Call,
    input: Value,
    smooth_scales: Value | None = None,
    group_index: Any = None,
    dst_type: Any = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0,
) -> Any:
    if not input.active or group_index is not None or quant_mode != "pertoken" or dst_type_max:
        raise Departs
    form = c.form
    rows = input if smooth_scales is None else form.times(input, form.bare(smooth_scales))
    values, step = by_row(form, rows, _kind(dst_type))
    return [values, form.reshape(step, step.shape[:-1])]


@operator("npu::npu_dynamic_mx_quant")
def _(
    c: Call,
    input: Value,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = BLOCK,
    **others: Any,
) -> Any:
    rank = len(input.shape)
    is_usual = axis % rank == rank - 1 and round_mode == "rint" and block_size == BLOCK
    if not input.active or not is_usual or any(others.values()):
        raise Departs
    _kind(dst_type, in_blocks=True)
    if input.shape[-1] % (2 * BLOCK):
        raise Departs
    values, scale = by_block(c.form, input)
    return [values, c.form.reshape(scale, (*scale.shape[:-1], scale.shape[-1] // 2, 2))]


@operator("npu::npu_dynamic_block_quant")
def _(
    c: Call,
    x: Value,
    min_scale: float = 0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0,
) -> Any:
    kind, tile = _kind(dst_type), col_block_size
    is_usual = not min_scale and round_mode == kind.block_rounding and row_block_size == 1
    if not x.active or not is_usual or dst_type_max or x.shape[-1] % tile:
        raise Departs
    form = c.form
    tiles = form.reshape(x, (*x.shape[:-1], x.shape[-1] // tile, tile))
    values, step = by_row(form, tiles, kind)
    return [form.reshape(values, x.shape), form.reshape(step, step.shape[:-1])]


@operator("npu::npu_quantize")
def _(
    c: Call,
    input: Value,
    scales: Value,
    zero_points: Any,
    dtype: Any,
    axis: int = 1,
    div_mode: bool = True,
) -> Value:
    if not input.active or dtype not in (1, 12, torch.int8, torch.qint8):
        raise Departs
    form, shape = c.form, [1] * len(input.shape)
    shape[axis] = scales.shape[-1] if scales.shape else 1
    found = c.product([(input, 1), (form.reshape(scales, shape), -1 if div_mode else 1)])
    if zero_points is not None:
        found = form.plus(found, form.bare(form.reshape(zero_points, shape)))
    return saturated(form, found)


@operator("npu::npu_quant_matmul")
def _(
    c: Call,
    x1: Value,
    x2: Value,
    scale: Value,
    pertoken_scale: Any = None,
    bias: Any = None,
    x1_dtype: Any = None,
    x2_dtype: Any = None,
    scale_dtype: Any = None,
    pertoken_scale_dtype: Any = None,
    group_sizes: Any = None,
    output_dtype: Any = None,
    offset: Any = None,
    y_scale: Any = None,
) -> Value:
    form = c.form
    if x1_dtype != x2_dtype or offset is not None or y_scale is not None:
        raise Departs
    if bias is not None and (bias.dtype != torch.int32 or pertoken_scale is not None):
        raise Departs
    lead = x1.shape[:-1]
    rows = form.reshape(x1, (prod(lead), x1.shape[-1]))
    if any(group_sizes or ()):
        is_other = list(group_sizes) != [1, 1, BLOCK] or pertoken_scale is None
        if is_other or bias is not None or x1_dtype is not None:
            raise Departs
        if pertoken_scale.shape[:-2] != lead:
            raise Departs
        c.equate(pertoken_scale.shape[-2], rows.shape[1] // (2 * BLOCK))
        c.equate(pertoken_scale.shape[-1], 2)
        of_rows = form.reshape(pertoken_scale, (rows.shape[0], rows.shape[1] // BLOCK))
        of_weight = form.permute(scale, (0, 2, 1))
        of_weight = form.reshape(of_weight, (rows.shape[1] // BLOCK, x2.shape[-1]))
        found = product_of_blocks(form, rows, x2, of_rows, of_weight)
    else:
        found = form.dot(read_as(form, rows, x1_dtype), x2)
        if bias is not None:
            found = form.plus(found, form.bare(bias))
        if c.dtype == torch.int32:
            return form.reshape(found, c.shape)
        factors: list[tuple[Value, int]] = [(found, 1), (form.bare(scale), 1)]
        if pertoken_scale is not None:
            step = form.reshape(pertoken_scale, (rows.shape[0], 1))
            factors.append((form.bare(step), 1))
        found = form.product(factors)
    found = form.reshape(found, c.shape)
    return saturated(form, found) if c.dtype == torch.int8 else found
