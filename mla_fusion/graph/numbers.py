"""Exact numbers: a fraction times roots of primes.

A float literal of a graph stands for the number that was written: 1e-6, 1/1536, 192 ** -0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt, sqrt

import torch

Exponent = Fraction | int
_DENOMINATOR = 1 << 20  # of fractions that a float of 24 bits is looked for among
LEAST_BOUND = 1 << 10  # that a symbolic size is bound to
_SMOOTH = 128  # prime factors of sizes that somebody writes down are smaller
_TRIED = 10_000  # primes below it are taken out of a number; what is left stays whole


@lru_cache(maxsize=4096)
def is_rough(size: int) -> bool:
    """Has it a large prime factor?"""
    for factor in range(2, _SMOOTH):
        while size % factor == 0:
            size //= factor
    return size > 1


def is_open(size: int) -> bool:
    """Does it stand for a symbolic size, or a product of some?"""
    return size >= LEAST_BOUND and is_rough(size)


@dataclass(frozen=True, eq=False)
class Number:
    """``ratio`` times the primes in ``roots``, each to its exponent between 0 and 1."""

    ratio: Fraction
    roots: tuple[tuple[int, Fraction], ...] = ()

    # much is asked whether it is 1: these are quicker than those of Fraction

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Number):
            return NotImplemented
        same = self.ratio.as_integer_ratio() == other.ratio.as_integer_ratio()
        return same and self.roots == other.roots

    def __hash__(self) -> int:
        return hash((self.ratio.as_integer_ratio(), self.roots))

    def __mul__(self, other: Number) -> Number:
        if other is ONE:
            return self
        if self is ONE:
            return other
        if not (self.roots or other.roots):
            return Number(self.ratio * other.ratio)
        ratio, roots = self.ratio * other.ratio, dict[int, Fraction]()
        for prime, exponent in (*self.roots, *other.roots):
            total = roots.pop(prime, Fraction(0)) + exponent
            whole = total.numerator // total.denominator
            ratio *= Fraction(prime) ** whole
            if total != whole:
                roots[prime] = total - whole
        return Number(ratio, tuple(sorted(roots.items())) if ratio else ())

    def power(self, exponent: Exponent) -> Number | None:
        """None for 0 to a power below 0, and for a root of what is below 0."""
        return self if exponent == 1 or self is ONE else _power(self, Fraction(exponent))

    def __float__(self) -> float:
        found = float(self.ratio)
        for prime, exponent in self.roots:
            found *= prime ** float(exponent)
        return found

    @property
    def is_power_of_two(self) -> bool:
        """Is it that, or minus that? A product with it is exact in every float."""
        if self.roots or not self.ratio:
            return False
        top, bottom = abs(self.ratio.numerator), self.ratio.denominator
        return not (top & (top - 1) or bottom & (bottom - 1))


@lru_cache(maxsize=4096)
def _power(base: Number, exponent: Fraction) -> Number | None:
    if base.ratio == 0:
        return base if exponent > 0 else None
    if exponent.denominator == 1:
        result = Number(base.ratio ** int(exponent))
    elif base.ratio < 0:
        return None
    else:
        result = ONE
        for whole, sign in ((base.ratio.numerator, 1), (base.ratio.denominator, -1)):
            for prime, times in _factors(whole).items():
                result *= _root(prime, exponent * times * sign)
    for prime, own in base.roots:
        result *= _root(prime, own * exponent)
    return result


def _root(prime: int, exponent: Fraction) -> Number:
    whole = exponent.numerator // exponent.denominator
    rest = exponent - whole
    return Number(Fraction(prime) ** whole, ((prime, rest),) if rest else ())


@lru_cache(maxsize=4096)
def _factors(number: int) -> dict[int, int]:
    """Primes, and how often; a large rest stays whole, unless it is a square."""
    found, prime = dict[int, int](), 2
    while prime * prime <= number and prime < _TRIED:
        while number % prime == 0:
            found[prime] = found.get(prime, 0) + 1
            number //= prime
        prime += 1
    if number > 1:
        root = isqrt(number)
        is_square = root * root == number
        key = root if is_square else number
        found[key] = found.get(key, 0) + (2 if is_square else 1)
    return found


ONE, ZERO, MINUS_ONE = Number(Fraction(1)), Number(Fraction(0)), Number(Fraction(-1))


def number(of: Exponent) -> Number:
    return Number(Fraction(of))


@lru_cache(maxsize=4096)
def literal(given: float, dtype: torch.dtype = torch.float64) -> Number:
    """The number that a literal stands for; ``dtype`` is what holds it."""
    if isinstance(given, (int, bool)):
        return Number(Fraction(int(given)))
    if dtype == torch.float64 and torch.tensor(given, dtype=torch.float32).item() == given:
        dtype = torch.float32  # it was rounded before

    def is_held(value: float) -> bool:
        return bool(torch.tensor(value, dtype=dtype).item() == given)

    shortest = Fraction(repr(given))
    rounded = Fraction(f"{given:.7g}")
    close = Fraction(given).limit_denominator(_DENOMINATOR)
    for found in (shortest, close, rounded) if given else (shortest,):
        small = min(abs(found.numerator), found.denominator) <= 2 * _DENOMINATOR
        if small and is_held(float(found)):
            return Number(found)
    square = Fraction(given * given).limit_denominator(1 << 16)
    if square > 0 and is_held(sqrt(square)):
        root = Number(square).power(Fraction(1, 2))
        assert root is not None
        return root if given > 0 else root * MINUS_ONE
    return Number(Fraction(given))
