"""The field: whole numbers modulo P, as int64 tensors.

Sums, products, quotients and whole powers are exact. A root is a function of its radicand whose
power is known; anything else is a hash of its name and what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from mla_fusion.graph.numbers import Number, literal

P = (1 << 31) - 1


def times(one: Tensor, other: Tensor) -> Tensor:
    return one * other % P


def power(value: Tensor, exponent: int) -> Tensor:
    exponent %= P - 1
    found = torch.ones_like(value)
    while exponent:
        if exponent & 1:
            found = times(found, value)
        exponent >>= 1
        if exponent:
            value = times(value, value)
    return found


def root(value: Tensor, exponent: Fraction, seed: int) -> Tensor:
    """``value`` to a power that is no whole number."""
    whole = exponent.numerator // exponent.denominator
    rest = exponent - whole
    if rest == 0:
        return power(value, whole)
    radical = hashed(word(seed, "root", rest.denominator), value)
    found = power(radical, rest.numerator)
    return times(found, power(value, whole)) if whole else found


def fraction(of: Fraction) -> int:
    return of.numerator % P * pow(of.denominator, -1, P) % P


def number(of: Number, seed: int) -> int:
    found = fraction(of.ratio)
    for prime, exponent in of.roots:
        radical = word(seed, "root of", prime, exponent.denominator) % P
        found = found * pow(radical, exponent.numerator, P) % P
    return found


def exact(tensor: Tensor, seed: int) -> Tensor:
    """Literals, each as the number that it stands for."""
    if not tensor.is_floating_point():
        return tensor.long() % P
    values, places = tensor.double().unique(return_inverse=True)
    found = [number(literal(value, tensor.dtype), seed) for value in values.tolist()]
    return torch.tensor(found, dtype=torch.int64)[places].reshape(tensor.shape)


@lru_cache(maxsize=1 << 14)
def word(*key: object) -> int:
    """Of names and literals, 47 bits."""
    text = repr(key).encode()
    return int.from_bytes(blake2b(text, digest_size=6).digest(), "big") >> 1


def mixed(value: Tensor) -> Tensor:
    """A hash of each element, in the field (the finaliser of splitmix64)."""
    value = value * -7046029254386353131
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return ((value ^ ((value >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFF) % P


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


def powers(base: int, exponents: Tensor) -> Tensor:
    """A number to each of many exponents, all of them at least 0."""
    found, square = torch.ones_like(exponents), base
    most = int(exponents.max()) if exponents.numel() else 0
    for bit in range(most.bit_length()):
        has_bit = (exponents >> bit) & 1 == 1
        found = torch.where(has_bit, found * square % P, found)
        square = square * square % P
    return found


def product(left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices, in halves of 16 bits that float64 adds up exactly."""
    low, high = (left & 0xFFFF).double(), (left >> 16).double()
    other_low, other_high = (right & 0xFFFF).double(), (right >> 16).double()

    def part(one: Tensor, other: Tensor) -> Tensor:
        return (one @ other).long() % P

    crossed = part(low, other_high) + part(high, other_low)
    found = part(low, other_low) + crossed % P * 65536
    return (found + part(high, other_high) * 65536 % P * 65536) % P
