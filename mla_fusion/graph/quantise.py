"""Rules of quantisation: rows of one byte an element, and their steps.

``saturate(round(v))`` is one function, however a model writes its steps. ``graph/read.py`` calls
these rules, and ``targets/prolog.py`` writes the kernel's quantisation with the same functions.

The largest absolute element of a row is a function of its elements in any order. It shows that
``v = x * 127 / max|x|`` is at most 127, so saturation does not change it. An element of a float
format is the number that its byte stands for.

A step is the number that one unit of a quantised row stands for: ``max|x| / 127`` for int8.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import inf, prod
from typing import Any

import torch

from mla_fusion.graph import bounds
from mla_fusion.graph.call import Call, Departs, axes_of, operator
from mla_fusion.graph.form import Form, Value, filled_with, is_zero, strip, strip_reshapes
from mla_fusion.graph.numbers import MINUS_ONE, Number, number
from mla_fusion.meta.number_formats import BLOCK, FP8, HIFLOAT8, INT8, NumberFormat, of_dst_type

FLOOR = 1e-4  # floors up to it under a row's largest element are left out (listed as assumed)
STEPS = 127
_VIEWS = ("reshape", "expand", "permute")
_ROUNDING = 1 + 1e-9  # tolerance for a root that is compared as a float
MOST = {INT8: STEPS, FP8: 448, HIFLOAT8: 32768}  # what the largest element of a row becomes


def largest(form: Form, rows: Value) -> Value:
    """``max|row|`` over the last axis, kept with size 1."""
    times, unscaled = form.split(rows)
    inner = unscaled.sources[0] if unscaled.op == "reshape" else unscaled
    if inner is not unscaled and inner.shape[-1:] == unscaled.shape[-1:]:
        maximum = form.reshape(largest(form, inner), (*unscaled.shape[:-1], 1))
        return form.scaled(maximum, absolute(times))
    sizes = form.function("size", form.power(unscaled, 2))
    maximum = form.function("largest", form.reduce(sizes, [-1], keep=True))
    return form.scaled(maximum, absolute(times))


def absolute(times: Number) -> Number:
    """The absolute value of a number."""
    return times if times.ratio >= 0 else times * MINUS_ONE


def is_size(value: Value) -> bool:
    """True for the largest absolute element of rows (``largest``), or a number above 0 times it."""
    inner = strip(value, *_VIEWS)
    if inner.is_multiple and inner.number.ratio > 0:
        inner = strip(inner.sources[0], *_VIEWS)
    return inner.function == "largest"


def is_block_scale(value: Value) -> bool:
    """True for scales of blocks in mxfp8: powers of two, of which a node may hold the codes."""
    return strip(value, *_VIEWS, "slice").function == "power of two"


def _rounding_state(value: Value) -> tuple[Value, bool, float, float]:
    """The state of a rounded or clamped Value: its source, whether it is rounded, and its bounds.

    Any other Value is its own source, not rounded, between infinities.
    """
    if value.function == "whole":
        return (value.sources[0], *value.literal[1])
    return value, False, -inf, inf


def _are_integers(*limits: float) -> bool:
    """True if all bounds are integers or infinite."""
    return all(abs(limit) == inf or float(limit).is_integer() for limit in limits)


def clamp_to(c: Call, value: Value, least: float, most: float) -> Value:
    """The Value clamped to bounds.

    Bounds that the Value cannot pass are left out. Crossing bounds, and fractional bounds after
    rounding, are a separate function "clamp".
    """
    if -inf < least <= bounds.least(value):
        least = -inf
        if most == inf:
            return value
    inner, is_rounded, low, high = _rounding_state(value)
    limits = max(low, least), min(high, most)
    if limits[0] > limits[1] or (is_rounded and not _are_integers(least, most)):
        return c.function("clamp", value, literals=(least, most))
    return c.function("whole", inner, literals=(is_rounded, *limits))


def divided_by_size(form: Form, value: Value) -> Iterator[tuple[Value, Value]]:
    """Yields each size of rows by which a product is divided, and the product without it."""
    for factor, exponent in value.operands if value.op == "product" else ():
        if exponent == -1 and is_size(factor):
            others = [pair for pair in value.operands if pair[0] is not factor]
            yield factor, form.expand(form.product(others, value.number), value.shape)


def _is_within_steps(form: Form, value: Value) -> bool:
    """True if the Value is at most 127 because it is divided by the largest of its row."""
    for factor, rows in divided_by_size(form, value):
        row_number, inner = form.split(rows)
        if inner.function == "clip":
            ratio, size = form.split(inner.sources[1])
            most = float(ratio) * float(absolute(row_number))
            if size is factor and most <= STEPS * _ROUNDING:
                return True
        ratio, size = form.split(largest(form, rows))
        if size is factor and float(ratio) <= STEPS:
            return True
    return False


def cast(c: Call, value: Value, dtype: torch.dtype) -> Value:
    """A cast. An active Value that is cast to one byte becomes a quantised function.

    The cast stays a function of its own if the Value was not rounded and saturated before.
    """
    form = c.form
    if is_block_scale(value):  # its code, or the power of two: the dtype of the node decides
        return c.function("to", value, literals=str(dtype))
    if not value.active or dtype.itemsize > 1 or dtype == torch.bool:
        if value.function == INT8.name and dtype != torch.bool:
            return value  # every wider dtype holds these integers
        if not value.active:
            return form.cast(value, dtype)
        if dtype.is_floating_point:
            return value
        if dtype in (torch.int32, torch.int64) and _rounding_state(value)[1]:
            form.assumed.append("rounded rows are below 2**31")
            return value
        return c.function("to whole", value, literals=str(dtype))
    inner, is_rounded, least, most = _rounding_state(value)
    limits = least, most
    if dtype == INT8.element and is_rounded:
        if limits == (-128, 127):
            return saturated(form, inner)
        if least <= -STEPS and most >= STEPS and _is_within_steps(form, inner):
            form.assumed.append("a row's largest element is not rounded beyond 127 before the cast")
            return saturated(form, inner)
    if dtype == FP8.element and not is_rounded and limits == (-MOST[FP8], MOST[FP8]):
        return saturated(form, inner, FP8)
    return form.function("to", value, literals=str(dtype))


def saturated(form: Form, value: Value, kind: NumberFormat = INT8) -> Value:
    """``saturate(round(value))`` in the elements of a format."""
    return form.function(kind.name, form.bare(value))


def read_as(form: Form, rows: Value, format_number: int | None) -> Value:
    """Rows of bytes as the operand of a product.

    format_number  the format, if an argument of the product names it; None: the dtype does
    """
    return (
        rows if format_number is None else form.function("of format", rows, literals=format_number)
    )


def by_row(form: Form, rows: Value, kind: NumberFormat) -> tuple[Value, Value]:
    """Quantises each row: the rows in bytes, and their steps [.., 1]."""
    row_size, greatest = largest(form, rows), number(MOST[kind])
    values = saturated(form, form.product([(rows, 1), (row_size, -1)], greatest), kind)
    return values, form.product([(row_size, 1)], greatest.inverse)


def by_block(form: Form, rows: Value) -> tuple[Value, Value]:
    """Quantises each block of 32 in mxfp8: rows in bytes, and scales [.., n / 32], powers of
    two.
    """
    blocks = form.cut(rows, BLOCK)
    powers = form.function("power of two", largest(form, blocks))
    values = form.function("mxfp8", form.product([(blocks, 1), (powers, -1)]))
    return form.reshape(values, rows.shape), form.reshape(powers, blocks.shape[:-1])


def product_of_blocks(
    form: Form, rows: Value, weight: Value, of_rows: Value, of_weight: Value
) -> Value:
    """Rows [t, k] times a weight [k, n] in mxfp8.

    of_rows    scales of the rows [t, k / 32]
    of_weight  scales of the weight [k / 32, n]
    """
    parts, columns = form.cut(rows, BLOCK), weight.shape[-1]
    tokens, count, _ = parts.shape
    steps = form.reshape(form.bare(of_rows), (tokens, count, 1))
    blocks = form.reshape(weight, (count, BLOCK, columns))
    scales = form.reshape(form.bare(of_weight), (count, 1, columns))
    left = form.reshape(form.times(parts, steps), rows.shape)
    return form.dot(left, form.reshape(form.times(blocks, scales), weight.shape))


def as_bytes(
    form: Form, value: Value, source: torch.dtype, element: torch.dtype = torch.int8
) -> Value:
    """Elements of ``source`` reinterpreted as elements of one byte, side by side on the last
    axis.
    """
    byte_values = [
        form.function("byte", value, literals=(place, str(source)))
        for place in range(source.itemsize)
    ]
    lead, size = value.shape[:-1], value.shape[-1]
    joined = form.join(
        [form.reshape(byte_value, (*value.shape, 1)) for byte_value in byte_values], -1
    )
    joined = form.reshape(joined, (*lead, size * source.itemsize))
    return joined if element == INT8.element else form.function("as", joined, literals=str(element))


# -- operators


@operator("round")
def _(c: Call, x: Value, decimals: int = 0) -> Value:
    """Integer bounds of what is rounded stay; other bounds become a step before it."""
    if decimals or not x.active:
        raise Departs
    inner, _, least, most = _rounding_state(x)
    if not _are_integers(least, most):
        return c.function("whole", x, literals=(True, -inf, inf))
    return c.function("whole", inner, literals=(True, least, most))


@operator("clamp", "clamp_min", "clamp_max")
def clamp(c: Call, x: Value, min: Any = None, max: Any = None) -> Value:
    """A Value clamped to bounds. A floor that no row comes near is left out."""
    limits = min, max
    if not x.active:  # left out if no element can pass a bound
        value_bounds = bounds.of(x)
        if value_bounds is not None:
            least, most = _bounds_of(c, *limits)
            if least <= value_bounds[0] and value_bounds[1] <= most:
                return x
        values = [c.value(limit) for limit in limits if limit is not None]
        return c.function("clamp", x, *values, literals=(min is None, max is None))
    is_pair = isinstance(min, Value) and isinstance(max, Value) and filled_with(min) is None
    if is_pair and c.form.negated(min) is max:
        return c.function("clip", x, max)
    least, most = _bounds_of(c, *limits)
    if most == inf and _is_floor(c.form, x, least):
        return x
    return clamp_to(c, x, least, most)


def _bounds_of(c: Call, least: Any, most: Any) -> tuple[float, float]:
    """The bounds of a clamp as floats."""
    return (
        -inf if least is None else float(c.number_of(least)),
        inf if most is None else float(c.number_of(most)),
    )


def _is_floor(form: Form, value: Value, least: float) -> bool:
    """True for a bound under the largest of a row, or under its step, that no row comes near.

    It is listed as assumed.
    """
    times = 1.0
    if not _is_length(value):
        if not is_size(value):
            return False
        times = float(value.number) if value.op == "product" else 1.0
    if not 0 < least / times <= FLOOR:
        return False
    form.assumed.append(f"no row comes near the floor of {least:g}")
    return True


def _is_length(value: Value) -> bool:
    """True for the root of a row's sum of squares."""
    is_root = value.op == "product" and {*value.literal[0]} == {Fraction(1, 2)}
    if not is_root or value.number.ratio < 0:
        return False
    inner = strip(value.sources[0], "reshape", "expand")
    return inner.op == "reduce" and inner.sources[0].op == "product"


@operator("amax", "amin", "max", "min")
def _(c: Call, x: Value, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    if other is not None:
        return _greater(c, x, other)
    if not x.active or dim in (None, []) or axes_of(x, dim) != [len(x.shape) - 1]:
        raise Departs
    form = c.form
    if c.name in ("amax", "max") and x.function == "abs":
        maximum = largest(form, x.sources[0])
    elif c.name in ("amax", "max"):
        maximum = _row_maximum(form, x)
    else:
        maximum = form.negated(_row_maximum(form, form.negated(x)))
    maximum = maximum if keepdim else form.reshape(maximum, x.shape[:-1])
    if c.name in ("amax", "amin"):
        return maximum
    return [maximum, form.opaque("place of", c.name, [x], maximum.shape, torch.int64)]


def _row_maximum(form: Form, rows: Value) -> Value:
    """The greatest element of each row, kept with size 1."""
    elements = form.function("element", rows)
    return form.function("greatest", form.reduce(elements, [-1], keep=True))


@operator("maximum", "minimum")
def _greater(c: Call, x: Any, other: Any) -> Value:
    """The greater (or the smaller) of two operands: a clamp if one is a number."""
    first, second = c.value(x), c.value(other)
    is_most = c.name in ("maximum", "max")
    name, opposite = ("maximum", "minimum") if is_most else ("minimum", "maximum")
    if not (first.active or second.active):
        return c.symmetric(name, first, second)
    form, orders = c.form, ((first, second), (second, first))
    for value, limit_value in orders:
        if filled_with(limit_value) is not None:
            limits = (limit_value, None) if is_most else (None, limit_value)
            return form.expand(clamp(c, value, *limits), c.shape)
    if is_most and first.shape == second.shape:
        rows, negated_rows = map(_rows_of_maximum, (first, second))
        if rows is not None and form.negated(rows) is negated_rows:
            return form.reshape(largest(form, rows), first.shape)
    for value, limit_of in orders:  # minimum(maximum(v, -limit), limit)
        if value.function == opposite:
            for inner, bound_value in (value.sources, value.sources[::-1]):
                if form.negated(bound_value) is limit_of:
                    upper_bound = bound_value if is_most else limit_of
                    if not is_most or is_size(upper_bound):
                        return c.function("clip", inner, upper_bound)
    return c.symmetric(name, first, second)


def _rows_of_maximum(value: Value) -> Value | None:
    """The rows whose greatest element a Value is; None for other Values."""
    inner = strip_reshapes(value)
    if inner.function != "greatest":
        return None
    elements = strip(inner.sources[0], "reshape", "reduce")
    return elements.sources[0] if elements.function else None


@operator("eq", "ne", "gt", "ge", "lt", "le")
def _(c: Call, x: Any, other: Any) -> Value:
    if c.name in ("eq", "ne"):
        return c.symmetric(c.name, x, other)
    return c.function(c.name, c.value(x), c.value(other))


# comparisons of a size with 0: "le" and "gt" have it on the left, "ge" and "lt" on the right
_IS_ZERO, _IS_NONZERO = frozenset(("eq", "le", "ge")), frozenset(("ne", "gt", "lt"))


def without_zero_guard(c: Call, condition: Value, if_true: Value, if_false: Value) -> Value | None:
    """A ``where`` that replaces a row's largest element if it is 0: returns the largest element.

    if_true   the result where the condition is true
    if_false  the result where it is false

    None for any other ``where``. That no row is 0 throughout is listed as assumed.
    """
    comparison, sides = condition.function, condition.sources
    if comparison not in _IS_ZERO | _IS_NONZERO or len(sides) != 2:
        return None
    nonzero = if_false if comparison in _IS_ZERO else if_true
    is_equality = comparison in ("eq", "ne")
    if comparison in ("lt", "ge") or (is_equality and is_size(sides[1])):
        sides = sides[::-1]
    if not (is_size(sides[0]) and is_zero(sides[1]) and is_size(nonzero)):
        return None
    c.form.assumed.append("no row is 0 throughout, which is asked")
    return nonzero


def _format_of(dst_type: int | None, in_blocks: bool = False) -> NumberFormat:
    """The format that an argument ``dst_type`` names. Raises Departs."""
    kind = of_dst_type(dst_type, in_blocks)
    if kind is None:
        raise Departs
    return kind


@operator("npu::npu_dynamic_quant")
def _(
    c: Call,
    x: Value,
    smooth_scales: Value | None = None,
    group_index: Any = None,
    dst_type: Any = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0,
) -> Any:
    if not x.active or group_index is not None or quant_mode != "pertoken" or dst_type_max:
        raise Departs
    form = c.form
    rows = x if smooth_scales is None else form.times(x, form.bare(smooth_scales))
    values, step = by_row(form, rows, _format_of(dst_type))
    return [values, form.reshape(step, step.shape[:-1])]


@operator("npu::npu_dynamic_mx_quant")
def _(
    c: Call,
    x: Value,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = BLOCK,
    **others: Any,
) -> Any:
    rank = len(x.shape)
    is_usual = axis % rank == rank - 1 and round_mode == "rint" and block_size == BLOCK
    if not x.active or not is_usual or any(others.values()) or x.shape[-1] % (2 * BLOCK):
        raise Departs
    _format_of(dst_type, in_blocks=True)
    values, scale = by_block(c.form, x)
    return [values, c.form.cut(scale, 2)]


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
    kind, tile = _format_of(dst_type), col_block_size
    is_usual = not min_scale and round_mode == kind.block_rounding and row_block_size == 1
    if not x.active or not is_usual or dst_type_max or x.shape[-1] % tile:
        raise Departs
    form = c.form
    values, step = by_row(form, form.cut(x, tile), kind)
    return [form.reshape(values, x.shape), form.reshape(step, step.shape[:-1])]


@operator("npu::npu_quantize")
def _(
    c: Call,
    x: Value,
    scales: Value,
    zero_points: Any,
    dtype: Any,
    axis: int = 1,
    div_mode: bool = True,
) -> Value:
    if not x.active or dtype not in (1, 12, torch.int8, torch.qint8):
        raise Departs
    form, shape = c.form, [1] * len(x.shape)
    shape[axis] = scales.shape[-1] if scales.shape else 1
    scaled = form.product([(x, 1), (form.bare(form.reshape(scales, shape)), 1 - 2 * div_mode)])
    if zero_points is not None:
        scaled = form.plus(scaled, form.bare(form.reshape(zero_points, shape)))
    return saturated(form, scaled)


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
    is_other_bias = bias is not None and (bias.dtype != torch.int32 or pertoken_scale is not None)
    if x1_dtype != x2_dtype or offset is not None or y_scale is not None or is_other_bias:
        raise Departs
    leading = x1.shape[:-1]
    rows = form.reshape(x1, (prod(leading), x1.shape[-1]))
    if any(group_sizes or ()):
        is_other = list(group_sizes) != [1, 1, BLOCK] or pertoken_scale is None
        is_other = is_other or bias is not None or x1_dtype is not None
        if is_other or pertoken_scale.shape[:-2] != leading:
            raise Departs
        c.equate(pertoken_scale.shape[-2], rows.shape[1] // (2 * BLOCK))
        c.equate(pertoken_scale.shape[-1], 2)
        row_scales = form.reshape(pertoken_scale, (rows.shape[0], rows.shape[1] // BLOCK))
        weight_scales = form.permute(scale, (0, 2, 1))
        weight_scales = form.reshape(weight_scales, (rows.shape[1] // BLOCK, x2.shape[-1]))
        product = product_of_blocks(form, rows, x2, row_scales, weight_scales)
    else:
        product = form.dot(read_as(form, rows, x1_dtype), x2)
        if bias is not None:
            product = form.plus(product, form.bare(bias))
        if c.dtype == torch.int32:
            return form.reshape(product, c.shape)
        factors: list[tuple[Value, int]] = [(product, 1), (form.bare(scale), 1)]
        if pertoken_scale is not None:
            factors.append((form.bare(form.reshape(pertoken_scale, (rows.shape[0], 1))), 1))
        product = form.product(factors)
    product = form.reshape(product, c.shape)
    return saturated(form, product) if c.dtype == torch.int8 else product
