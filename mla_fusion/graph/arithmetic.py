"""Sums, products, powers, sums along axes, products of matrices, and complex numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from math import inf, prod
from typing import Any

import torch

from mla_fusion.graph import bounds
from mla_fusion.graph.call import RULES, Call, Departs, Pair, Size, operator
from mla_fusion.graph.form import Value, broadcast
from mla_fusion.graph.numbers import MINUS_ONE, number


@operator("add", "sub", "subtract", "rsub")
def added(c: Call, x: Any, other: Any, alpha: Any = 1) -> Any:
    if isinstance(x, Pair) or isinstance(other, Pair):
        if not (isinstance(x, Pair) and isinstance(other, Pair)):
            raise Departs
        inner = Call(c.form, c.name, c.shape, torch.float32)
        parts = (x.real, other.real), (x.imag, other.imag)
        return Pair(*(added(inner, one, two, alpha) for one, two in parts))
    one, two = c.value(x), c.value(other)
    if c.name == "rsub":
        one, two = two, one
    times = c.number_of(alpha)
    if times.roots or c.dtype == torch.bool:
        raise Departs
    return c.sum([(Fraction(1), one), (times.ratio if c.name == "add" else -times.ratio, two)])


@operator("neg", "negative")
def _(c: Call, x: Any) -> Any:
    return x.each(c.form.negated) if isinstance(x, Pair) else c.product([(x, 1)], MINUS_ONE)


@operator("mul", "multiply")
def multiplied(c: Call, x: Any, other: Any) -> Any:
    if isinstance(x, Pair) or isinstance(other, Pair):
        if not isinstance(x, Pair):
            x, other = other, x
        if not isinstance(other, Pair):
            factor = c.value(other)
            return x.each(lambda part: _of_parts(c, [(part, factor, 1)]))
        a, b, u, v = x.real, x.imag, other.real, other.imag
        return Pair(_of_parts(c, [(a, u, 1), (b, v, -1)]), _of_parts(c, [(a, v, 1), (b, u, 1)]))
    if c.dtype == torch.bool:
        return c.function("and", (), *_sorted(c.value(x), c.value(other)))
    return c.product([(_factor(c, x), 1), (_factor(c, other), 1)])


def _factor(c: Call, given: Any) -> Value:
    """A Value; of whole numbers a size, too, is a number to multiply with and to divide by."""
    is_number = isinstance(given, Size) and isinstance(c.dtype, torch.dtype)
    if is_number and not (c.dtype.is_floating_point or c.dtype == torch.bool):
        return c.form.number(int(given), c.dtype)
    return c.value(given)


def _of_parts(c: Call, products: Sequence[tuple[Value, Value, int]]) -> Value:
    inner = Call(c.form, "mul", c.shape, torch.float32)
    return inner.sum(
        [(Fraction(sign), inner.product([(one, 1), (two, 1)])) for one, two, sign in products]
    )


def _sorted(*values: Value) -> list[Value]:
    return sorted(values, key=lambda value: value.serial)


@operator("div", "divide", "true_divide", "floor_divide")
def _(c: Call, x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if isinstance(x, Pair):
        divisor = c.value(other)
        inner = Call(c.form, "div", c.shape, torch.float32)
        return x.each(lambda part: inner.product([(part, 1), (divisor, -1)]))
    one, two = c.value(x), _factor(c, other)
    if c.name == "floor_divide" or rounding_mode:
        return quotient(c, one, two, rounding_mode or "floor")
    return c.product([(one, 1), (two, -1)])


def quotient(c: Call, value: Value, divisor: Value, rounding: str = "floor") -> Value:
    """Of whole numbers; below 0 a truncated one is another."""
    if value.is_float or divisor.is_float:
        return c.function(f"quotient, {rounding}", (), value, divisor)
    found = bounds.of(value)
    if rounding != "floor" and (found is None or found[0] < 0) and value.op != "leaf":
        return c.function(f"quotient, {rounding}", (), value, divisor)
    return c.function("quotient", (), value, divisor)


@operator("remainder", "fmod")
def _(c: Call, x: Any, other: Any) -> Value:
    value, divisor = c.value(x), _factor(c, other)
    if value.is_float or divisor.is_float:
        raise Departs
    whole = quotient(c, value, divisor, "floor" if c.name == "remainder" else "trunc")
    back = c.product([(divisor, 1), (whole, 1)])
    return c.sum([(Fraction(1), value), (Fraction(-1), back)])


@operator("bitwise_right_shift", "__rshift__")
def _(c: Call, x: Value, other: Any) -> Value:
    return quotient(c, x, c.form.number(1 << _whole(c, other), x.dtype))


@operator("bitwise_left_shift", "__lshift__")
def _(c: Call, x: Value, other: Any) -> Value:
    return c.product([(x, 1)], number(1 << _whole(c, other)))


@operator("bitwise_and", "__and__")
def _(c: Call, x: Any, other: Any) -> Value:
    """With 2 ** n - 1 it is a remainder."""
    if c.dtype == torch.bool:
        return c.function("and", (), *_sorted(c.value(x), c.value(other)))
    mask = _whole(c, other)
    if mask < 0 or mask & (mask + 1):
        raise Departs
    divisor = c.form.number(mask + 1, x.dtype)
    whole = quotient(c, x, divisor)
    return c.sum([(Fraction(1), x), (Fraction(-1), c.product([(divisor, 1), (whole, 1)]))])


def _whole(c: Call, given: Any) -> int:
    found = c.number_of(given)
    if found.roots or found.ratio.denominator != 1:
        raise Departs
    return int(found.ratio)


@operator("pow", "float_power")
def _(c: Call, x: Any, exponent: Any) -> Value:
    power = c.number_of(exponent)
    if power.roots or power.ratio.denominator > 2 or abs(power.ratio) > 8:
        raise Departs
    return c.product([(c.value(x), power.ratio)])


def _power(name: str, exponent: Fraction) -> None:
    @operator(name)
    def _(c: Call, x: Value) -> Value:
        return c.product([(x, exponent)])


for _name, _exponent in (
    ("sqrt", Fraction(1, 2)),
    ("rsqrt", Fraction(-1, 2)),
    ("reciprocal", Fraction(-1)),
    ("square", Fraction(2)),
):
    _power(_name, _exponent)


@operator("addcmul", "addcdiv")
def _(c: Call, x: Value, tensor1: Value, tensor2: Value, value: Any = 1) -> Value:
    times = c.number_of(value)
    exponent = 1 if c.name == "addcmul" else -1
    return c.sum(
        [(Fraction(1), x), (Fraction(1), c.product([(tensor1, 1), (tensor2, exponent)], times))]
    )


@operator("lerp")
def _(c: Call, x: Value, end: Value, weight: Any) -> Value:
    step = c.sum([(Fraction(1), end), (Fraction(-1), x)])
    return c.sum([(Fraction(1), x), (Fraction(1), c.product([(step, 1), (c.value(weight), 1)]))])


@operator("sigmoid", "exp", "sin", "cos", "tanh")
def _(c: Call, x: Value) -> Value:
    return c.function(c.name, (), x)


@operator("silu")
def _(c: Call, x: Value) -> Value:
    return c.product([(x, 1), (c.function("sigmoid", (), x), 1)])


@operator("relu", "abs", "absolute")
def _(c: Call, x: Any) -> Value:
    if isinstance(x, Pair):
        raise Departs
    if x.active and bounds.least(x) >= 0:
        return x
    return c.function("abs" if c.name == "absolute" else c.name, (), x)


# -- along axes


def axes_of(value: Value, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(len(value.shape)))
    given = dim if isinstance(dim, (list, tuple)) else [dim]
    return [axis % len(value.shape) for axis in given]


@operator("sum", "mean")
def _(c: Call, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    axes = axes_of(x, dim)
    if not x.active and (x.is_float or x.dtype == torch.bool):
        return c.opaque((tuple(axes), keepdim), [x])
    if c.name == "mean":
        return c.form.mean(x, axes, keepdim)
    return c.form.reduce(x, axes, keepdim)


@operator("linalg_vector_norm", "norm")
def _(
    c: Call, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Value:
    power = options.get("p", ord)
    if power == inf and x.active and axes_of(x, dim) == [len(x.shape) - 1]:
        from mla_fusion.graph.quantise import largest

        found = largest(c.form, x)
        return found if keepdim else c.form.reshape(found, x.shape[:-1])
    if power not in (2, 2.0, None) or not x.active:
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
    mean = form.mean(x, axes)
    apart = form.total([(Fraction(1), x), (Fraction(-1), mean)])
    squares = form.times_count(form.reduce(form.power(apart, 2), axes, keepdim), size, -1, int(offset))
    if c.name == "std":
        return form.power(squares, Fraction(1, 2))
    if c.name == "var":
        return squares
    return [squares, mean if keepdim else form.reshape(mean, squares.shape)]


# -- products of matrices


def matrices(c: Call, x: Value, other: Value) -> Value:
    """As ``matmul`` has it."""
    form, dtype = c.form, c._result_dtype()
    if not dtype.is_floating_point and dtype != torch.int32:
        raise Departs
    if x.active or other.active:
        x, other = form.bare(x), form.bare(other)
    elif x.weight == other.weight or x.model == other.model:
        raise Departs  # it is opaque
    else:  # of x and a weight: casts that change no number are left out
        x, other = form.bare(x, False), form.bare(other, False)
    if len(other.shape) == 1:
        found = matrices(c, x, form.reshape(other, (*other.shape, 1)))
        return form.reshape(found, found.shape[:-1])
    if len(x.shape) == 1:
        found = matrices(c, form.reshape(x, (1, *x.shape)), other)
        return form.reshape(found, (*found.shape[:-2], *found.shape[-1:]))
    if len(other.shape) > 2 or len(x.shape) > 2:
        lead = broadcast((x.shape[:-2], other.shape[:-2]))
        if not (len(other.shape) == 2 and lead == x.shape[:-2]):
            x = form.expand(x, (*lead, *x.shape[-2:]))
            other = form.expand(other, (*lead, *other.shape[-2:]))
    return form.dot(x, other)


@operator("mm", "bmm", "matmul", "_int_mm", "mv", "dot")
def _(c: Call, x: Value, mat2: Any = None, **given: Any) -> Value:
    other = mat2 if mat2 is not None else next(iter(given.values()))
    return matrices(c, x, other)


@operator("addmm", "baddbmm")
def _(c: Call, x: Value, beta: Any = 1, alpha: Any = 1, **given: Any) -> Value:
    one, two = given.values()
    product = c.product([(matrices(c, one, two), 1)], c.number_of(alpha))
    return c.sum([(Fraction(1), product), (Fraction(1), c.product([(x, 1)], c.number_of(beta)))])


@operator("linear", "npu::npu_linear")
def _(c: Call, input: Value, weight: Value, bias: Any = None) -> Value:
    found = matrices(c, input, c.form.transposed(weight))
    return found if bias is None else c.sum([(Fraction(1), found), (Fraction(1), bias)])


@operator("npu::npu_transpose_batchmatmul")
def _(
    c: Call,
    input: Value,
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
    one, two = (
        form.permute(value, order) if order else value
        for value, order in ((input, perm_x1), (weight, perm_x2))
    )
    found = matrices(c, one, two)
    return form.permute(found, perm_y or (1, 0, 2))


@operator("einsum")
def _(c: Call, equation: str, tensors: Sequence[Value], path: Any = None) -> Value:
    if len(tensors) != 2:
        raise Departs
    left, right, after = re.split(",|->", equation.replace(" ", ""))
    shapes = tensors[0].shape, tensors[1].shape, c.shape
    named = map(_axes_named, (left, right, after), map(len, shapes))
    return contracted(c, tensors[0], tensors[1], *named)


_OF_ELLIPSIS = "0123456789"


def _axes_named(axes: str, rank: int) -> str:
    """An axis of an ellipsis has a digit: it is the same one of all terms, counted from the end."""
    count = rank - len(axes.replace("...", ""))
    return axes.replace("...", _OF_ELLIPSIS[:count][::-1])


def contracted(c: Call, x: Value, other: Value, left: str, right: str, after: str) -> Value:
    """A sum over the axes that ``after`` does not name; each axis is a letter."""
    form = c.form
    if len(set(left)) < len(left) or len(set(right)) < len(right):
        raise Departs
    both = [axis for axis in left if axis in right]
    alone = set(left).symmetric_difference(right)
    if not alone <= set(after):
        raise Departs
    batch = [axis for axis in both if axis in after]
    inner = [axis for axis in both if axis not in after]
    rows, columns = ([axis for axis in side if axis not in both] for side in (left, right))
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, other.shape, strict=True))

    def size(axes: Sequence[str]) -> int:
        return prod(sizes[axis] for axis in axes)

    def laid(value: Value, axes: str, *parts: Sequence[str]) -> Value:
        order = [axes.index(axis) for part in (batch, *parts) for axis in part]
        lead = [sizes[axis] for axis in batch]
        return form.reshape(form.permute(value, order), (*lead, *map(size, parts)))

    found = matrices(c, laid(x, left, rows, inner), laid(other, right, inner, columns))
    names = [*batch, *rows, *columns]
    found = form.reshape(found, [sizes[axis] for axis in names])
    return form.permute(found, [names.index(axis) for axis in after])


# -- complex numbers


@operator("view_as_complex", "view_as_complex_copy")
def _(c: Call, x: Value) -> Pair:
    parts = (c.form.slice(x, -1, place, place + 1) for place in (0, 1))
    real, imag = (c.form.reshape(part, x.shape[:-1]) for part in parts)
    return Pair(real, imag)


@operator("view_as_real", "view_as_real_copy")
def _(c: Call, x: Pair) -> Value:
    parts = [c.form.reshape(part, (*part.shape, 1)) for part in (x.real, x.imag)]
    return c.form.join(parts, -1)


@operator("complex")
def _(c: Call, real: Value, imag: Value) -> Pair:
    shape = broadcast((real.shape, imag.shape))
    return Pair(c.form.expand(real, shape), c.form.expand(imag, shape))


@operator("polar")
def _(c: Call, abs: Value, angle: Value) -> Pair:
    inner = Call(c.form, "polar", c.shape, abs.dtype)
    parts = [
        inner.product([(abs, 1), (inner.function(name, (), angle), 1)]) for name in ("cos", "sin")
    ]
    return Pair(*parts)


@operator("_conj", "conj", "conj_physical", "_conj_physical")
def _(c: Call, x: Any) -> Any:
    return Pair(x.real, c.form.negated(x.imag)) if isinstance(x, Pair) else x


@operator("real", "imag")
def _(c: Call, x: Pair) -> Value:
    return x.real if c.name == "real" else x.imag


# of complex tensors: those that are done to each part
OF_PARTS = frozenset(
    "view _unsafe_view reshape unsqueeze squeeze expand permute transpose t slice select split "
    "split_with_sizes unbind clone alias detach index index_select contiguous _to_copy cat stack "
    "lift_fresh_copy embedding".split()
)
OF_COMPLEX = frozenset(
    name
    for name, rule in RULES.items()
    if name
    in (
        "add",
        "sub",
        "neg",
        "mul",
        "div",
        "view_as_real",
        "view_as_real_copy",
        "_conj",
        "conj",
        "conj_physical",
        "_conj_physical",
        "real",
        "imag",
    )
)
