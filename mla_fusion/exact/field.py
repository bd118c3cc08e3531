"""Arithmetic in finite fields: integers modulo a prime, as int64 tensors.

``exact/evaluate.py`` computes Values with it. A point has a seed for its random elements and a
prime of its own. So a literal that is 0 or 1 modulo one prime is another number at the other
points.

Sums, products, quotients and integer powers are exact. A root is a function of its radicand, and
its power is the radicand. Any other function is a hash of its name and its operands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import isfinite, prod

import torch
from torch import Tensor

from mla_fusion.graph.numbers import Number, literal


@dataclass(frozen=True)
class Point:
    """A point at which Values are evaluated.

    seed  of all random elements
    p     the prime, below 2 ** 31: the product of two elements fits int64
    """

    seed: int
    p: int


# the first primes from 10 ** 9 times the roots of 2 and 3 and the golden ratio
_PRIMES = 1414213573, 1732050821, 1618033999
POINTS = tuple(Point(seed, p) for seed, p in enumerate(_PRIMES))
_LEAST = min(_PRIMES)  # random elements are below it, so they are elements at every point


def power(value: Tensor, exponent: int, p: int) -> Tensor:
    """Each element to an integer power; a negative one inverts it."""
    exponent %= p - 1
    result = torch.ones_like(value)
    while exponent:
        if exponent & 1:
            result = result * value % p
        exponent >>= 1
        if exponent:
            value = value * value % p
    return result


def root(value: Tensor, exponent: Fraction, point: Point) -> Tensor:
    """Each element to a rational power."""
    integer_part = exponent.numerator // exponent.denominator
    fraction_part = exponent - integer_part
    if fraction_part == 0:
        return power(value, integer_part, point.p)
    radical = hashed(word(point.seed, "root", fraction_part.denominator), value)
    result = power(radical, fraction_part.numerator, point.p)
    return result * power(value, integer_part, point.p) % point.p


def fraction(ratio: Fraction, p: int) -> int:
    """The field's element that a fraction is."""
    return ratio.numerator % p * pow(ratio.denominator, -1, p) % p


def number(value: Number, point: Point) -> int:
    """The field's element that a Number is."""
    element = fraction(value.ratio, point.p)
    for prime, exponent in value.roots:
        radical = word(point.seed, "root of", prime, exponent.denominator) % point.p
        element = element * pow(radical, exponent.numerator, point.p) % point.p
    return element


def elements_of(tensor: Tensor, point: Point) -> Tensor:
    """A tensor of literals as elements: each float is the number that it stands for.

    Infinity and NaN are numbers of which nothing is known.
    """
    if not tensor.is_floating_point():
        return tensor.long() % point.p
    values, places = tensor.double().unique(return_inverse=True)
    elements = [
        number(literal(value, tensor.dtype), point)
        if isfinite(value)
        else word(point.seed, value) % point.p
        for value in values.tolist()
    ]
    return torch.tensor(elements, dtype=torch.int64)[places].reshape(tensor.shape)


@lru_cache(maxsize=1 << 14)
def word(*key: object) -> int:
    """A hash of 47 bits of names and literals."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=6).digest(), "big") >> 1


def mix_bits(value: Tensor) -> Tensor:
    """A hash of each element (the finaliser of splitmix64)."""
    value = value * -7046029254386353131
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return ((value ^ ((value >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFF) % _LEAST


def hashed(name: int, *values: Tensor) -> Tensor:
    """A function of its operands, element by element."""
    digest = torch.tensor(name, dtype=torch.int64)
    for value in values:
        digest = mix_bits(digest + mix_bits(value + digest))
    return digest


def random_at(name: int, places: Tensor) -> Tensor:
    """Random elements: a function of the name and of each place."""
    return mix_bits(places + name)


def random(name: int, shape: Iterable[int]) -> Tensor:
    """Random elements of a shape."""
    shape = tuple(shape)
    return random_at(name, torch.arange(prod(shape))).reshape(shape)


def powers(bases: Tensor, exponents: Tensor, p: int) -> Tensor:
    """Each base [k, 1] to each of many non-negative exponents [n]: [k, n].

    Eight bits of the exponents are looked up at a time, in a table of 256 powers of each base.
    """
    result = torch.ones(len(bases), len(exponents), dtype=torch.int64)
    while exponents.any():
        table = torch.ones_like(bases)
        for _ in range(8):
            table = torch.cat((table, table * bases % p), 1)
            bases = bases * bases % p
        result = result * table[:, exponents & 255] % p
        exponents = exponents >> 8
    return result


def product(left: Tensor, right: Tensor, p: int) -> Tensor:
    """A product of matrices, computed in halves of 16 bits whose sums float64 holds exactly."""
    left_low, left_high = (left & 0xFFFF).double(), (left >> 16).double()
    right_low, right_high = (right & 0xFFFF).double(), (right >> 16).double()

    def part(left_half: Tensor, right_half: Tensor) -> Tensor:
        return (left_half @ right_half).long() % p

    middle = part(left_low, right_high) + part(left_high, right_low)
    total = part(left_low, right_low) + middle % p * 65536
    return (total + part(left_high, right_high) * 65536 % p * 65536) % p
