"""Exact arithmetic: elements of GF(p^2), p a prime below 2**31, held in int64 tensors.

``p = 3 mod 4``, so ``i * i = -1`` makes the second dimension, and each element of GF(p) has a root.
The primes up to 29 have roots in GF(p) itself: with those, roots of products are products of roots.
What is no arithmetic is an uninterpreted function: a hash of its name and its arguments. Two values
made of arithmetic and such functions that are equal at a random point are equal everywhere, but for
a chance of (degree / p) at each point (Schwartz, Zippel).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from mla_fusion.prove.cells import ZERO, Cells
from mla_fusion.prove.trace import Trace

P = 2147481311
_ROOT = (P + 1) // 4
_POSITIVE = (1 << 62) - 1
_MOST_TIMES = 1 << 16  # columns of a row whose squares are added up
_MOST_SMOOTH = 1 << 20  # numerator times denominator of another number that is made of small primes
_SMALL_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
_FEW = 64  # elements whose powers Python has sooner than torch
_CHUNK = 1 << 20  # elements of a matrix that are split into halves at a time


class Undecided(Exception):
    """A step that has no exact value here."""


@dataclass
class Point:
    """A random point of the field, and what is known of the values at it.

    draw       its number: all that is drawn follows from it and from names
    maxima     rows whose largest element has been met, and that largest, with the axis kept
    of_kernel  those that the kernel takes, of rows that no factor makes small
    has_mixed  a weight was joined with what is no weight, and so was drawn
    read_off   the scales of a call are numbers that were read off values, to eight digits
    floors     the smallest epsilon stands for a floor under the norm
    are_rows   rounded numbers are those of rows: far below 2**31
    memory     how many tensors of unwritten memory there have been
    roots      what the kernel (where there is none, anything) takes roots of
    draws_roots  is what is evaluated the kernel?
    early      a root was taken before the kernel's were known, and so is a function
    times      as many times the kernel's, or 1, as roots were taken of: the same at each point
    means      the mean squares of rows that norms have taken
    float16    are casts to float16 left out, as those to wider floats? It has little range
    trace      where what is evaluated is written down, if it is
    """

    draw: int = 0
    maxima: list[tuple[Num, Num]] = field(default_factory=list)
    of_kernel: list[tuple[Num, Num]] = field(default_factory=list)
    has_mixed: bool = False
    read_off: bool = False
    floors: bool = False
    are_rows: bool = True
    memory: int = 0
    roots: list[Num] = field(default_factory=list)
    draws_roots: bool = True
    early: bool = False
    times: list[Fraction] = field(default_factory=list)
    means: list[Num] = field(default_factory=list)
    float16: bool = True
    trace: Trace | None = None


_POINT: ContextVar[Point | None] = ContextVar("POINT", default=None)


def here() -> Point:
    """The point at which this is evaluated; outside every one, a new first one."""
    return _POINT.get() or Point()


@contextmanager
def at(point: Point) -> Iterator[Point]:
    """Everything inside is evaluated at the point."""
    before = _POINT.set(point)
    try:
        yield point
    finally:
        _POINT.reset(before)


@contextmanager
def untraced() -> Iterator[Trace | None]:
    """Nothing inside is written down."""
    point = here()
    trace, point.trace = point.trace, None
    try:
        yield trace
    finally:
        point.trace = trace


Made = TypeVar("Made", bound=Callable[..., Any])


def primitive(rule: Made) -> Made:
    """One entry of a certificate, however it is computed: the function's name, its operands, the
    rest.
    """

    @wraps(rule)
    def written(*given: Any) -> Num:
        with untraced() as trace:
            found: Num = rule(*given)
        if trace is not None:
            values = [item for item in given if isinstance(item, Num)]
            trace.enter(
                found,
                rule.__name__.strip("_"),
                values,
                *(item for item in given if not isinstance(item, Num)),
            )
        return found

    return written  # type: ignore[return-value]


Held = TypeVar("Held", bound="Movable")


class _Movement:
    """A method that moves elements as one of tensors does."""

    def __init__(self, move: Callable[..., Tensor]) -> None:
        self._move = move

    def __get__(self, value: Held, kind: type) -> Callable[..., Held]:
        return lambda *given: value.moved(lambda part: self._move(part, *given))


class Movable:
    """Elements in places."""

    def moved(self: Held, move: Callable[[Tensor], Tensor]) -> Held:
        """The same elements, in other places."""
        raise NotImplementedError

    expand = _Movement(Tensor.expand)
    flatten = _Movement(Tensor.flatten)
    narrow = _Movement(Tensor.narrow)
    permute = _Movement(Tensor.permute)
    reshape = _Movement(Tensor.reshape)
    squeeze = _Movement(Tensor.squeeze)
    transpose = _Movement(Tensor.transpose)
    unflatten = _Movement(Tensor.unflatten)
    unsqueeze = _Movement(Tensor.unsqueeze)

    @property
    def mT(self: Held) -> Held:
        return self.transpose(-2, -1)


class Num(Movable):
    """A tensor of elements ``re + im * i``; ``im`` None: all of GF(p).

    ints     of integers made of literals alone: these, by which tensors may be indexed
    cells    of weights that are only moved about: which elements these are
    past     what it was made of, where a later step may make one step of several
    as_root  the root that it is a multiple of
    as_rows  what stands for its rows in products with weights, once there was one
    """

    def __init__(
        self,
        re: Tensor | None,
        im: Tensor | None = None,
        ints: Tensor | None = None,
        cells: Cells | None = None,
        past: Any = None,
    ) -> None:
        self._re, self.im, self.ints, self.cells, self.past = re, im, ints, cells, past
        self.as_root: Root | None = None
        self.as_rows: tuple[Num, Num] | None = None

    @property
    def re(self) -> Tensor:
        if self._re is None:
            assert self.cells is not None
            numbers = self.cells.numbers()
            drawn = (_mixed(_start("cell"), numbers) & _POSITIVE).remainder(P)
            self._re = torch.where(numbers == ZERO, 0, drawn)
        return self._re

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cells.shape if self.cells is not None else tuple(self.re.shape)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Num:
        if self.cells is not None:
            found = Num(None, cells=self.cells.moved(move))
        else:
            im, ints = (part if part is None else move(part) for part in (self.im, self.ints))
            found = Num(move(self.re), im, ints)
        trace = here().trace
        if trace is not None:
            trace.moved(found, self, move)
        return found if self.as_root is None else self.as_root.moved(found, move)

    def with_past(self, past: Any = None) -> Num:
        """The same elements, drawn if need be, of which no more is known than this."""
        found = Num(self.re, self.im, past=past)
        found.as_root = self.as_root
        trace = here().trace
        if trace is not None:
            trace.same(found, self)
        return found

    def parts(self, move: Callable[[Tensor], Sequence[Tensor]]) -> list[Num]:
        """What ``move`` cuts it into."""
        count = len(move(torch.empty(self.shape, device="meta", dtype=torch.int64)))
        return [self.moved(_part_of(move, place)) for place in range(count)]

    def __add__(self, other: Operand) -> Operand:
        return _add(self, other) if isinstance(other, Num) else other + self

    def __neg__(self) -> Num:
        found = _neg(self)
        found.as_root = None if self.as_root is None else self.as_root.times(number(-1))
        return found

    def __sub__(self, other: Operand) -> Operand:
        return self + -other

    def __mul__(self, other: Operand) -> Operand:
        return _product(self, other) if isinstance(other, Num) else other * self

    def __truediv__(self, other: Num) -> Num:
        return self * inverse(other)

    def __matmul__(self, other: Num) -> Num:
        """Products of matrices [.., m, k] and [.., k, n]."""
        if self.cells is not None and other.cells is None:
            return _matmul(other.mT, self.mT).mT
        return _matmul(self, other)


@dataclass(frozen=True)
class Root:
    """``factor * root``, the square of whose root is known.

    factor       one number; None: 1
    is_function  the root is none that the kernel takes
    """

    square: Num
    root: Num
    factor: Num | None = None
    is_function: bool = False

    def value(self) -> Num:
        found = self.root.with_past() if self.factor is None else _mul(self.root, self.factor)
        found.as_root = self
        return found

    def squared(self, other: Root) -> Num:
        """The product with another factor of the root."""
        found = self.square
        for factor in (self.factor, other.factor):
            found = found if factor is None else found * factor
        return found

    def times(self, factor: Num) -> Root:
        return replace(self, factor=factor if self.factor is None else self.factor * factor)

    def inverse(self) -> Root:
        factor = None if self.factor is None else inverse(self.factor)
        return Root(inverse(self.square), _inverse(self.root), factor, self.is_function)

    def moved(self, found: Num, move: Callable[[Tensor], Tensor]) -> Num:
        """Fewer elements than the root was taken of may be what the kernel takes roots of."""
        square = self.square.moved(move)
        is_other = self.is_function and square.re.numel() != self.square.re.numel()
        known = of_kernel(square) if is_other else None
        if known is not None:
            return Root(square, known, self.factor).value()
        found.as_root = replace(self, square=square, root=self.root.moved(move))
        return found


def _part_of(move: Callable[[Tensor], Sequence[Tensor]], place: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: move(tensor)[place]


def joined(values: Sequence[Num], axis: int) -> Num:
    """Several tensors side by side."""
    found = join(*values, axis % len(values[0].shape))
    roots = [value.as_root for value in values if value.as_root is not None]
    if values and len(roots) == len(values):
        squares = [root.squared(root) for root in roots]
        found.as_root = Root(joined(squares, axis), found.with_past())
    return found


def stacked(values: Sequence[Num], axis: int) -> Num:
    return joined([value.unsqueeze(axis) for value in values], axis)


@primitive
def join(*given: Any) -> Num:
    """Tensors, and last the axis."""
    *values, axis = given
    if all(value.cells is not None for value in values):
        return Num(None, cells=Cells(torch.cat([value.cells.numbers() for value in values], axis)))
    here().has_mixed |= any(value.cells is not None for value in values)
    re = torch.cat([value.re for value in values], axis)
    is_real = all(value.im is None for value in values)
    ints = [value.ints for value in values if value.ints is not None]
    im = None if is_real else torch.cat([imaginary(value) for value in values], axis)
    return Num(re, im, torch.cat(ints, axis) if len(ints) == len(values) else None)


def pad(value: Num, pads: Sequence[int]) -> Num:
    """Zeros around, as torch counts them: before and behind the last axis, then the one before
    it.
    """
    for place, count in enumerate(pads):
        axis = len(value.shape) - 1 - place // 2
        if count < 0:
            start = 0 if place % 2 else -count
            value = value.narrow(axis, start, value.shape[axis] + count)
        elif count:
            shape = (*value.shape[:axis], count, *value.shape[axis + 1 :])
            zeros = _zeros(shape, of_weights=value.cells is not None)
            value = joined([value, zeros] if place % 2 else [zeros, value], axis)
    return value


def _zeros(shape: Sequence[int], of_weights: bool) -> Num:
    zeros = torch.zeros(tuple(shape), dtype=torch.int64)
    value = Num(None, cells=Cells(zeros + ZERO)) if of_weights else Num(zeros)
    trace = here().trace
    if trace is not None:
        trace.enter(value, "zeros", (), list(shape))
    return value


@dataclass(frozen=True)
class Complex(Movable):
    """A complex tensor: real and imaginary numbers, each an element."""

    real: Num
    imag: Num

    @classmethod
    def of(cls, value: Value) -> Complex:
        return value if isinstance(value, Complex) else cls(value, number(0))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.real.shape

    def moved(self, move: Callable[[Tensor], Tensor]) -> Complex:
        return Complex(self.real.moved(move), self.imag.moved(move))

    def parts(self, move: Callable[[Tensor], Sequence[Tensor]]) -> list[Complex]:
        return [
            Complex(a, b) for a, b in zip(self.real.parts(move), self.imag.parts(move), strict=True)
        ]

    def __add__(self, other: Value) -> Complex:
        other = Complex.of(other)
        return Complex(self.real + other.real, self.imag + other.imag)

    def __neg__(self) -> Complex:
        return Complex(-self.real, -self.imag)

    def __sub__(self, other: Value) -> Complex:
        return self + -other

    def __mul__(self, other: Value) -> Complex:
        if isinstance(other, Num):
            return Complex(self.real * other, self.imag * other)
        real = self.real * other.real - self.imag * other.imag
        return Complex(real, self.real * other.imag + self.imag * other.real)

    def __truediv__(self, other: Num) -> Complex:
        return self * inverse(other)

    def conjugate(self) -> Complex:
        return Complex(self.real, -self.imag)

    def squared(self) -> Num:
        """Its size, squared."""
        return self.real * self.real + self.imag * self.imag


Value = Num | Complex
Operand = TypeVar("Operand", Num, Complex)


# -- numbers


@dataclass(frozen=True)
class Literal:
    """A fraction, or the root of one."""

    exact: Fraction
    is_root: bool = False

    @property
    def written(self) -> list[str]:
        """As a certificate has it."""
        return ["root" if self.is_root else "number", str(self.exact)]

    def num(self, written: float | None = None) -> Num:
        """Its element. ``written``: the float that it stands for."""
        found = _element(self)
        trace = here().trace
        if trace is not None:
            trace.enter(found, "root" if self.is_root else "number", (), str(self.exact), written)
        return found


@cache
def _element(literal: Literal) -> Num:
    """Roots of products are products of roots: of those of the primes."""
    if not literal.is_root:
        return _scalar(residue(literal.exact))
    with untraced():
        (over, above), (under, below) = map(_root_of_whole, literal.exact.as_integer_ratio())
        return _mul(_scalar(residue(Fraction(over, under))), _mul(above, _inverse(below)))


def _root_of_whole(number: int) -> tuple[int, Num]:
    """As a number, times the roots of its primes."""
    whole, roots = 1, _scalar(1)
    for prime, count in _factors(number):
        whole *= prime ** (count // 2)
        roots = _mul(roots, _root(_scalar(prime % P))) if count % 2 else roots
    return whole, roots


def _factors(number: int) -> list[tuple[int, int]]:
    """Its primes, and how often it has each; what is left of a large one is taken for a prime."""
    found, by = list[tuple[int, int]](), 2
    while by * by <= number and by < _MOST_TIMES:
        count = 0
        while number % by == 0:
            number, count = number // by, count + 1
        if count:
            found.append((by, count))
        by += 1
    return found + ([(number, 1)] if number > 1 else [])


def number(value: float | Fraction) -> Num:
    """A literal, as the rational that it was written for (1e-6, 1/1536, or a root of one)."""
    if not isinstance(value, float):
        return Literal(Fraction(value)).num()
    if not math.isfinite(value):
        raise Undecided(f"{value} is no number of the field")
    found = literal(value)
    return -found.num(-value) if value < 0 and found.is_root else found.num(value)


def literal(value: float) -> Literal:
    """What was written; of a negative root the positive one."""
    whole = _root_of(value)
    return Literal(rational(value)) if whole is None else Literal(whole, is_root=True)


@cache
def rational(value: float | Fraction) -> Fraction:
    """What was written: a quotient of small numbers, 1 / n, or a decimal number of a float32 or of
    15 digits.

    Factors that are multiplied out (``1e-5 * 1536``) lose the last bit of a float64.
    """
    if not isinstance(value, float):
        return Fraction(value)
    if value and abs(value) < 1 and abs(value) > 1 / (1 << 24):
        below = round(1 / value)
        if 1.0 / below == value:
            return Fraction(1, below)
    near = Fraction(value).limit_denominator(1000)  # 25 / 24
    if abs(value) < 1 << 40 and float(near) == value:
        return near
    return Fraction(_shortest32(value) or f"{value:.15g}")


def _shortest32(value: float) -> str | None:
    narrow = torch.tensor(value, dtype=torch.float64).float()
    if narrow.double().item() != value:
        return None
    written = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next(
        (text for text in written if torch.tensor(float(text), dtype=torch.float32).equal(narrow)),
        None,
    )


def _root_of(value: float) -> Fraction | None:
    """The fraction whose root the literal is, to the last bits; None for a rational one."""
    square = Fraction(value * value).limit_denominator(1000)
    if not 1e-3 < square < 1e7:
        inverse = Fraction(1 / (value * value)).limit_denominator(1000) if value else Fraction(0)
        square = 1 / inverse if 1e-3 < inverse < 1e7 else Fraction(0)
    if not square or abs(math.sqrt(square) - abs(value)) > 4e-16 * abs(value):
        return None
    is_rational = all(
        math.isqrt(part) ** 2 == part for part in (square.numerator, square.denominator)
    )
    return None if is_rational else square


def nearest(value: float) -> Literal:
    """The small fraction, or the root of one, that a number of eight digits was read off from; else
    the number.
    """
    exact, square = (Fraction(part).limit_denominator(1000) for part in (value, value * value))
    found = [
        Literal(part, is_root)
        for part, apart, is_root in (
            (exact, abs(float(exact) - value), False),
            (square, abs(math.sqrt(square) - abs(value)), True),
        )
        if part and apart <= 2e-8 * abs(value)
    ]
    return (
        min(found, key=lambda one: one.exact.denominator) if found and value > 0 else literal(value)
    )


def residue(value: Fraction) -> int:
    if value.denominator % P == 0:
        raise Undecided(f"{value} has no value in the field")
    if value and value.numerator % P == 0:
        raise Undecided(f"{value} is 0 in the field")
    return value.numerator % P * pow(value.denominator, -1, P) % P


def _scalar(value: int) -> Num:
    return Num(torch.tensor(value, dtype=torch.int64))


def integers(values: Tensor) -> Num:
    """Exact integers."""
    values = values.to(torch.int64)
    found = Num(values.remainder(P), None, values)
    trace = here().trace
    if trace is not None:
        trace.integers(found, values)
    return found


def exact(values: Tensor) -> Num:
    """A literal tensor of floats: each is a fraction of a power of two."""
    if not values.is_floating_point():
        return integers(values)
    flat = values.double().reshape(-1).tolist()
    places = {value: place for place, value in enumerate(dict.fromkeys(flat))}
    if not places:
        return integers(values)
    each = stacked([number(value) for value in places], 0)
    which = torch.tensor([places[value] for value in flat], dtype=torch.int64).reshape(values.shape)
    return each.moved(lambda part: part[which])


# -- arithmetic


def _mod(value: Tensor) -> Tensor:
    return value.remainder(P)


def imaginary(value: Num) -> Tensor:
    return torch.zeros_like(value.re) if value.im is None else value.im


def _is_real(a: Num) -> bool:
    return a.im is None or not bool(a.im.any())


def equal(a: Num, b: Num) -> bool:
    """Are all elements equal, each spread over the other?"""
    return bool((a.re == b.re).all() and (imaginary(a) == imaginary(b)).all())


def has_zeros(a: Num) -> bool:
    return bool(_are_zeros(a).any())


def is_zero(a: Num) -> bool:
    return bool(_are_zeros(a).all())


def _are_zeros(a: Num) -> Tensor:
    return (a.re == 0) & (imaginary(a) == 0)


@primitive
def _add(a: Num, b: Num) -> Num:
    im = None if a.im is None and b.im is None else _mod(imaginary(a) + imaginary(b))
    return Num(_mod(a.re + b.re), im)


@primitive
def _neg(a: Num) -> Num:
    return Num(_mod(-a.re), None if a.im is None else _mod(-a.im))


def _product(a: Num, b: Num) -> Num:
    """Of a root with itself: its square. Of one with a number: that many times it."""
    one, other = a.as_root, b.as_root
    if one is not None and other is not None:
        larger = max(one, other, key=lambda root: root.square.re.numel())
        is_whole = larger.square.shape == torch.broadcast_shapes(a.shape, b.shape)
        if is_whole and (one.root is other.root or equal(one.root, other.root)):
            return larger.squared(one if larger is other else other)
    found = _mul(a, b)
    for root, factor in ((one, b), (other, a)):
        if root is None or factor.as_root is not None:
            continue
        if not factor.shape:
            found.as_root = root.times(factor)
        elif factor.shape == root.square.shape and _is_inverse(factor, root.square):
            return replace(root.inverse(), factor=root.factor).value()
    return found


def _is_inverse(a: Num, b: Num) -> bool:
    with untraced():
        return equal(_mul(a, b), _scalar(1))


@primitive
def _mul(a: Num, b: Num) -> Num:
    return _of_parts(Tensor.mul, a, b)


def _of_parts(times: Callable[[Tensor, Tensor], Tensor], a: Num, b: Num) -> Num:
    """A product of elements, by that of their parts: each below 2**62, so an int64 has two."""
    re, im = times(a.re, b.re), None
    if a.im is not None:
        im = times(a.im, b.re)
    if b.im is not None:
        crossed = times(a.re, b.im)
        im = crossed if im is None else im + crossed
        re = re if a.im is None else re - times(a.im, b.im)
    return Num(_mod(re), None if im is None else _mod(im))


def _power(a: Tensor, exponent: int) -> Tensor:
    if a.numel() <= _FEW:
        powers = [pow(element, exponent, P) for element in a.reshape(-1).tolist()]
        return torch.tensor(powers, dtype=torch.int64).reshape(a.shape)
    found, base = torch.ones_like(a), a
    while exponent:
        if exponent & 1:
            found = _mod(found * base)
        base, exponent = _mod(base * base), exponent >> 1
    return found


def inverse(a: Num) -> Num:
    """``1 / a``. No random element is 0."""
    found = _inverse(a)
    if a.as_root is not None and not has_zeros(a.as_root.square):
        found.as_root = a.as_root.inverse()
    return found


@primitive
def _inverse(a: Num) -> Num:
    if has_zeros(a):
        raise Undecided("a quotient by 0")
    if a.im is None:
        return Num(_power(a.re, P - 2))
    norm = _power(_mod(a.re * a.re + a.im * a.im), P - 2)
    return Num(_mod(a.re * norm), _mod(_mod(-a.im) * norm))


def _times(a: Num, b: Num) -> Tensor | None:
    """[1]: how many times the elements of the other, spread over it, all elements are; None where
    that is not one number of GF(p).
    """
    count = a.re.numel()
    if (
        not count
        or not (_is_real(a) and _is_real(b))
        or b.re.numel() not in (1, count, math.prod(a.shape[:-1]))
    ):
        return None
    one, other = a.re.reshape(b.re.numel(), -1), b.re.reshape(-1, 1)
    times = _mod(one[:1, :1] * _power(other[:1], P - 2)).reshape(1)
    return times if bool((one == _mod(other * times)).all()) else None


def small_times(a: Num, b: Num) -> Fraction | None:
    """How many times the elements of the other all elements are, where that is a small whole
    number, a part by one, or a quotient of products of small primes.

    A single element may be so by a chance below 1e-3 at a point, and by none at several: see
    ``Point.times``.
    """
    found = _times(a, b)
    left, number, below, behind = P, 0 if found is None else int(found), 0, 1
    while number:
        if behind > 0 and _is_small(number, behind):
            return Fraction(number, behind)
        quotient = left // number
        left, number = number, left - quotient * number
        below, behind = behind, below - quotient * behind
    return None


def _is_small(over: int, under: int) -> bool:
    if min(over, under) == 1 and max(over, under) <= _MOST_TIMES:
        return True
    rest = over * under
    if rest > _MOST_SMOOTH:
        return False
    for prime in _SMALL_PRIMES:
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def is_whole_times(a: Num, b: Num, most: int) -> bool:
    """Are all elements the same whole number, of 1 to ``most``, times those of the other?"""
    times = _times(a, b)
    return times is not None and 1 <= int(times) <= most


def integer_power(a: Num, exponent: int) -> Num:
    base, left = (a, exponent) if exponent >= 0 else (inverse(a), -exponent)
    found = None
    while left:
        if left & 1:
            found = base if found is None else found * base
        base, left = base * base if left > 1 else base, left >> 1
    return integers(torch.ones_like(a.re)) if found is None else found


def sqrt(a: Num) -> Num:
    """A root. Of a square ``s * s`` it would be s or -s, each at half of all points: so where the
    kernel's roots are known, those alone are roots, and others are functions.
    """
    point = here()
    if point.draws_roots:
        point.roots.append(a)
        return Root(a, _sqrt(a)).value()
    if (known := of_kernel(a)) is not None:
        return Root(a, known).value()
    if (of_number := _of_number(a)) is not None:
        return of_number
    point.early |= not point.roots
    return Root(a, function("sqrt", a), is_function=True).value()


def of_kernel(a: Num) -> Num | None:
    """The root of what the kernel takes one of, of some small number of times that, or of their
    inverse.
    """
    point = here()
    if point.draws_roots:
        return None
    if any(is_whole_times(a, b, 1) for b in point.roots):
        return _sqrt(a)
    values = [a] if has_zeros(a) else [a, inverse(a)]
    for value in values:
        for b in point.roots:
            times = small_times(value, b)
            if times is not None:
                point.times.append(times)
                root = _sqrt(value if times == 1 else value * number(1 / times))
                found = root if times == 1 else root * _root_number(times)
                return found if value is a else inverse(found)
    return None


def _of_number(a: Num) -> Num | None:
    """The root of one small number, wherever it stands."""
    times = small_times(a, _scalar(1))
    if times is None:
        return None
    here().times.append(times)
    return _root_number(times).expand(a.shape)


def are_squares(a: Num) -> set[bool]:
    """Of elements of GF(p): of a square ``s * s``, and of so many of it, all are or none is."""
    is_square = _power(a.re, (P - 1) // 2) == 1
    return set(is_square.reshape(-1).tolist()) if _is_real(a) else {True, False}


def _root_number(square: Fraction) -> Num:
    root = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
    return number(root) if root * root == square else Literal(square, is_root=True).num()


@primitive
def _sqrt(a: Num) -> Num:
    return _root(a)


def _root(a: Num) -> Num:
    """Of GF(p) by a power, times i where there is none in GF(p). Elsewhere a function."""
    root = _power(a.re, _ROOT)
    is_square = _mod(root * root) == a.re
    zero = torch.zeros_like(root)
    other = zero if bool(is_square.all()) else _power(_mod(-a.re), _ROOT)
    re, im = torch.where(is_square, root, zero), torch.where(is_square, zero, other)
    if a.im is not None and bool(a.im.any()):
        named = function("sqrt", a)
        re, im = torch.where(a.im == 0, re, named.re), torch.where(a.im == 0, im, zero)
    return Num(re, im if bool(im.any()) else None)


@primitive
def total(a: Num, axes: Sequence[int], keep: bool) -> Num:
    if not axes:
        return a
    re = _mod(a.re.sum(tuple(axes), keepdim=keep))
    return Num(re, None if a.im is None else _mod(a.im.sum(tuple(axes), keepdim=keep)))


@primitive
def _matmul(a: Num, b: Num) -> Num:
    """The product of a row with a column of a weight is a function of both, of which no more is
    used than that it is linear in the row's size: so no weight need be drawn.
    """
    if b.cells is not None and a.cells is None:
        return _by_columns(a, b.cells)
    return _of_parts(_sums, a, b)


def _by_columns(a: Num, cells: Cells) -> Num:
    columns = cells.columns()
    if columns is None:
        return a @ Num(Num(None, cells=cells).re)
    first, step = (Num(part.unsqueeze(-2)) for part in columns)
    if a.as_rows is None:
        a.as_rows = _rows(a)
    row, size = a.as_rows
    found = function("product", first, step, row) * size
    is_zero = first.re == ZERO
    return found * Num((~is_zero).long()) if bool(is_zero.any()) else found


def _rows(a: Num) -> tuple[Num, Num]:
    """One element for each row, the same of rows that are multiples; and the size of each."""
    lead = a.moved(lambda part: part[..., :1])
    size = Num(torch.where(_are_zeros(lead), 1, lead.re), lead.im)
    places = Num(torch.arange(a.shape[-1], dtype=torch.int64))
    # places first: they are mixed once for all rows
    return total(function("row", places, a / size), [-1], True), size


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """By float64, whose sums of products of 16-bit halves are exact."""
    length, columns = b.shape[-2:]
    rows = a.shape[-2]
    halves = torch.cat((a & 0xFFFF, a >> 16), -2).double()
    step = max(64, _CHUNK // max(1, columns))
    found: list[Tensor] = [torch.zeros((), dtype=torch.int64)] * 2
    for start in range(0, length, step):
        part, left = b[..., start : start + step, :], halves[..., start : start + step]
        for place, half in enumerate((part & 0xFFFF, part >> 16)):
            found[place] = _mod(found[place] + (left @ half.double()).long())
    low, high = found
    ll, hl = low[..., :rows, :], low[..., rows:, :]
    lh, hh = high[..., :rows, :], high[..., rows:, :]
    middle = _mod(_mod(hl + lh) << 16)
    return _mod(ll + middle + _mod(_mod(_mod(hh << 16)) << 16))


# -- uninterpreted functions


@primitive
def function(name: str, *arguments: Num) -> Num:
    """One element for each element of the arguments, spread over each other; equal for equal
    arguments alone.
    """
    found = _start(name)
    for argument in arguments:
        im = argument.im
        found = _mixed(found, argument.re if im is None else im * P + argument.re)
    return Num((found & _POSITIVE).remainder(P))


@primitive
def label(*arguments: Num) -> Num:
    """One element that stands for all elements of the arguments, in order."""
    found = torch.zeros((), dtype=torch.int64)
    for argument in arguments:
        every = function("element", argument, _places(argument.shape)).re
        found = _mixed(found, _mod(every.sum()))
        found = _mixed(found, torch.tensor(_hash_of(str(argument.shape)), dtype=torch.int64))
    return Num((found & _POSITIVE).remainder(P))


def _places(shape: Sequence[int]) -> Num:
    return Num(torch.arange(math.prod(shape), dtype=torch.int64).reshape(tuple(shape)))


def random(name: str, shape: Sequence[int]) -> Num:
    """Generic elements, the same for the same name."""
    return leaf(name, _random(name, shape))


def leaf(name: str, value: Num, kind: str = "leaf") -> Num:
    """What is made of nothing; ``kind`` "weight": cells."""
    trace = here().trace
    if trace is not None:
        trace.enter(value, kind, (), list(value.shape), name)
    return value


def _random(name: str, shape: Sequence[int]) -> Num:
    found = _mixed(_start(name), _places(shape).re)
    return Num((found & _POSITIVE).remainder(P))


def of_both_signs(name: str, shape: Sequence[int], first: int, points: int) -> Num:
    """The same for an input of few elements: each is a square at some points, and at another it is
    none.

    ``sqrt(s * s)`` is s or -s; of a single number both have to be seen.
    """
    drawn = _random(name, shape).re
    places = torch.arange(first, first + drawn.numel(), dtype=torch.int64).reshape(drawn.shape)
    wanted = places % points != here().draw
    is_square = _power(drawn, (P - 1) // 2) == 1
    return leaf(name, Num(torch.where(is_square == wanted, drawn, _mod(-drawn))))


def _start(name: str) -> Tensor:
    return torch.tensor(_hash_of(f"{here().draw}:{name}"), dtype=torch.int64)


@cache
def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _mixed(state: Tensor, value: Tensor) -> Tensor:
    """One round of a 64-bit mixer; products of int64 wrap around."""
    found = (state ^ value).mul_(-7046029254386353131)
    found.bitwise_xor_((found >> 32).bitwise_and_(0xFFFFFFFF)).mul_(-4658895280553007687)
    return found.bitwise_xor_((found >> 29).bitwise_and_(0x7FFFFFFFF))
