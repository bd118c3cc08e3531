"""A field: whole numbers modulo a prime, as int64 tensors. Each point has a prime of its own: a
literal that is 0 or 1 modulo one of them is neither at the others.

Sums, products, quotients and whole powers are exact. A root is a function of its radicand whose
power is known; anything else is a hash of its name and what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from mla_fusion.graph.numbers import Number, literal


@dataclass(frozen=True)
class Point:
    """
    seed  of all that is drawn
    p     the prime, below 2 ** 31: products of two elements fit int64
    """

    seed: int
    p: int


# the first primes from 10 ** 9 times the roots of 2 and 3 and the golden ratio
_PRIMES = 1414213573, 1732050821, 1618033999
POINTS = tuple(Point(seed, p) for seed, p in enumerate(_PRIMES))
_LEAST = min(_PRIMES)  # what is drawn is below it: an element at every point


def power(value: Tensor, exponent: int, p: int) -> Tensor:
    exponent %= p - 1
    found = torch.ones_like(value)
    while exponent:
        if exponent & 1:
            found = found * value % p
        exponent >>= 1
        if exponent:
            value = value * value % p
    return found


def root(value: Tensor, exponent: Fraction, at: Point) -> Tensor:
    """``value`` to a power that is no whole number."""
    whole = exponent.numerator // exponent.denominator
    rest = exponent - whole
    if rest == 0:
        return power(value, whole, at.p)
    radical = hashed(word(at.seed, "root", rest.denominator), value)
    found = power(radical, rest.numerator, at.p)
    return found * power(value, whole, at.p) % at.p if whole else found


def fraction(of: Fraction, p: int) -> int:
    return of.numerator % p * pow(of.denominator, -1, p) % p


def number(of: Number, at: Point) -> int:
    found = fraction(of.ratio, at.p)
    for prime, exponent in of.roots:
        radical = word(at.seed, "root of", prime, exponent.denominator) % at.p
        found = found * pow(radical, exponent.numerator, at.p) % at.p
    return found


def exact(tensor: Tensor, at: Point) -> Tensor:
    """Literals, each as the number that it stands for."""
    if not tensor.is_floating_point():
        return tensor.long() % at.p
    values, places = tensor.double().unique(return_inverse=True)
    found = [number(literal(value, tensor.dtype), at) for value in values.tolist()]
    return torch.tensor(found, dtype=torch.int64)[places].reshape(tensor.shape)


@lru_cache(maxsize=1 << 14)
def word(*key: object) -> int:
    """Of names and literals, 47 bits."""
    text = repr(key).encode()
    return int.from_bytes(blake2b(text, digest_size=6).digest(), "big") >> 1


def mixed(value: Tensor) -> Tensor:
    """A hash of each element (the finaliser of splitmix64)."""
    value = value * -7046029254386353131
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return ((value ^ ((value >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFF) % _LEAST


def hashed(name: int, *values: Tensor) -> Tensor:
    """A function of its operands, element by element."""
    found = torch.tensor(name, dtype=torch.int64)
    for value in values:
        found = mixed(found + mixed(value + found))
    return found


def drawn(name: int, places: Tensor) -> Tensor:
    """Random elements by their places."""
    return mixed(places + name)


def random(name: int, shape: Iterable[int]) -> Tensor:
    shape = tuple(shape)
    return drawn(name, torch.arange(prod(shape))).reshape(shape)


def powers(base: int, exponents: Tensor, p: int) -> Tensor:
    """A number to each of many exponents, all of them at least 0."""
    found, square = torch.ones_like(exponents), base
    most = int(exponents.max()) if exponents.numel() else 0
    for bit in range(most.bit_length()):
        has_bit = (exponents >> bit) & 1 == 1
        found = torch.where(has_bit, found * square % p, found)
        square = square * square % p
    return found


def product(left: Tensor, right: Tensor, p: int) -> Tensor:
    """A product of matrices, in halves of 16 bits that float64 adds up exactly."""
    low, high = (left & 0xFFFF).double(), (left >> 16).double()
    other_low, other_high = (right & 0xFFFF).double(), (right >> 16).double()

    def part(one: Tensor, other: Tensor) -> Tensor:
        return (one @ other).long() % p

    crossed = part(low, other_high) + part(high, other_low)
    found = part(low, other_low) + crossed % p * 65536
    return (found + part(high, other_high) * 65536 % p * 65536) % p
