"""Checks the certificates of a report, with Python's own library and numpy: no torch, nothing of
the pass.

``mla-fusion check-proof report.json``, or this file alone: ``python check.py report.json``.

A certificate lists values, each made of earlier ones. It says which of them are the kernel's
arguments, and which of the kernel's results replaces which value. The values, and a definition of
the kernel written from its documents, are evaluated at random points of GF(p^2). Prime and points
are drawn anew in each run. What is claimed to be equal must be so. A certificate is data, perhaps
false: what is not as it should be is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
# have roots, as 2 has: roots of products of sizes are products of roots
ROOTS = (3, 5, 7, 11, 13, 17, 19, 23, 29)
POINTS, MOST_POINTS, DEGREE = 3, 60, 10_000  # no identity that is tested is of such a degree
MOST_BYTES, MOST_VALUES = 1 << 28, 1 << 15  # of a report, of a certificate
LARGEST, LARGEST_WEIGHT = 1 << 25, 1 << 32  # elements of a value; a weight need not be drawn
MOST, MOST_PRODUCTS = 1 << 27, 1 << 35  # elements of a point, of a product that is computed
# the largest epsilon that may stand for a floor; signs of a root that must have been seen
FLOOR, BITS = 1e-20, 53


def _drawn_prime() -> int:
    """A prime of 31 bits, 7 mod 8, that nobody knows who writes a certificate: 1 and 1 + prime are
    one number in it.
    """
    while True:
        number = int.from_bytes(os.urandom(4), "big") >> 2 | 1 << 30 | 7
        if all(pow(root, (number - 1) // 2, number) == 1 for root in ROOTS) and _is_prime(number):
            return number


def _is_prime(number: int) -> bool:
    """Of odd numbers below 2^32, 3 mod 4 (Miller and Rabin, by the bases that suffice there)."""
    return all(pow(base, (number - 1) // 2, number) in (1, number - 1) for base in (2, 3, 5, 7))


PRIME = _drawn_prime()
P = np.uint64(PRIME)
Array = NDArray[np.uint64]
Places = NDArray[np.int64]


class Refused(Exception):
    """Why a certificate is not accepted."""


class NoReport(Exception):
    """Why a file is no report."""


@dataclass(frozen=True)
class Num:
    """Elements ``re + im * i``; no ``im``: all of GF(p)."""

    re: Array
    im: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.re.shape

    @property
    def i(self) -> Array:
        return np.zeros_like(self.re) if self.im is None else self.im

    def map(self, move: Callable[[Array], Array]) -> Num:
        return Num(move(self.re), None if self.im is None else move(self.im))

    def reshape(self, *shape: int) -> Num:
        return self.map(lambda part: part.reshape(shape))

    def __getitem__(self, where: Any) -> Num:
        return self.map(lambda part: part[where])

    def __add__(self, b: Num) -> Num:
        return Num(
            (self.re + b.re) % P, None if self.im is None and b.im is None else (self.i + b.i) % P
        )

    def __neg__(self) -> Num:
        return self.map(lambda part: (P - part) % P)

    def __mul__(self, b: Num) -> Num:
        re = self.re * b.re % P
        if self.im is None and b.im is None:
            return Num(re)
        return Num((re + P - self.i * b.i % P) % P, (self.re * b.i % P + self.i * b.re % P) % P)

    def inverse(self) -> Num:
        if self.im is None:
            return Num(power(self.re, PRIME - 2))
        norm = power((self.re * self.re % P + self.im * self.im % P) % P, PRIME - 2)
        return Num(self.re * norm % P, (P - self.im) % P * norm % P)

    def total(self, axes: Sequence[int] = (-1,), keep: bool = True) -> Num:
        return self.map(lambda part: part.sum(axis=tuple(axes), keepdims=keep, dtype=np.uint64) % P)

    def is_zero(self) -> NDArray[np.bool_]:
        return (self.re == 0) & (self.i == 0)

    def same(self, b: Num) -> bool:
        return bool((self + -b).is_zero().all())


def of(number: Fraction | int) -> Num:
    if number.denominator % PRIME == 0 or (number and number.numerator % PRIME == 0):
        raise Refused("a number that has no value in this field")
    return Num(
        np.array(number.numerator * pow(number.denominator, -1, PRIME) % PRIME, dtype=np.uint64)
    )


def power(a: Array, exponent: int) -> Array:
    found = np.ones_like(a)
    for bit in f"{exponent:b}":
        found = found * found % P
        found = found * a % P if bit == "1" else found
    return found


def product(a: Array, b: Array) -> Array:
    """Of matrices, by float64, in which sums of products of 16-bit halves are exact."""
    found, low, shift = np.array(0, np.uint64), np.uint64(0xFFFF), np.uint64(16)
    for start in range(0, a.shape[-1], 1 << 12):
        halves = a[..., start : start + (1 << 12)], b[..., start : start + (1 << 12), :]
        (a1, a0), (b1, b0) = (((m >> shift).astype(float), (m & low).astype(float)) for m in halves)
        hh, hl, ll = (
            (part % PRIME).astype(np.uint64) for part in (a1 @ b1, a1 @ b0 + a0 @ b1, a0 @ b0)
        )
        found = (found + (((hh << shift) + hl) % P << shift) + ll) % P
    return found


def joined(parts: Sequence[Num], axis: int = -1) -> Num:
    im = (
        None
        if all(part.im is None for part in parts)
        else np.concatenate([part.i for part in parts], axis)
    )
    return Num(np.concatenate([part.re for part in parts], axis), im)


@dataclass
class Weight:
    """Elements of weights that are only moved about: which element of which each is, -1 for a zero.

    cells  the numbers of the elements at places in flat order
    line   where known: the number is ``line[0]`` and on each axis ``line[1]`` times the place
    """

    shape: tuple[int, ...]
    cells: Callable[[Places], Places]
    line: tuple[int, Sequence[int]] | None = None

    @cached_property
    def columns(self) -> tuple[Places, Places] | None:
        """Of [.., k, n] whose columns are elements a step apart: the first and the step of each."""
        *lead, count, width = self.shape
        grid = [*lead, 1, width]
        if self.line is not None:
            return walk(grid, self.line[0], grid, self.line[1]), np.full(grid, self.line[1][-2])
        places = walk(grid, 0, grid, contiguous(self.shape))
        first = self.cells(places)
        step = self.cells(places + width) - first if count > 1 else first
        many = max(1, (1 << 18) // first.size)
        for row in range(2, count, many):
            rows = np.arange(row, min(row + many, count)).reshape(-1, *(1,) * first.ndim)
            if not np.array_equal(self.cells(places + rows * width), first + rows * step):
                return None
        return None if count < 2 or bool(((first == -1) & (step != 0)).any()) else (first, step)


Value = Num | Weight


# -- what is read of a certificate


def contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def whole(item: Any, least: int = 0, most: int = 1 << 32) -> int:
    if type(item) is not int or not least <= item <= most:
        raise Refused(f"{str(item)[:40]} is no number from {least} to {most}")
    return item


def sizes_of(item: Any, most: int = LARGEST) -> tuple[int, ...]:
    found = tuple(whole(size, 1) for size in item)
    if len(found) > 16 or math.prod(found) > most:
        raise Refused("a value is too large")
    return found


def steps_of(size: int, stride: Any) -> Places:
    """Along an axis: by a stride, or each by itself."""
    return np.arange(size) * stride if type(stride) is int else np.array(stride, dtype=np.int64)


def inside(first: Any, sizes: Any, strides: Any, low: int, high: int) -> None:
    """Raises Refused where strides along sizes leave low .. high - 1."""
    least = most = whole(first, low, high)
    for size, stride in zip(sizes, strides, strict=True):
        each = [0, (whole(size, 1) - 1) * stride] if type(stride) is int else stride
        if any(type(step) is not int for step in each) or len(each) != (
            2 if type(stride) is int else size
        ):
            raise Refused("a move of other sizes than it says")
        least, most = least + min(each), most + max(each)
    if least < low or most >= high:
        raise Refused("a move from outside of its operand")


def walk(shape: Any, first: int, sizes: Any, strides: Any) -> Places:
    """Numbers from a first one, by strides along sizes."""
    sizes_of(sizes)
    found = np.array(first, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        found = found[..., None] + steps_of(size, stride)
    return found.reshape(sizes_of(shape))


def fraction(exact: Any, written: Any = None, is_root: bool = False) -> Fraction:
    """What stands for the number that was written, or what that is the root of."""
    if type(exact) is not str or re.fullmatch(r"-?\d{1,330}(/[1-9]\d{0,329})?", exact) is None:
        raise Refused(f"{str(exact)[:40]} is no fraction")
    found = Fraction(exact)
    number = math.sqrt(found) if is_root else float(found)
    if written is not None and not abs(number - float(written)) <= 6e-8 * abs(float(written)):
        raise Refused(f"{exact} is not the number {written}")
    return found


# -- a point


class Point:
    """A random point of the field. Its rules, by name, are given their operands and what else
    stands in an entry.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed, self._cells = seed, 0
        self.roots: list[Num] = []  # what roots were drawn of

    def hashed(self, name: str, *arguments: Any) -> Num:
        digest = hashlib.blake2b(name.encode(), key=self._seed, digest_size=8).digest()
        found = np.array(int.from_bytes(digest, "little"), dtype=np.uint64)
        for part in arguments:
            with np.errstate(over="ignore"):  # it wraps around
                found = (found ^ np.asarray(part).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
                found = (found ^ (found >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
            found = found ^ (found >> np.uint64(29))
        return Num((found >> np.uint64(3)) % P)

    def drawn(self, value: Value) -> Num:
        if isinstance(value, Num):
            return value
        numbers = value.cells(np.arange(math.prod(sizes_of(value.shape)))).reshape(value.shape)
        return Num(np.where(numbers == -1, np.uint64(0), self.hashed("cell", numbers).re))

    def leaf(self, name: str, shape: Any) -> Num:
        return self.hashed(name, np.arange(math.prod(sizes_of(shape))).reshape(shape))

    def weight(self, shape: Any, name: Any) -> Weight:
        found, first = sizes_of(shape, LARGEST_WEIGHT), self._cells
        self._cells += math.prod(found)
        return Weight(found, lambda places: places + first, (first, contiguous(found)))

    def zeros(self, shape: Any) -> Weight:
        return Weight(sizes_of(shape, LARGEST_WEIGHT), lambda places: np.full_like(places, -1))

    def number(self, exact: Any, written: Any) -> Num:
        return of(fraction(exact, written))

    def root(self, exact: Any, written: Any) -> Num:
        return Point(b"").sqrt(of(fraction(exact, written, True)))

    def integers(self, shape: Any, first: Any, sizes: Any, strides: Any) -> Num:
        inside(first, sizes, strides, -(1 << 60), 1 << 60)
        return Num((walk(shape, first, sizes, strides) % PRIME).astype(np.uint64))

    def sqrt(self, a: Num) -> Num:
        """A root in GF(p), times i where there is none; of what is not in GF(p) a function."""
        self.roots.append(a)
        found, other = power(a.re, (PRIME + 1) // 4), power((P - a.re) % P, (PRIME + 1) // 4)
        is_square, is_real = found * found % P == a.re, a.i == 0
        re, im = np.where(is_square, found, 0), np.where(is_square | ~is_real, 0, other)
        return Num(np.where(is_real, re, self.function(a, "sqrt").re), im)

    def function(self, *given: Any) -> Num:
        """An uninterpreted function, named last, element by element."""
        parts = (
            part for item in given[:-1] for part in (item.re, 0 if item.im is None else item.im)
        )
        return self.hashed(f"function {given[-1]}", *parts)

    def label(self, *arguments: Num) -> Num:
        """One element for all elements of the arguments, in order."""
        every = (
            self.hashed("element", a.re.reshape(-1), a.i.reshape(-1), np.arange(a.re.size))
            for a in arguments
        )
        return self.hashed(
            f"label {[a.shape for a in arguments]}", *(one.total((0,), False).re for one in every)
        )

    def total(self, a: Num, axes: Any, keep: Any) -> Num:
        return a.total([whole(axis, 0, len(a.shape) - 1) for axis in axes], bool(keep))

    def matmul(self, a: Value, b: Value) -> Num:
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            raise Refused(f"a product of {a.shape} and {b.shape}")
        found = sizes_of(
            (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        )
        if isinstance(a, Num) and isinstance(b, Weight) and b.columns is not None:
            return self._by_columns(a, *b.columns)
        if math.prod(found) * a.shape[-1] > MOST_PRODUCTS:
            raise Refused("a product is too large")
        a, b = map(self.drawn, (a, b))
        if a.im is None and b.im is None:
            return Num(product(a.re, b.re))
        im = (product(a.re, b.i) + product(a.i, b.re)) % P
        return Num((product(a.re, b.re) + P - product(a.i, b.i)) % P, im)

    def _by_columns(self, a: Num, first: Places, step: Places) -> Num:
        """Of a row and a column of a weight no more is used than that the product is linear in the
        row's size.
        """
        size = (a * self.leaf("size", a.shape[-1:])).total()
        size = Num(np.where(size.is_zero(), np.uint64(1), size.re), size.im)
        row = a * size.inverse()
        row = self.hashed("row", row.re, row.i, np.arange(a.shape[-1])).total()
        return (self.hashed("product", row.re, first, step) * size).map(
            lambda part: np.where(first == -1, 0, part)
        )

    def join(self, *given: Any) -> Value:
        *parts, axis = given
        shape, inner = list(parts[0].shape), math.prod(parts[0].shape[axis + 1 :])
        ends = np.cumsum([part.shape[axis] for part in parts])
        shape[whole(axis, 0, len(shape) - 1)] = int(ends[-1])
        if any(
            [*part.shape[:axis], shape[axis], *part.shape[axis + 1 :]] != shape for part in parts
        ):
            raise Refused("a join of other sizes")
        if not all(isinstance(part, Weight) for part in parts):
            sizes_of(shape)
            return joined([self.drawn(part) for part in parts], axis)

        def cells(places: Places) -> Places:
            outer, at = np.divmod(places, shape[axis] * inner)
            found = np.empty_like(places)
            for part, end in zip(parts, ends, strict=True):
                size = part.shape[axis] * inner
                within = at - (int(end) * inner - size)
                mine = (within >= 0) & (within < size)
                found[mine] = part.cells(outer[mine] * size + within[mine])
            return found

        return Weight(sizes_of(shape, LARGEST_WEIGHT), cells)

    def move(self, value: Value, shape: Any, first: Any, sizes: Any, strides: Any) -> Value:
        inside(first, sizes, strides, 0, math.prod(value.shape))
        if isinstance(value, Num):
            return value.reshape(-1)[walk(shape, first, sizes, strides)]
        shape, sizes = sizes_of(shape, LARGEST_WEIGHT), sizes_of(sizes, LARGEST_WEIGHT)
        if math.prod(shape) != math.prod(sizes):
            raise Refused("a move of other sizes than it says")

        def cells(places: Places) -> Places:
            found = np.full_like(places, first)
            for size, stride in reversed(list(zip(sizes, strides, strict=True))):
                places, rest = np.divmod(places, size)
                found += rest * stride if type(stride) is int else steps_of(size, stride)[rest]
            return value.cells(found)

        whole_leaf = value.line is not None and value.line[1] == contiguous(value.shape)
        is_line = whole_leaf and sizes == shape and all(type(stride) is int for stride in strides)
        return Weight(
            shape, cells, (value.line[0] + first, strides) if value.line and is_line else None
        )


ARITHMETIC = {"add": Num.__add__, "mul": Num.__mul__, "neg": Num.__neg__, "inverse": Num.inverse}
ELEMENTWISE = (*ARITHMETIC, "sqrt", "function")
# literal of literals
FIXED = (*ARITHMETIC, "number", "root", "integers", "sqrt", "total", "join", "move")
RULES = {*ELEMENTWISE, *FIXED, "label", "matmul", "weight", "zeros"}  # beside "leaf" and "result"


# -- the kernels, by their documents

INT8 = ("int8", 127)
# of rows, and what their largest becomes
FORMATS = {3: ("fp8", 448), 4: ("fp8", 448), 5: ("hifloat8", 32768)}


class Kernel:
    """A call: the definition of its operator."""

    def __init__(
        self, point: Point, given: dict[str, Value], attributes: dict[str, Any], floors: bool
    ) -> None:
        self.point, self.given, self.attributes, self._floors = point, given, attributes, floors
        self.read = set[str]()
        mode = attributes.get("weight_quant_mode", 0)
        self.in_blocks, (self.format, self.most) = mode == 3, FORMATS.get(mode, INT8)

    def weight(self, name: str) -> Value:
        self.read.add(name)
        return self.given[name]

    def take(self, name: str) -> Num:
        return self.point.drawn(self.weight(name))

    def epsilon(self, name: str) -> Num:
        """One far below any row may stand for a floor, where that is assumed."""
        item = self.attributes[name]
        if item["exact"] == "0" and self._floors and 0 < item["written"] <= FLOOR:
            return of(0)
        return self.point.number(item["exact"], item["written"])

    def scale(self, name: str) -> Num | None:
        """A number that the kernel multiplies by; None for 1."""
        item, point = self.attributes[name], self.point
        rule = point.root if "root" in item else point.number
        found = rule(item.get("root", item.get("exact")), item["written"])
        return None if abs(item["written"] - 1) < 2.0**-23 else found

    def norm(self, value: Num, gamma: str, epsilon: str | Fraction) -> Num:
        added = self.epsilon(epsilon) if isinstance(epsilon, str) else of(epsilon)
        mean = (value * value).total() * of(Fraction(1, value.shape[-1]))
        return value * self.point.sqrt(mean + added).inverse() * self.take(gamma)

    def rope(self, value: Num, cos: Num, sin: Num) -> Num:
        """Pairs in, halves out; the halves of the tables are not tied."""
        if not value.shape[-1] == cos.shape[-1] == sin.shape[-1]:
            raise Refused("tables of another width than what they rotate")
        half, even, odd = value.shape[-1] // 2, value[..., 0::2], value[..., 1::2]
        first = even * cos[..., :half] + -(odd * sin[..., :half])
        return joined([first, odd * cos[..., half:] + even * sin[..., half:]])

    def in_bytes(self, value: Num) -> Num:
        return self.point.function(value, self.format)

    def largest(self, rows: Num) -> Num:
        return self.point.function(
            self.point.function(rows * rows, "size").total(), "largest of row"
        )

    def by_row(self, rows: Num, largest: Num) -> tuple[Num, Num]:
        """Rows in bytes, and their steps."""
        return self.in_bytes(rows * of(self.most) * largest.inverse()), largest * of(
            self.most
        ).inverse()

    def by_block(self, rows: Num) -> tuple[Num, Num]:
        """Rows in mxfp8, and a power of two for each 32 neighbours."""
        blocks = rows.reshape(len(rows.re), -1, 32)
        powers = self.point.function(self.largest(blocks), "power of two")
        return self.point.function(blocks * powers.inverse(), "mxfp8").reshape(*rows.shape), powers[
            ..., 0
        ]

    def projected(self, rows: Num, name: str, step: Num | None) -> Num:
        weight = self.weight(f"weight_{name}")
        if step is None:
            return self.point.matmul(rows, weight)
        steps = self.take(f"dequant_scale_w_{name}")
        if self.format == "hifloat8":
            rows = self.point.function(rows, "of format 290")
        if not self.in_blocks:
            return self.point.matmul(rows, weight) * step * steps
        blocks = rows.reshape(len(rows.re), -1, 32) * step.reshape(len(rows.re), -1, 1)
        count, width = blocks.shape[1], weight.shape[1]
        weight = self.point.move(
            weight, [count, 32, width], 0, list(weight.shape), contiguous(weight.shape)
        )
        products = self.point.matmul(blocks.map(lambda part: part.swapaxes(0, 1)), weight)
        return (products * steps.map(lambda part: part.T[:, None])).total((0,), False)

    def prolog(self) -> dict[str, Num]:
        weights, caches = (
            self.attributes["weight_quant_mode"],
            self.attributes["kv_cache_quant_mode"],
        )
        if weights not in range(6) or caches not in (0, 1, 2, 3):
            raise Refused("a format that is not proved in exact arithmetic")
        x, uk = self.take("token_x"), self.weight("weight_uk")
        lead, (heads, nope, latent) = x.shape[:-1], uk.shape
        x, cos, sin = (
            v.reshape(-1, v.shape[-1]) for v in (x, self.take("rope_cos"), self.take("rope_sin"))
        )
        step, of_x = None, self.take("dequant_scale_x") if weights > 1 else None
        c_q = self.norm(self.projected(x, "dq", of_x), "rmsnorm_gamma_cq", "rmsnorm_epsilon_cq")
        times = self.scale("qc_qr_scale")
        scaled = c_q if times is None else c_q * times
        if weights and "smooth_scales_cq" in self.given:
            scaled = scaled * self.take("smooth_scales_cq")
            scaled, step = (
                self.by_block(scaled)
                if self.in_blocks
                else self.by_row(scaled, self.largest(scaled))
            )
        elif self.in_blocks:
            scaled, step = self.by_block(scaled)
        elif weights:  # a positive number goes through the largest
            scaled, step = self.by_row(
                scaled, self.largest(c_q) if times is None else self.largest(c_q) * times
            )
        query = self.projected(scaled, "uq_qr", step).reshape(len(x.re), heads, -1)
        absorbed = self.point.matmul(query[..., :nope].map(lambda part: part.swapaxes(0, 1)), uk)
        absorbed = absorbed.map(lambda part: part.swapaxes(0, 1))
        query_rope = self.rope(query[..., nope:], cos[:, None], sin[:, None])
        both = self.projected(x, "dkv_kr", of_x)
        ckv, kr = (
            self.norm(both[:, :latent], "rmsnorm_gamma_ckv", "rmsnorm_epsilon_ckv"),
            both[:, latent:],
        )
        times, kr, found = self.scale("kc_scale"), self.rope(kr, cos, sin), dict[str, Num]()
        ckv = ckv if times is None else ckv * times
        if caches == 1:
            scale = self.take("quant_scale_ckv").reshape(-1)[0]
            absorbed, of_query = self.by_row(absorbed, self.largest(absorbed))
            found["dequant_scale_q_nope"] = of_query
            query_rope, ckv = query_rope * (scale * of_query.inverse()), self.in_bytes(ckv * scale)
        elif caches == 2:
            ckv, kr = (
                self.in_bytes(v * self.take(f"quant_scale_{n}"))
                for v, n in ((ckv, "ckv"), (kr, "ckr"))
            )
        elif caches == 3:
            ckv = self.packed(ckv, kr)
        results = {"query": absorbed, "query_rope": query_rope, "query_norm": scaled}
        found |= {name: value.reshape(*lead, *value.shape[1:]) for name, value in results.items()}
        found |= {} if step is None else {"dequant_scale_q_norm": step}
        rows = [("kv_cache", "kv_cache", ckv), ("kr_cache", "kr_cache", kr)]
        return found | self.caches(*(rows[:1] if caches == 3 else rows))

    def packed(self, ckv: Num, kr: Num) -> Num:
        """Bytes: tiles of the latent, the key in bfloat16, a float32 step for each tile."""
        tiles = ckv.reshape(len(ckv.re), -1, self.attributes["tile_size"])
        alpha = (
            self.take("k_nope_clip_alpha").reshape(-1)[0]
            if "k_nope_clip_alpha" in self.given
            else of(1)
        )
        limit = self.largest(tiles)
        if not alpha.same(of(1)):
            limit = limit * alpha
            tiles = self.point.function(tiles, limit, "clip")
        values, steps = self.by_row(tiles, limit)
        kinds = (kr, "torch.bfloat16", 2), (steps[..., 0], "torch.float32", 4)
        parts = [
            joined(
                [self.point.function(value, f"byte {k} of {kind}")[..., None] for k in range(count)]
            )
            for value, kind, count in kinds
        ]
        parts = [part.reshape(len(ckv.re), -1) for part in (values, *parts)]
        kind = {"fp8": "as torch.float8_e4m3fn", "hifloat8": "as torch.uint8"}.get(self.format)
        return joined(
            parts[:1] + [self.point.function(part, kind) if kind else part for part in parts[1:]]
        )

    def key_half(self) -> dict[str, Num]:
        kv, latent = self.take("kv"), self.given["gamma"].shape[-1]
        k_pe = self.rope(kv[..., latent:], self.take("cos"), self.take("sin"))
        c_kv = self.norm(kv[..., :latent], "gamma", "epsilon")
        ckr, ckv = (
            self.in_bytes(value * self.take(scale)) if scale in self.given else value
            for value, scale in ((k_pe, "k_rope_scale"), (c_kv, "c_kv_scale"))
        )
        return {"k_pe": k_pe, "c_kv": c_kv} | self.caches(
            ("kr_cache", "k_cache", ckr), ("kv_cache", "ckv_cache", ckv)
        )

    def preprocess(self) -> dict[str, Num]:
        """W8A8 by fixed scales, the input's norm inside; rotations of halves."""
        uk, cos, sin, epsilon = (
            self.weight("wuk"),
            self.take("cos"),
            self.take("sin"),
            Fraction(1, 10**6),
        )
        (heads, nope, latent), rope = uk.shape, cos.shape[-1]
        half = rope // 2

        def rotated(value: Num, cos: Num, sin: Num) -> Num:
            return value * cos + joined([-value[..., half:], value[..., :half]]) * sin

        def by_scales(rows: Num, stage: int, name: str) -> Num:
            normed = self.norm(rows, f"gamma{stage}", epsilon) + self.take(f"beta{stage}")
            scaled = normed * self.take(f"quant_scale{stage}").inverse() + self.take(
                f"quant_offset{stage}"
            )
            weight = self.weight(name)
            width, columns = rows.shape[-1], math.prod(weight.shape) // rows.shape[-1]
            blocks = (
                ([width // 32, 32, columns], [columns * 32, 1, 32])
                if len(weight.shape) == 4
                else None
            )
            turned = self.point.move(
                weight, [width, columns], 0, *(blocks or ([width, columns], [1, width]))
            )
            found = self.point.matmul(self.in_bytes(scaled), turned)
            return (found + self.take(f"bias{stage}")) * self.take(f"descale{stage}")

        down = by_scales(self.take("input"), 0, "wdqkv")
        up = by_scales(down[..., latent + rope :], 1, "wuq").reshape(
            len(down.re), heads, nope + rope
        )
        query = self.point.matmul(up[..., :nope].map(lambda part: part.swapaxes(0, 1)), uk)
        rows = (
            self.norm(down[..., :latent], "gamma2", epsilon),
            rotated(down[..., latent : latent + rope], cos, sin),
        )
        found = {"query": query.map(lambda part: part.swapaxes(0, 1))}
        found["query_rope"] = rotated(up[..., nope:], cos[:, None], sin[:, None])
        for name, argument, new in zip(_CACHES, ("kv_cache", "kv_cache_rope"), rows, strict=True):
            buffer = self.take(argument)  # one element stands for a cache of the model's
            rest = buffer.reshape(-1, buffer.shape[-1])[len(new.re) :]
            found[name] = (
                new if buffer.shape == (1,) else joined([new, rest], 0).reshape(*buffer.shape)
            )
        return found

    def caches(self, *rows: tuple[str, str, Num]) -> dict[str, Num]:
        """The new rows [T, width] of caches; of a buffer that holds nothing else, in its form."""
        is_buffer = self.attributes["cache_mode"] in ("BSND", "TND", "Norm")
        return {
            name: value.reshape(*self.weight(buffer).shape)
            if is_buffer
            else value.reshape(-1, value.shape[-1])
            for name, buffer, value in rows
        }


KERNELS: dict[str, tuple[Callable[[Kernel], dict[str, Num]], frozenset[str]]] = {
    "npu_mla_prolog_v3": (Kernel.prolog, frozenset({"cache_index", "kv_cache", "kr_cache"})),
    "npu_kv_rmsnorm_rope_cache_v2": (Kernel.key_half, frozenset({"index", "k_cache", "ckv_cache"})),
    "npu_mla_preprocess": (
        Kernel.preprocess,
        frozenset({"slotmapping", "q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1"}),
    ),
}  # and what of a call is no number that is computed with


# -- a certificate


@dataclass(frozen=True)
class Accepted:
    """How many values were compared at how many points, and a chance above that of an error."""

    values: int
    points: int
    chance: float

    def __str__(self) -> str:
        return (
            f"{self.values:,} values at {self.points} points, wrong by a chance below "
            f"{self.chance:.0e}"
        )


DEFAULTS = {  # of the operators' attributes
    "query_norm_flag": False, "weight_quant_mode": 0, "kv_cache_quant_mode": 0,
    "query_quant_mode": 0,
    "ckvkr_repo_mode": 0, "quant_scale_repo_mode": 0, "tile_size": 128, "qc_qr_scale": 1.0,
    "kc_scale": 1.0,
    "is_output_kv": False,
}  # fmt: skip
_SOURCES = {"c_kv": ("kv_cache", "c_kv"), "k_pe": ("kr_cache", "k_pe"), "q_nope": ("query",)}
_CACHES = ("kv_cache", "kr_cache")
_DIMS = (
    ("He", "token_x", -1), ("Hcq", "rmsnorm_gamma_cq", -1), ("Hckv", "rmsnorm_gamma_ckv", -1),
    ("D", "weight_uk", 1), ("N", "weight_uk", 0), ("Dr", "rope_cos", -1), ("Hckv", "gamma", -1),
    ("Dr", "cos", -1),
    ("He", "input", -1), ("Hcq", "gamma1", -1), ("Hckv", "gamma2", -1), ("D", "wuk", 1),
    ("N", "wuk", 0),
)  # fmt: skip


class Run:
    """A certificate at a point. Raises Refused where a claim does not hold."""

    def __init__(
        self, certificate: dict[str, Any], point: Point, weights: dict[int, Weight]
    ) -> None:
        self.certificate, self.point, self.weights = certificate, point, weights
        self.values: list[Value] = []
        # of a result of the kernel, moved, or times a number a token: which
        self.of_result: dict[int, str] = {}
        self.of_kernel: list[Num] = []  # what the kernel's roots are drawn of
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.results: dict[str, Num] = {}
        fixed, elements = set[int](), 0
        for place, (op, operands, *rest) in enumerate(certificate["values"]):
            given = [self.values[whole(index, 0, place - 1)] for index in operands]
            found = weights.get(place) or self._value(place, op, operands, given, rest)
            if isinstance(found, Weight):  # the same at every point
                weights[place] = found
            fixed |= {place} if op in FIXED and fixed.issuperset(operands) else set()
            if op == "sqrt" and place in fixed:
                point.roots.pop()  # of a number: its sign is known
            self.values.append(found)
            elements += math.prod(found.shape) if isinstance(found, Num) else 0
            if elements > MOST or place > MOST_VALUES:
                raise Refused("a certificate of too many elements")
        self.count = sum(map(self._claimed, certificate["claims"]))
        unknown = (
            one
            for one in point.roots
            if not any(_is_multiple(one, other) for other in self.of_kernel)
        )
        # that a point shows of each root
        self.signs = min((one.re.size for one in unknown), default=BITS)

    def _scales_tokens(self, op: str, operands: list[int]) -> bool:
        """Is it the query, each token of it times one number that is no result?"""
        others = [self.values[index] for index in operands if index not in self.of_result]
        queries = [index for index in operands if self.of_result.get(index) == "query"]
        return op == "mul" and len(queries) == len(others) == 1 and others[0].shape[-2:] == (1, 1)

    def _value(
        self, place: int, op: str, operands: list[int], given: list[Value], rest: list[Any]
    ) -> Value:
        sources = {self.of_result[index] for index in operands if index in self.of_result}
        if op == "result":
            self.results = self.results or self._call()
            self.of_result[place] = rest[1]
            return self.results[rest[1]]
        if sources and op != "move" and not self._scales_tokens(op, operands):
            raise Refused(f"value {place} is computed from a result of the kernel")
        if sources:
            (self.of_result[place],) = sources
        if op == "leaf":
            return self.point.leaf(f"leaf {place}", rest[0])
        if op not in RULES:
            raise Refused(f"value {place} is of an operation that is not known")
        if op in (*ELEMENTWISE, "label", "total"):
            given = [self.point.drawn(value) for value in given]
            sizes_of(np.broadcast_shapes(*(value.shape for value in given if op in ELEMENTWISE)))
        rule: Any = ARITHMETIC.get(op) or getattr(self.point, op)
        found: Value = rule(*given, *rest)
        return found

    def _call(self) -> dict[str, Num]:
        call = self.certificate["call"]
        if any(index in self.of_result for index in call["arguments"].values()):
            raise Refused("the kernel is given a result of its own")
        arguments = {name: self.values[whole(index)] for name, index in call["arguments"].items()}
        self.shapes = {name: value.shape for name, value in arguments.items()}
        floors = _assumes_rows(self.certificate)
        kernel, before = Kernel(self.point, arguments, call["attributes"], floors), self.point.roots
        run, unread = KERNELS[call["operator"]]
        self.point.roots = self.of_kernel
        results, self.point.roots = run(kernel), before
        if arguments.keys() - kernel.read - unread:
            raise Refused(
                "the kernel takes no "
                f"{', '.join(arguments.keys() - kernel.read - unread)} in this format"
            )
        return results

    def _claimed(self, claim: dict[str, Any]) -> int:
        place, result, name = claim["value"], claim["is"], claim["output"]
        if place in self.of_result or self.of_result.get(result) not in _SOURCES.get(name, (name,)):
            raise Refused(f"{name} is not claimed of a value and of that result")
        a, b = (self.point.drawn(self.values[whole(index)]) for index in (place, result))
        if a.shape != b.shape or not a.same(b):
            raise Refused(f"{name} is not what the kernel gives")
        return math.prod(a.shape)


def _is_multiple(a: Num, b: Num) -> bool:
    """Is it the other times a number that has a root, so that both roots have one sign?"""
    if a.shape != b.shape or a.i.any() or b.i.any():
        return False
    times = power(b.re.reshape(-1)[:1], PRIME - 2) * a.re.reshape(-1)[:1] % P
    return a.same(b * Num(times[0])) and bool(power(times, (PRIME - 1) // 2)[0] == 1)


def _assumes_rows(of: dict[str, Any]) -> bool:
    return any(str(text).startswith("no row comes near") for text in of["assumptions"])


def fits(certificate: dict[str, Any], fusion: dict[str, Any]) -> None:
    """Raises Refused where a certificate is of another fusion, or does not claim all that the
    fusion replaces.
    """
    call, replaced = certificate["call"], list(fusion["replaced"].values())
    given = {
        name: item["written"] if isinstance(item, dict) else item
        for name, item in call["attributes"].items()
    }
    wrong = [
        name
        for name, item in fusion["attributes"].items()
        if name not in given or given[name] != item
    ]
    other = call["operator"] != fusion["operator"] or call["operator"] not in KERNELS
    if other or wrong or certificate["replaced"] != replaced or certificate["version"] != VERSION:
        raise Refused(
            f"the certificate is of another call, or another version {', '.join(wrong)}".rstrip()
        )
    claims = [(claim["place"], claim["output"]) for claim in certificate["claims"]]
    if any(
        item != DEFAULTS.get(name)
        for name, item in given.items()
        if name not in fusion["attributes"]
    ):
        raise Refused("an attribute is not the operator's default, and the report does not list it")
    if _assumes_rows(certificate) and not _assumes_rows(fusion):
        raise Refused("the fusion does not list what the certificate assumes")
    paged, arguments = "PA" in given["cache_mode"], call["arguments"]
    if call["operator"] == "npu_mla_preprocess":
        paged = certificate["values"][whole(arguments["kv_cache"])][2] == [1]
        written = [arguments[name] for name in ("kv_cache", "kv_cache_rope", "q_out0", "q_out1")]
        if (
            len(set(written)) < 4
            or [arguments[f"kv_cache_out{place}"] for place in (0, 1)] != written[:2]
        ):
            raise Refused("results are written to one place, or caches to another than their own")
    in_place = _CACHES[: 1 if given.get("kv_cache_quant_mode") == 3 else 2] if paged else ()
    if len(set(claims)) < len(claims) or not claims:
        raise Refused("a value is claimed twice, or none is")
    for place, name in enumerate(replaced):
        if (place, name) not in claims and (name not in _CACHES or (None, name) not in claims):
            raise Refused(f"nothing is claimed of {name}")
    if not set(in_place) <= {name for _, name in claims}:
        raise Refused("nothing is claimed of a cache")


def proved(
    certificate: dict[str, Any], points: int, seed: str
) -> tuple[Accepted, dict[str, tuple[int, ...]]]:
    """What holds at so many points, or more where signs of roots have to be seen; and sizes. Raises
    Refused.
    """
    done, signs, run, weights = 0, BITS, None, dict[int, Weight]()
    while run is None or done < min(MOST_POINTS, max(points, -(-BITS // signs))):
        run = Run(
            certificate,
            Point(hashlib.blake2b(f"{seed} {done}".encode(), digest_size=32).digest()),
            weights,
        )
        done, signs = done + 1, min(signs, run.signs)
    return Accepted(run.count, done, (DEGREE / 2**30) ** done + 0.5 ** (done * signs)), run.shapes


def checked(
    report: Any, points: int = POINTS, seed: str | None = None
) -> Iterator[tuple[str, Accepted | Refused]]:
    """Each fusion's layer, and what was found of it. Raises NoReport."""
    if not isinstance(report, dict) or not isinstance(report.get("fused"), list):
        raise NoReport("it has no list of fusions")
    known: dict[int, Accepted | Refused] = {}
    drawn = os.urandom(16).hex() if seed is None else seed
    for fusion in report["fused"]:
        layer = str(fusion.get("layer")) if isinstance(fusion, dict) else "a fusion"
        try:
            yield layer, _of_fusion(report, fusion, points, drawn, known)
        except Refused as refusal:
            yield layer, refusal
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            TypeError,
            ValueError,
        ) as error:
            yield (
                layer,
                Refused(f"no certificate of the form that is known ({type(error).__name__})"),
            )


def _of_fusion(report: Any, fusion: Any, points: int, seed: str, known: dict[int, Any]) -> Accepted:
    if fusion["certificate"] is None:
        raise Refused("it has no certificate: it was not proved in exact arithmetic")
    certificate = report["certificates"][whole(fusion["certificate"])]
    fits(certificate, fusion)
    if fusion["certificate"] not in known:
        known[fusion["certificate"]] = proved(certificate, points, seed)
    accepted, shapes = known[fusion["certificate"]]
    dims = fusion["dims"] | {"N": fusion["dims"].get("N_padded", fusion["dims"].get("N"))}
    for name, argument, axis in _DIMS:
        if argument in shapes and dims[name] != shapes[argument][axis]:
            raise Refused(f"{name} is another than that of {argument}")
    return accepted


def read(path: Path) -> Any:
    """Raises NoReport, OSError."""
    if path.stat().st_size > MOST_BYTES:
        raise NoReport("it is too large")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NoReport("it is no JSON") from error


def line(layer: str, found: Accepted | Refused) -> str:
    return f"{layer}: {'refused' if isinstance(found, Refused) else 'accepted'}: {found}"


if __name__ == "__main__":
    outcomes = [one for path in sys.argv[1:] for one in checked(read(Path(path)))]
    print("\n".join(line(*one) for one in outcomes))
    sys.exit(any(isinstance(found, Refused) for _, found in outcomes))
