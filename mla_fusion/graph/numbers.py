"""Exact numbers: a fraction times roots of primes.

``Form`` uses them as coefficients. A float literal of a graph stands for the number that was
written: 1e-6, 1/1536, 192 ** -0.5. ``literal`` finds it.

Symbolic sizes are bound to numbers with a large prime factor. ``is_open`` tells these from the
sizes that a model writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import isqrt, sqrt

import torch

Exponent = Fraction | int
_DENOMINATOR = 1 << 20  # greatest denominator tried for a float
LEAST_BOUND = 1 << 10  # least number that a symbolic size is bound to
_SMOOTH = 128  # sizes that a model writes have smaller prime factors
_TRIED = 10_000  # primes below it are factored out of a number; the cofactor is not factored


@lru_cache(maxsize=4096)
def is_rough(size: float) -> bool:
    """True if the size has a prime factor of ``_SMOOTH`` or more."""
    for factor in range(2, _SMOOTH):
        while size % factor == 0:
            size //= factor
    return size > 1


def is_open(size: float) -> bool:
    """True if the number stands for a symbolic size, or for a product of symbolic sizes."""
    return size >= LEAST_BOUND and is_rough(size)


@dataclass(frozen=True, eq=False)
class Number:
    """``ratio`` times the primes in ``roots``, each to its exponent between 0 and 1."""

    ratio: Fraction
    roots: tuple[tuple[int, Exponent], ...] = ()

    # numbers are often compared with 1: this is quicker than Fraction's comparison and hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Number):
            return NotImplemented
        has_same_ratio = self.ratio.as_integer_ratio() == other.ratio.as_integer_ratio()
        return has_same_ratio and self.roots == other.roots

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.ratio.as_integer_ratio(), self.roots))

    def __mul__(self, other: Number) -> Number:
        if other is ONE:
            return self
        if self is ONE:
            return other
        ratio, roots = self.ratio * other.ratio, dict[int, Exponent]()
        for prime, exponent in (*self.roots, *other.roots):
            total = roots.pop(prime, 0) + exponent
            integer_part = total.numerator // total.denominator
            ratio *= Fraction(prime) ** integer_part
            if total != integer_part:
                roots[prime] = total - integer_part
        return Number(ratio, tuple(sorted(roots.items())) if ratio else ())

    def power(self, exponent: Exponent) -> Number | None:
        """The number to an exponent. None for 0 to a negative power, and for a root of a
        negative number.
        """
        return self if exponent == 1 or self is ONE else _power(self, exponent)

    @property
    def inverse(self) -> Number:
        """One divided by the number. Raises ZeroDivisionError for 0."""
        result = self.power(-1)
        if result is None:
            raise ZeroDivisionError(self)
        return result

    def __float__(self) -> float:
        result = float(self.ratio)
        for prime, exponent in self.roots:
            result *= prime ** float(exponent)
        return result

    @property
    def is_power_of_two(self) -> bool:
        """True for a power of two and its negative: a product with it is exact in every float
        dtype.
        """
        if self.roots or not self.ratio:
            return False
        top, bottom = abs(self.ratio.numerator), self.ratio.denominator
        return not (top & (top - 1) or bottom & (bottom - 1))


@lru_cache(maxsize=4096)
def _power(base: Number, exponent: Exponent) -> Number | None:
    """``Number.power`` for any exponent."""
    if base.ratio == 0:
        return base if exponent > 0 else None
    if exponent.denominator == 1:
        result = Number(base.ratio ** int(exponent))
    elif base.ratio < 0:
        return None
    else:
        result = ONE
        for integer, sign in ((base.ratio.numerator, 1), (base.ratio.denominator, -1)):
            for prime, times in _factors(integer).items():
                result *= _root(prime, exponent * times * sign)
    for prime, root_exponent in base.roots:
        result *= _root(prime, root_exponent * exponent)
    return result


def _root(prime: int, exponent: Exponent) -> Number:
    """A prime to an exponent, its integer part as the ratio."""
    integer_part = exponent.numerator // exponent.denominator
    fraction_part = exponent - integer_part
    return Number(
        Fraction(prime) ** integer_part, ((prime, fraction_part),) if fraction_part else ()
    )


@lru_cache(maxsize=4096)
def _factors(number: int) -> dict[int, int]:
    """The prime factors of a number with their exponents. A large cofactor counts as one factor."""
    exponents, prime = dict[int, int](), 2
    while prime * prime <= number and prime < _TRIED:
        while number % prime == 0:
            exponents[prime] = exponents.get(prime, 0) + 1
            number //= prime
        prime += 1
    if number > 1:
        root = isqrt(number)
        is_square = root * root == number
        key = root if is_square else number
        exponents[key] = exponents.get(key, 0) + (2 if is_square else 1)
    return exponents


ONE, ZERO, MINUS_ONE = Number(Fraction(1)), Number(Fraction(0)), Number(Fraction(-1))


def number(ratio: Exponent) -> Number:
    """The Number of an integer or a fraction."""
    return Number(Fraction(ratio))


@lru_cache(maxsize=4096)
def literal(value: float, dtype: torch.dtype | None = None) -> Number:
    """The number that a literal of a graph stands for.

    value  the literal as a float
    dtype  the dtype that rounded it; None: float32, if it is a number of float32, else float64

    It is the first of these that rounds to the literal: the shortest decimal, a fraction with a
    small denominator, seven digits, a square root of a fraction. Otherwise it is the float itself.
    """
    if isinstance(value, (int, bool)):
        return Number(Fraction(int(value)))
    if dtype is None:
        is_narrow = torch.tensor(value, dtype=torch.float32).item() == value
        dtype = torch.float32 if is_narrow else torch.float64

    def is_rounded_to_literal(candidate: float) -> bool:
        """True if the dtype rounds a number to the literal."""
        return bool(torch.tensor(candidate, dtype=dtype).item() == value)

    shortest_decimal = Fraction(repr(value))
    seven_digits = Fraction(f"{value:.7g}")
    fraction = Fraction(value).limit_denominator(_DENOMINATOR)
    for candidate in (shortest_decimal, fraction, seven_digits):
        is_simple = min(abs(candidate.numerator), candidate.denominator) <= 2 * _DENOMINATOR
        if is_simple and is_rounded_to_literal(float(candidate)):
            return Number(candidate)
    square = Fraction(value * value).limit_denominator(1 << 16)
    if square > 0 and is_rounded_to_literal(sqrt(square)):
        root = Number(square).power(Fraction(1, 2))
        assert root is not None
        return root if value > 0 else root * MINUS_ONE
    return Number(Fraction(value))
