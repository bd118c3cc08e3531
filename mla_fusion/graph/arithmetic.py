"""Rules of arithmetic: sums, products, powers, sums along axes, matrix products, complex numbers.

``graph/read.py`` calls them for nodes such as add, mul, rsqrt, mean, mm and einsum. ``c`` is the
call, whose ``sum`` and ``product`` are exact if an operand is active. Each rule returns the Value
of the result, or a Pair for a complex one.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf, prod
from typing import Any

import torch

from mla_fusion.graph import bounds, quantise
from mla_fusion.graph.call import Call, Departs, Pair, Size, axes_of, operator
from mla_fusion.graph.form import Value, broadcast
from mla_fusion.graph.numbers import MINUS_ONE, number


@operator("add", "sub", "rsub")
def _(c: Call, x: Any, other: Any, alpha: Any = 1) -> Any:
    augend, addend = c.value(x), c.value(other)
    if c.name == "rsub":
        augend, addend = addend, augend
    times = c.ratio_of(alpha)
    if c.dtype == torch.bool:
        raise Departs
    return c.sum([(1, augend), (times if c.name == "add" else -times, addend)])


@operator("neg")
def _(c: Call, x: Any) -> Any:
    return c.product([(x, 1)], MINUS_ONE)


@operator("mul")
def multiply(c: Call, x: Any, other: Any) -> Any:
    """The product of two operands; "and" of booleans."""
    if isinstance(x, Pair):
        return _complex_product(c, x, other)
    if isinstance(other, Pair):
        return _complex_product(c, other, x)
    if c.dtype == torch.bool:
        return c.symmetric("and", x, other)
    return c.times(_factor(c, x), _factor(c, other))


def _factor(c: Call, operand: Any) -> Value:
    """An operand as a Value. In a call of integers the size of a tensor is its bound number."""
    is_number = isinstance(operand, Size) and operand.is_count
    if is_number and not (c.dtype.is_floating_point or c.dtype == torch.bool):
        return c.form.number(int(operand), c.dtype)
    return c.value(operand)


def _complex_product(c: Call, x: Pair, other: Any) -> Pair:
    """The product of a complex tensor and another operand."""
    inner = Call(c.form, "mul", c.shape, torch.float32)
    if not isinstance(other, Pair):
        real_factor = c.value(other)
        return x.each(lambda part: inner.times(part, real_factor))
    return Pair(
        inner.sum([(1, inner.times(x.real, other.real)), (-1, inner.times(x.imag, other.imag))]),
        inner.plus(inner.times(x.real, other.imag), inner.times(x.imag, other.real)),
    )


@operator("div", "floor_divide")
def _(c: Call, x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    dividend, denominator = c.value(x), _factor(c, other)
    if c.name == "floor_divide" or rounding_mode:
        return quotient(c, dividend, denominator, rounding_mode or "floor")
    return c.product([(dividend, 1), (denominator, -1)])


def quotient(c: Call, value: Value, divisor: Value, rounding: str = "floor") -> Value:
    """The quotient of two operands, rounded to an integer.

    Integers rounded down are the function "quotient". Truncation equals that for operands that are
    not negative; of inputs of the graph this is assumed. All others are functions of their
    rounding's name.
    """
    if value.is_float or divisor.is_float:
        return c.function(f"quotient, {rounding}", value, divisor)
    if rounding != "floor":
        least, least_divisor = bounds.least_integer(value), bounds.least_integer(divisor)
        is_not_negative = least >= 0 or (value.op == "leaf" and c.is_not_negative(value))
        if least_divisor < 0 or not is_not_negative:
            return c.function(f"quotient, {rounding}", value, divisor)
    return c.function("quotient", value, divisor)


@operator("remainder", "fmod")
def remainder(c: Call, x: Any, other: Any) -> Value:
    """``x - other * (x // other)``, of integers."""
    value, divisor = c.value(x), _factor(c, other)
    if value.is_float or divisor.is_float:
        raise Departs
    rounded_quotient = quotient(c, value, divisor, "trunc" if c.name == "fmod" else "floor")
    return c.sum([(1, value), (-1, c.times(divisor, rounded_quotient))])


@operator("bitwise_right_shift", "__rshift__")
def _(c: Call, x: Value, other: Any) -> Value:
    return quotient(c, x, c.form.number(1 << _integer(c, other), x.dtype))


@operator("bitwise_left_shift", "__lshift__")
def _(c: Call, x: Value, other: Any) -> Value:
    return c.product([(x, 1)], number(1 << _integer(c, other)))


@operator("bitwise_and")
def _(c: Call, x: Any, other: Any) -> Value:
    """A mask of ``2 ** n - 1`` is a remainder; "and" of booleans. Raises Departs for other
    masks.
    """
    if c.dtype == torch.bool:
        return c.symmetric("and", x, other)
    mask = _integer(c, other)
    if mask < 0 or mask & (mask + 1):
        raise Departs
    return remainder(c, x, mask + 1)


@operator("bitwise_or")
def _(c: Call, x: Any, other: Any) -> Value:
    """The sum of a multiple of ``2 ** n`` and a smaller number. Raises Departs for others."""
    values = c.value(x), c.value(other)
    for high, low in (values, values[::-1]):
        limits, times = bounds.of(low), c.form.split(high)[0].ratio
        is_power_of_two = times > 0 and number(times).is_power_of_two
        if limits is not None and is_power_of_two and 0 <= limits[0] <= limits[1] < times:
            return c.plus(high, low)
    raise Departs


def _integer(c: Call, operand: Any) -> int:
    """The integer that an operand is. Raises Departs."""
    ratio = c.ratio_of(operand)
    if ratio.denominator != 1:
        raise Departs
    return int(ratio)


@operator("pow", "float_power")
def _(c: Call, x: Any, exponent: Any) -> Value:
    power = c.ratio_of(exponent)
    if power.denominator > 2 or abs(power) > 8:
        raise Departs
    return c.product([(c.value(x), power)])


_POWERS = {
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
    "reciprocal": Fraction(-1),
    "square": Fraction(2),
}


@operator(*_POWERS)
def _(c: Call, x: Value) -> Value:
    return c.product([(x, _POWERS[c.name])])


@operator("relu", "abs", "sigmoid", "exp", "sin", "cos", "tanh")
def _(c: Call, x: Value) -> Value:
    if c.name in ("relu", "abs") and x.active and bounds.least(x) >= 0:
        return x
    return c.function(c.name, x)


# -- along axes


@operator("sum", "mean")
def _(c: Call, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    axes = axes_of(x, dim)
    if x.active and dtype is not None and not c.dtype.is_floating_point:  # it cuts fractions off
        raise Departs
    if not x.active and (c.dtype.is_floating_point or x.dtype == torch.bool):
        return c.opaque((tuple(axes), keepdim), [x])
    if c.name == "mean":
        return c.form.mean(x, axes, keepdim)
    total = c.form.reduce(x if x.active else c.form.cast(x, c.dtype), axes, keepdim)
    return total if x.active else c.function_if_overflow(total, "sum")


@operator("linalg_vector_norm", "norm")
def _(
    c: Call, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Value:
    """The root of the sum of squares, or the largest absolute element of rows."""
    power = options.get("p", ord)
    if power == inf and x.active and axes_of(x, dim) == [len(x.shape) - 1]:
        sizes = quantise.largest(c.form, x)
        return sizes if keepdim else c.form.reshape(sizes, x.shape[:-1])
    if power not in (2, None) or not x.active:
        raise Departs
    squares = c.form.reduce(c.product([(x, 2)]), axes_of(x, dim), keepdim)
    return c.product([(squares, Fraction(1, 2))])


@operator("var", "std", "var_mean")
def _(
    c: Call,
    x: Value,
    dim: Any = None,
    correction: Any = None,
    keepdim: bool = False,
    **options: Any,
) -> Any:
    if not x.active:
        raise Departs
    axes = axes_of(x, dim)
    offset = options.get("unbiased", True) if correction is None else correction
    size = prod(x.shape[axis] for axis in axes)
    form = c.form
    if offset != int(offset):
        raise Departs
    mean = form.mean(x, axes)
    centred = form.total([(1, x), (-1, mean)])
    variance = form.times_count(
        form.reduce(form.power(centred, 2), axes, keepdim), size, -1, int(offset)
    )
    if c.name == "std":
        return form.power(variance, Fraction(1, 2))
    if c.name == "var":
        return variance
    return [variance, mean if keepdim else form.reshape(mean, variance.shape)]


# -- products of matrices


def matrix_product(c: Call, x: Value, other: Value) -> Value:
    """The product of two operands by the rules of ``matmul``.

    If no operand is active, one must be a weight and the other must depend on the graph's inputs.
    Otherwise the result is opaque: raises Departs.
    """
    form, dtype = c.form, c.dtype
    is_computed = dtype.is_floating_point or dtype == torch.int32
    if not is_computed or min(len(x.shape), len(other.shape)) < 2:
        raise Departs
    if not (x.active or other.active):
        if x.shape[-1] == 1:  # angles: frequencies times positions
            return c.times(x, other)
        if x.weight == other.weight or x.model == other.model:
            raise Departs  # the result is opaque
    # the rounding of a weight is its own: only casts that change no number are left out
    x, other = form.bare(x, False), form.bare(other, False)
    leading = broadcast((x.shape[:-2], other.shape[:-2]))
    if not (len(other.shape) == 2 and leading == x.shape[:-2]):
        x, other = (form.expand(value, (*leading, *value.shape[-2:])) for value in (x, other))
    return form.dot(x, other)


@operator("mm", "bmm", "matmul", "_int_mm")
def _(c: Call, x: Value, mat2: Any = None, **operands: Any) -> Value:
    other = mat2 if mat2 is not None else next(iter(operands.values()))
    return matrix_product(c, x, other)


@operator("addmm", "baddbmm")
def _(c: Call, x: Value, beta: Any = 1, alpha: Any = 1, **operands: Any) -> Value:
    left, right = operands.values()
    product = c.product([(matrix_product(c, left, right), 1)], c.number_of(alpha))
    return c.plus(product, c.product([(x, 1)], c.number_of(beta)))


@operator("prims::fma")
def _(call: Call, /, x: Any, b: Any, c: Any) -> Value:  # the schema has an argument named c
    return call.plus(call.times(call.value(x), call.value(b)), call.value(c))


@operator("linear", "npu::npu_linear")
def _(c: Call, x: Value, weight: Value, bias: Any = None) -> Value:
    product = matrix_product(c, x, c.form.transposed(weight))
    return product if bias is None else c.plus(product, bias)


@operator("npu::npu_transpose_batchmatmul")
def _(
    c: Call,
    x: Value,
    weight: Value,
    bias: Any = None,
    scale: Any = None,
    perm_x1: Any = None,
    perm_x2: Any = None,
    perm_y: Any = None,
    batch_split_factor: int = 1,
    **_: Any,
) -> Value:
    if bias is not None or scale is not None or batch_split_factor != 1:
        raise Departs
    form = c.form
    left, right = (
        form.permute(value, order) if order else value
        for value, order in ((x, perm_x1), (weight, perm_x2))
    )
    return form.permute(matrix_product(c, left, right), perm_y or (1, 0, 2))


# -- complex numbers


@operator("view_as_complex", "view_as_complex_copy")
def _(c: Call, x: Value) -> Pair:
    return Pair(c.form.select(x, -1, 0), c.form.select(x, -1, 1))


@operator("view_as_real", "view_as_real_copy")
def _(c: Call, x: Pair) -> Value:
    parts = [c.form.reshape(part, (*part.shape, 1)) for part in (x.real, x.imag)]
    return c.form.join(parts, -1)


@operator("complex")
def _(c: Call, real: Value, imag: Value) -> Pair:
    return Pair(real, imag).each(lambda part: c.form.expand(part, c.shape))


@operator("polar")
def _(c: Call, abs: Value, angle: Value) -> Pair:
    inner = Call(c.form, "polar", c.shape, abs.dtype)
    return Pair(*(inner.times(abs, inner.function(name, angle)) for name in ("cos", "sin")))


@operator("_conj", "conj", "conj_physical", "_conj_physical")
def _(c: Call, x: Any) -> Any:
    return Pair(x.real, c.form.negated(x.imag)) if isinstance(x, Pair) else x


@operator("real", "imag")
def _(c: Call, x: Pair) -> Any:
    return getattr(x, c.name)


# operators that are applied to the real and the imaginary part alike
OF_PARTS = frozenset(
    "view _unsafe_view reshape unsqueeze squeeze expand permute transpose t slice select split "
    "split_with_sizes unbind clone alias detach index index_select contiguous _to_copy "
    "lift_fresh_copy embedding neg".split()
)
OF_COMPLEX = frozenset(  # operators whose rules take complex tensors
    "mul view_as_real view_as_real_copy _conj conj conj_physical _conj_physical real imag".split()
)
