"""Checks the certificates of a report, with Python's own library and numpy: no torch, nothing of
the pass.

``mla-fusion check-proof report.json``, or this file alone: ``python check.py report.json``.

A certificate lists values, each made of earlier ones. It says which of them are the kernel's
arguments, and which of the kernel's results replaces which value. The values, and a definition of
the kernel written from its documents, are evaluated at random points: random elements of GF(p),
with another random prime p at each point. What is claimed to be equal must be so. A certificate is
data, perhaps false: what is not as it should be is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

Array: Any = np.ndarray
VERSION, TOO_MANY = 2, "a certificate of too many elements"
POINTS, MOST_POINTS, CHANCE = 3, 64, 2e-16
MOST_BYTES, MOST_VALUES = 1 << 27, 1 << 15  # of a report, of a certificate
LARGEST, DRAWN, MOST = 1 << 26, 1 << 24, 1 << 30  # elements: of a value, of numbers; bytes of all
MOST_PRODUCTS, MOST_WORK = 1 << 28, 3 << 30  # of a product of matrices; steps on elements, of all
STEPS = {"inverse": 48, "sqrt": 4, "function": 4, "label": 4, "leaf": 4}  # of each element
# the largest epsilon that may stand for a floor; fewer than the digits of all primes to draw from
FLOOR, PRIMES = 1e-20, 1 << 28
MOST_ROOT, MOST_FACTORS = 1 << 36, 8  # of what numbers are roots of; primes in all of these


class Refused(Exception):
    """Why a certificate is not accepted."""


class NoReport(Exception):
    """Why a file is no report."""


def refuse(if_so: Any, why: str) -> None:
    if if_so:
        raise Refused(why)


class Num(Array):
    """Elements of GF(p)."""

    prime = 3

    def __add__(self, b: Any) -> Num:
        return elements(np.add(self, b) % Num.prime)

    def __mul__(self, b: Any) -> Num:
        return elements(np.multiply(self, b) % Num.prime)

    def __neg__(self) -> Num:
        return elements(np.subtract(np.uint64(Num.prime), self) % Num.prime)

    def to_the(self, exponent: int) -> Num:
        found = np.ones_like(self)
        for bit in f"{exponent:b}":
            found = found * found * (self if bit == "1" else 1)
        return found

    def inverse(self) -> Num:
        if not self.all():
            raise ZeroDivisionError("a quotient by 0")
        return self.to_the(Num.prime - 2)

    def root(self) -> Num:
        """The root of a number whose prime factors all are squares: that of a product is the
        product of the roots, and that of ``n * n`` is n, not -n.
        """
        return self.to_the((Num.prime + 1) // 4)

    def total(self, axes: Sequence[int] = (-1,), keep: bool = True) -> Num:
        return self.sum(tuple(axes), keepdims=keep) + 0


class Weight(Array):
    """Elements of weights that are only moved about: which of all elements each is, -1 for a 0."""

    @cached_property
    def columns(self) -> tuple[Any, Any] | None:
        """Of [.., k, n] whose columns are elements a step apart: the first and the step of each."""
        first, rows = self[..., :1, :], np.arange(self.shape[-2], dtype=np.int32)[:, None]
        step = self[..., 1:2, :] - first
        is_even = len(rows) > 1 and np.array_equal(self, first + rows * step)
        return (first, step) if is_even and not ((first == -1) & (step != 0)).any() else None


Value = Num | Weight


def elements(array: Any) -> Num:
    return Array.view(np.asarray(array, dtype=np.uint64), Num)


def of(number: Fraction | int) -> Num:
    return elements(number.numerator * pow(number.denominator, -1, Num.prime) % Num.prime)


def joined(*parts: Num) -> Num:
    return Array.view(np.concatenate(parts, -1), Num)


# -- what is read of a certificate


def whole(item: Any, least: int = 0, most: int = 1 << 32) -> int:
    if type(item) is not int or not least <= item <= most:
        raise Refused(f"{str(item)[:40]} is no number from {least} to {most}")
    return item


def sizes_of(item: Any, most: int = LARGEST) -> tuple[int, ...]:
    found = tuple(whole(size, 1) for size in item)
    refuse(len(found) > 16 or math.prod(found) > most, "a value is too large")
    return found


def walk(low: int, high: int, shape: Any, first: Any, sizes: Any, strides: Any) -> Any:
    """Numbers from a first one, by strides along sizes (of an axis one, or each step by itself).
    Raises Refused where they leave ``low`` to ``high - 1``.
    """
    found = np.array(whole(first, low, high), dtype=np.int64)
    for size, stride in zip(sizes_of(sizes), strides, strict=True):
        if type(stride) is list:
            steps = np.array([whole(step, -1 << 60, 1 << 60) for step in stride], dtype=np.int64)
        else:
            steps = np.arange(size) * whole(stride, -1 << 32)
        refuse(len(steps) != size, "a move of other sizes than it says")
        found = found[..., None] + steps
    refuse(found.min() < low or found.max() >= high, "a move from outside of its operand")
    return found.reshape(sizes_of(shape))


def fraction(exact: Any, written: Any, is_root: bool = False) -> Fraction:
    """What stands for the number that was written, or what that is the root of."""
    refuse(not re.fullmatch(r"-?\d{1,330}(/\d{1,330})?", exact), f"{exact[:40]} is no fraction")
    found = Fraction(exact)
    number = math.sqrt(found) if is_root else float(found)
    near = written is None or abs(number - float(written)) <= 6e-8 * abs(float(written)) < math.inf
    refuse(not near, f"{exact} is not the number {written}")
    return found


# -- a point


def is_prime(number: int, squares: Iterable[int] = ()) -> bool:
    """Of odd numbers below 2^32, 3 mod 4 (Miller and Rabin, by the bases that suffice there), in
    whose field the ``squares`` have roots.
    """
    has_roots = all(pow(q, number // 2, number) == 1 for q in squares)
    return has_roots and all(pow(b, number // 2, number) in (1, number - 1) for b in (2, 3, 5, 7))


def factors(number: int) -> set[int]:
    """The primes that divide it."""
    refuse(number > MOST_ROOT, "a root of too large a number")
    by = next((by for by in range(2, math.isqrt(number) + 1) if number % by == 0), number)
    return {by} | factors(number // by) if number > 1 else set()


def factors_of_roots(certificate: Any) -> set[int]:
    """The primes in all numbers that literals are roots of."""
    roots = {entry[2] for entry in certificate["values"] if entry[0] == "root"}
    roots |= {exact for kind, exact in certificate["exact"].values() if kind == "root"}
    exact = (fraction(root, None, True) for root in [*roots][: MOST_FACTORS**2])
    found = set[int]().union(*(factors(of.numerator * of.denominator) for of in exact))
    refuse(len(roots) > MOST_FACTORS**2 or len(found) > MOST_FACTORS, "roots of too many numbers")
    return found


class Point:
    """A random point, in whose field the given primes are squares. Its methods of operations are
    given operands, and what else an entry has.
    """

    def __init__(self, seed: str, squares: Iterable[int] = ()) -> None:
        draw = Random(seed)
        self._key, self._cells, Num.prime = draw.randbytes(32), 0, 15
        while not is_prime(Num.prime, squares):
            Num.prime = 1 << 30 | draw.getrandbits(28) << 2 | 3

    def hashed(self, name: str, *parts: Any) -> Num:
        digest = hashlib.blake2b(name.encode(), key=self._key, digest_size=8).digest()
        found = np.array(int.from_bytes(digest, "little"), dtype=np.uint64)
        for part in parts:
            with np.errstate(over="ignore"):  # it wraps around
                found = (found ^ np.asarray(part).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
                found = (found ^ (found >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
            found = found ^ (found >> np.uint64(29))
        return elements((found >> np.uint64(3)) % Num.prime)

    def drawn(self, value: Value) -> Num:
        return value if isinstance(value, Num) else self.hashed("cell", value) * (value != -1)

    def weight(self, shape: Any, name: Any = None) -> Weight:
        """Each of its elements is one of its own; zeros, where it has no name."""
        first, self._cells = self._cells, self._cells + math.prod(sizes_of(shape))
        numbers = np.arange(first, self._cells, dtype=np.int32)
        numbers = np.full_like(numbers, -1) if name is None else numbers
        return Array.view(numbers.reshape(shape), Weight)

    def leaf(self, shape: Any, place: int) -> Num:
        numbers = np.arange(math.prod(sizes_of(shape, DRAWN)))
        return self.hashed(f"leaf {place}", numbers).reshape(shape)

    def label(self, *given: Num) -> Num:
        """One element for all elements of the arguments, in order."""
        every = (self.hashed("element", a.reshape(-1), np.arange(a.size)) for a in given)
        return self.hashed(f"label {[a.shape for a in given]}", *(a.total((0,)) for a in every))

    def matmul(self, a: Value, b: Value) -> Num:
        """Of the product with a column of a weight no more is used than that it is linear in the
        row's size: so no weight need be drawn.
        """
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            raise Refused(f"a product of {a.shape} and {b.shape}")
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        sizes = sizes_of((*lead, a.shape[-2], b.shape[-1]), DRAWN)
        if isinstance(a, Num) and isinstance(b, Weight) and b.columns is not None:
            size = a[..., :1] + (a[..., :1] == 0)
            row = self.hashed("row", a * size.inverse(), np.arange(a.shape[-1])).total()
            return self.hashed("product", row, *b.columns) * size * (b.columns[0] != -1)
        refuse(math.prod(sizes) * a.shape[-1] > MOST_PRODUCTS, "a product is too large")
        a, b, found = self.drawn(a), self.drawn(b), elements(np.zeros(sizes))
        for k in range(a.shape[-1]):
            found = found + a[..., k : k + 1] * b[..., k : k + 1, :]
        return found

    def join(self, *given: Any) -> Value:
        *parts, axis = given
        if not all(isinstance(part, Weight) for part in parts):
            parts = [self.drawn(part) for part in parts]
        return np.concatenate(parts, whole(axis)).view(type(parts[0]))

    def move(self, value: Any, *how: Any) -> Any:
        return np.asarray(value.reshape(-1)[walk(0, value.size, *how)]).view(type(value))


ELEMENTWISE: dict[str, Any] = {
    "add": lambda at, a, b: a + b,
    "mul": lambda at, a, b: a * b,
    "neg": lambda at, a: -a,
    "inverse": lambda at, a: a.inverse(),
    # a function: of a square, nothing would show which of both roots is meant
    "sqrt": lambda at, a: at.hashed("sqrt", a),
    "function": lambda at, *given: at.hashed("function " + given[-1], *given[:-1]),
}
OF_NUMBERS: dict[str, Any] = ELEMENTWISE | {
    "label": Point.label,
    "total": lambda at, a, axes, keep: a.total([whole(axis, 0, a.ndim - 1) for axis in axes], keep),
    "leaf": Point.leaf,
    "number": lambda at, exact, written: of(fraction(exact, written)),
    "root": lambda at, exact, written: of(fraction(exact, written, True)).root(),
    "integers": lambda at, *how: elements(walk(-1 << 60, 1 << 60, *how) % Num.prime),
}
RULES: dict[str, Any] = OF_NUMBERS | {"weight": Point.weight, "zeros": Point.weight}
RULES |= {"matmul": Point.matmul, "join": Point.join, "move": Point.move}
Height = tuple[int, int]  # of the quotient of two polynomials: degrees, and digits of literals


def height_of(op: str, found: Value, given: Sequence[Any], below: Sequence[Height]) -> Height:
    """Of a value made of operands with these. What is no polynomial (a function) is a new leaf."""
    if op in ("add", "mul"):
        (a, b), (c, d) = below
        return (max(a + d, c + b) + 1 if op == "add" else a + c), b + d
    if op == "inverse":
        return below[0][::-1]
    if op == "matmul" and isinstance(given[0], Num) and getattr(given[1], "columns", None):
        return below[0][0] + 1, below[0][1]
    if op in ("total", "matmul"):  # of so many elements, each with a denominator of its own
        terms = given[0].size // found.size if op == "total" else given[0].shape[-1]
        over, under = (sum(each) for each in zip(*below, strict=True))
        return over + (terms - 1) * under + terms.bit_length(), terms * under
    if op in ("neg", "move", "join"):
        return max(a for a, _ in below), max(b for _, b in below)
    return 1, 0


# -- the kernels, by their documents

INT8 = ("int8", 127)  # a format of rows, and what their largest becomes
FORMATS = {3: ("fp8", 448), 4: ("fp8", 448), 5: ("hifloat8", 32768)}
BYTES = {"fp8": "as torch.float8_e4m3fn", "hifloat8": "as torch.uint8"}


class Kernel:
    """A call: the definition of its operator, whose results are rows [T, ..].

    dims   sizes by the documents' names
    """

    def __init__(self, point: Point, given: dict[str, Value], exact: Any, call: Any) -> None:
        self.point, self.given, self.exact = point, given, exact
        self.attributes, self.has_floors = DEFAULTS | call["attributes"], call["floors"]
        self.read, self.dims = set[str](), dict[str, int]()
        mode = self.attributes["weight_quant_mode"]
        self.in_blocks, (self.format, self.most) = mode == 3, FORMATS.get(mode, INT8)

    def weight(self, name: str) -> Value:
        self.read.add(name)
        return self.given[name]

    def take(self, name: str) -> Num:
        return self.point.drawn(self.weight(name))

    def number(self, name: str) -> Num:
        """An attribute. An epsilon far below any row may stand for a floor, where that is assumed;
        a scale next to 1 is none.
        """
        written, (kind, exact) = self.attributes[name], self.exact.pop(name)
        if exact == "0" and self.has_floors and 0 < written <= FLOOR:
            return of(0)
        number = of(fraction(exact, written, kind == "root"))
        return of(1) if abs(written - 1) < 2.0**-23 else number.root() if kind == "root" else number

    def function(self, name: str, *given: Any) -> Num:
        return self.point.hashed(f"function {name}", *given)

    def only(self, **wanted: Any) -> None:
        """Raises Refused for other attributes than those that follow from what is defined here."""
        wrong = {name for name in wanted if self.attributes.get(name, 0) != wanted[name]}
        if wrong := wrong | {*self.attributes} - {*wanted, *self.exact, *DEFAULTS, *OF_LAYOUT}:
            raise Refused(f"{', '.join(wrong)} is another than what is proved")

    def norm(self, value: Num, gamma: str, epsilon: Num) -> Num:
        mean = (value * value).total() * of(Fraction(1, value.shape[-1]))
        return value * self.point.hashed("sqrt", mean + epsilon).inverse() * self.take(gamma)

    def rope(self, value: Num, cos: Num, sin: Num) -> Num:
        """Pairs in, halves out; the halves of the tables are not tied."""
        refuse(not value.shape[-1] == cos.shape[-1] == sin.shape[-1], "tables of another width")
        half, even, odd = value.shape[-1] // 2, value[..., 0::2], value[..., 1::2]
        first = even * cos[..., :half] + -(odd * sin[..., :half])
        return joined(first, odd * cos[..., half:] + even * sin[..., half:])

    def largest(self, rows: Num) -> Num:
        return self.function("largest of row", self.function("size", rows * rows).total())

    def by_row(self, rows: Num, largest: Num) -> tuple[Num, Num]:
        """Rows in bytes, and their steps."""
        steps = largest * of(self.most).inverse()
        return self.function(self.format, rows * steps.inverse()), steps

    def by_block(self, rows: Num) -> tuple[Num, Num]:
        """Rows in mxfp8, and a power of two for each 32 neighbours."""
        blocks = rows.reshape(len(rows), -1, 32)
        powers = self.function("power of two", self.largest(blocks))
        values = self.function("mxfp8", blocks * powers.inverse())
        return values.reshape(rows.shape), powers[..., 0]

    def projected(self, rows: Num, name: str, step: Num | None) -> Num:
        weight = self.weight(f"weight_{name}")
        if step is None:
            return self.point.matmul(rows, weight)
        steps = self.take(f"dequant_scale_w_{name}")
        if self.format == "hifloat8":
            rows = self.function("of format 290", rows)
        if not self.in_blocks:
            return self.point.matmul(rows, weight) * step * steps
        blocks = rows.reshape(len(rows), -1, 32) * step.reshape(len(rows), -1, 1)
        by_block = weight.reshape(-1, 32, weight.shape[1])
        products = self.point.matmul(blocks.swapaxes(0, 1), by_block)
        return (products * steps.T[:, None]).total((0,), False)

    def absorbed(self, q_nope: Num, uk: Value) -> Num:
        return self.point.matmul(q_nope.swapaxes(0, 1), uk).swapaxes(0, 1)

    def prolog(self) -> dict[str, Num]:
        weights, caches = (self.attributes[f"{of}_quant_mode"] for of in ("weight", "kv_cache"))
        refuse(weights not in range(6) or caches not in range(4), "a format that is not proved")
        packed = {f"{of}_repo_mode": caches == 3 for of in ("ckvkr", "quant_scale")}
        self.only(query_quant_mode=caches == 1, **packed)
        x, cos, sin = (self.take(name) for name in ("token_x", "rope_cos", "rope_sin"))
        x, cos, sin = (value.reshape(-1, value.shape[-1]) for value in (x, cos, sin))
        uk, step = self.weight("weight_uk"), None
        heads, nope, latent = uk.shape
        of_x = self.take("dequant_scale_x") if weights > 1 else None
        epsilon, times = self.number("rmsnorm_epsilon_cq"), self.number("qc_qr_scale")
        c_q = self.norm(self.projected(x, "dq", of_x), "rmsnorm_gamma_cq", epsilon)
        scaled, is_smooth = c_q * times, weights > 0 and "smooth_scales_cq" in self.given
        if is_smooth:
            scaled = scaled * self.take("smooth_scales_cq")
        if self.in_blocks:
            scaled, step = self.by_block(scaled)
        elif weights:  # a positive number goes through the largest
            largest = self.largest(scaled) if is_smooth else self.largest(c_q) * times
            scaled, step = self.by_row(scaled, largest)
        query = self.projected(scaled, "uq_qr", step).reshape(len(x), heads, -1)
        absorbed = self.absorbed(query[..., :nope], uk)
        query_rope = self.rope(query[..., nope:], cos[:, None], sin[:, None])
        both, epsilon = self.projected(x, "dkv_kr", of_x), self.number("rmsnorm_epsilon_ckv")
        ckv = self.norm(both[:, :latent], "rmsnorm_gamma_ckv", epsilon) * self.number("kc_scale")
        found = {"query_norm": scaled} if step is None else {"dequant_scale_q_norm": step}
        kr, found["query_norm"] = self.rope(both[:, latent:], cos, sin), scaled
        if caches == 1:
            scale = self.take("quant_scale_ckv").reshape(1)
            absorbed, of_query = self.by_row(absorbed, self.largest(absorbed))
            found["dequant_scale_q_nope"] = of_query
            query_rope = query_rope * (of_query.inverse() * scale)
            ckv = self.function(self.format, ckv * scale)
        elif caches == 2:
            ckv = self.function(self.format, ckv * self.take("quant_scale_ckv"))
            kr = self.function(self.format, kr * self.take("quant_scale_ckr"))
        elif caches == 3:
            ckv = self.packed(ckv, kr)
        self.dims = {"He": x.shape[-1], "Hcq": c_q.shape[-1], "Hckv": latent, "N": heads}
        self.dims |= {"D": nope, "Dr": cos.shape[-1]}
        found |= {"query": absorbed, "query_rope": query_rope, "kv_cache": ckv}
        return found if caches == 3 else found | {"kr_cache": kr}

    def packed(self, ckv: Num, kr: Num) -> Num:
        """Bytes: tiles of the latent, the key in bfloat16, a float32 step for each tile."""
        tiles = ckv.reshape(len(ckv), -1, self.attributes["tile_size"])
        limit = self.largest(tiles)
        if "k_nope_clip_alpha" in self.given and np.any(self.take("k_nope_clip_alpha") != 1):
            limit = limit * self.take("k_nope_clip_alpha").reshape(1)
            tiles = self.function("clip", tiles, limit)
        values, steps = self.by_row(tiles, limit)
        parts = [values.reshape(len(ckv), -1)]
        for part, kind, count in (kr, "bfloat16", 2), (steps[..., 0], "float32", 4):
            each = [self.function(f"byte {k} of torch.{kind}", part) for k in range(count)]
            bits = np.stack(each, -1).view(Num).reshape(len(ckv), -1)
            kind = BYTES.get(self.format, "")
            parts.append(self.function(kind, bits) if kind else bits)
        return joined(*parts)

    def key_half(self) -> dict[str, Num]:
        self.only()
        kv, latent = self.take("kv"), self.given["gamma"].shape[-1]
        k_pe = self.rope(kv[..., latent:], self.take("cos"), self.take("sin"))
        c_kv = self.norm(kv[..., :latent], "gamma", self.number("epsilon"))
        self.dims, found = {"Hckv": latent, "Dr": k_pe.shape[-1]}, {"k_pe": k_pe, "c_kv": c_kv}
        for name, row, scale in ("kr", k_pe, "k_rope_scale"), ("kv", c_kv, "c_kv_scale"):
            in_bytes = scale in self.given
            row = self.function(self.format, row * self.take(scale)) if in_bytes else row
            found[f"{name}_cache"] = row
        return found

    def preprocess(self) -> dict[str, Num]:
        """W8A8 by fixed scales, the input's norm inside; rotations of halves."""
        uk, cos, sin = self.weight("wuk"), self.take("cos"), self.take("sin")
        (heads, nope, latent), rope, epsilon = uk.shape, cos.shape[-1], of(Fraction(1, 10**6))
        self.dims = {"Hckv": latent, "N": heads, "D": nope, "Dr": rope}
        self.only(quant_mode="per_tensor_quant_asymm")

        def rotated(value: Num, cos: Num, sin: Num) -> Num:
            return value * cos + joined(-value[..., rope // 2 :], value[..., : rope // 2]) * sin

        def by_scales(rows: Num, stage: int, name: str) -> Num:
            normed = self.norm(rows, f"gamma{stage}", epsilon) + self.take(f"beta{stage}")
            scaled = normed * self.take(f"quant_scale{stage}").inverse()
            weight = self.weight(name)
            if weight.ndim == 4:  # FRACTAL_NZ
                weight = weight[0].swapaxes(0, 1).reshape(weight.shape[2], -1)
            values = self.function("int8", scaled + self.take(f"quant_offset{stage}"))
            found = self.point.matmul(values, weight.T)
            return (found + self.take(f"bias{stage}")) * self.take(f"descale{stage}")

        down = by_scales(self.take("input"), 0, "wdqkv")
        self.dims |= {"He": self.given["input"].shape[-1], "Hcq": down.shape[1] - latent - rope}
        up = by_scales(down[..., latent + rope :], 1, "wuq").reshape(len(down), heads, -1)
        return {
            "query": self.absorbed(up[..., :nope], uk),
            "query_rope": rotated(up[..., nope:], cos[:, None], sin[:, None]),
            "kv_cache": self.norm(down[..., :latent], "gamma2", epsilon),
            "kr_cache": rotated(down[..., latent : latent + rope], cos, sin),
        }


KERNELS = {"npu_mla_prolog_v3": Kernel.prolog, "npu_mla_preprocess": Kernel.preprocess}
KERNELS |= {"npu_kv_rmsnorm_rope_cache_v2": Kernel.key_half}
DEFAULTS: dict[str, float] = {"weight_quant_mode": 0, "kv_cache_quant_mode": 0, "tile_size": 128}
DEFAULTS |= {"qc_qr_scale": 1.0, "kc_scale": 1.0}  # of attributes; a report lists the others
WRONG = ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError
CACHES, HEADED = ("kv_cache", "kr_cache"), ("query", "query_rope", "dequant_scale_q_nope")
SCALES = "W_uk: .*, times one number for each token$"  # what a report says of a proof
OF_LAYOUT = "cache_mode is_output_kv query_norm_flag token_x_dtype kv_cache_dtype".split()
OF_LAYOUT += [f"weight_{name}_dtype" for name in ("dq", "uq_qr", "dkv_kr")]
SOURCES = {"c_kv": ("kv_cache", "c_kv"), "k_pe": ("kr_cache", "k_pe"), "q_nope": ("query",)}


# -- a certificate


class Accepted(NamedTuple):
    """How many values were compared at how many points, and a chance above that of an error."""

    values: int
    points: int
    chance: float

    def __str__(self) -> str:
        shown = f"{self.values:,} values at {self.points} points, wrong by a chance"
        return f"{shown} below {self.chance:.0e}"


class Run:
    """A certificate at a point. Raises Refused where a claim does not hold.

    work    steps on elements that were done
    height  above the degrees, and the binary digits, of all polynomials that are compared: two that
            are not one are equal at a random point by a chance below it, of ``PRIMES``
    """

    def __init__(self, certificate: Any, call: Any, point: Point, weights: dict[int, Weight]):
        self.certificate, self.call, self.point = certificate, call, point
        self.values, self.results = list[Value](), dict[str, Num]()
        # moved, or times a number a token: which, and the number in it of each element, or -1
        self.of_result: dict[int, tuple[str, Any]] = {}
        self.height, self.work, heights, count = 0, 0, list[Height](), 0
        for place, (op, operands, *rest) in enumerate(certificate["values"]):
            given = [self.values[whole(index, 0, place - 1)] for index in operands]
            found = weights.get(place)  # the same at every point
            found = self.value(place, op, operands, given, rest) if found is None else found
            weights |= {place: found} if isinstance(found, Weight) else {}
            below = [heights[index] for index in operands]
            over, under = height_of(op, found, given, below)
            # functions compare what they are given, and so does a product with a weight
            self.height += sum(map(sum, below)) if (over, under) == (1, 0) or op == "matmul" else 0
            digits = 4 * len(str(rest)) if op in ("number", "root", "integers") else 0
            heights.append((over + digits, under + digits * (op != "integers")))
            self.values.append(found)
            count += found.nbytes
            self.work += STEPS.get(op, 1) * (found.size + sum(value.size for value in given))
            self.work += found.size * given[0].shape[-1] if op == "matmul" else 0
            refuse(max(count / MOST, place / MOST_VALUES, self.work / MOST_WORK) > 1, TOO_MANY)
        claimed = (heights[whole(claim["value"])] for claim in certificate["claims"])
        self.height = 2 * (self.height + sum(map(sum, claimed)))
        # the kernel's polynomials are of small degrees in its arguments: of these counts what is
        # above a leaf, with a denominator for each element, as no value need be made of them
        tops = ((*heights[at], self.values[at].size) for at in certificate["arguments"].values())
        self.height += 8 * sum(over - 1 + under * size for over, under, size in tops)
        self.count = sum(map(self.claimed, certificate["claims"]))

    def value(self, place: int, op: str, operands: Any, given: list[Any], rest: Any) -> Value:
        moved = [self.of_result[index] for index in operands if index in self.of_result]
        if op == "result":
            self.results = self.results or self.called()
            (shape, name), rows = rest, self.results[rest[1]]
            numbers = np.arange(math.prod(sizes_of(shape)))
            self.of_result[place] = name, np.where(numbers < rows.size, numbers, -1).reshape(shape)
            # of a buffer that is larger, the first rows are the kernel's
            behind = self.point.hashed("rest", numbers[rows.size :])
            return joined(rows.reshape(-1), behind).reshape(shape)
        if moved and op != "move" and not self.scales_tokens(op, operands):
            raise Refused(f"value {place} is computed from a result of the kernel")
        for name, of in moved:
            self.of_result[place] = name, self.point.move(of, *rest) if op == "move" else of
        refuse(op not in RULES, f"value {place} is of an operation that is not known")
        given = [self.point.drawn(value) for value in given] if op in OF_NUMBERS else given
        if op in ELEMENTWISE:
            sizes_of(np.broadcast_shapes(*(value.shape for value in given)), DRAWN)
        return RULES[op](self.point, *given, *([rest[0], place] if op == "leaf" else rest))

    def scales_tokens(self, op: str, operands: list[int]) -> bool:
        """Is it the query as it is given, each token of it times one number that is no result, as
        the fusion is said to go on?
        """
        shapes = {self.of_result.get(at, (None,))[0]: self.values[at].shape for at in operands}
        if not self.call["scales"] or op != "mul" or shapes.keys() != {"query", None}:
            return False
        own = {None: (1, 1), "query": self.results["query"].shape[-2:]}
        return all(shapes[name][-2:] == own[name] for name in own)

    def called(self) -> dict[str, Num]:
        arguments, call = self.certificate["arguments"], self.call
        refuse({*arguments.values()} & self.of_result.keys(), "the kernel is given a result")
        given = {name: self.values[whole(index)] for name, index in arguments.items()}
        kernel = Kernel(self.point, given, {**self.certificate["exact"]}, call)
        results = KERNELS[call["operator"]](kernel)
        if unread := kernel.exact.keys() | given.keys() - kernel.read:
            raise Refused(f"the kernel takes no {', '.join(unread)} in this format")
        dims = call["dims"] | {"N": call["dims"].get("N_padded", call["dims"].get("N"))}
        if wrong := [name for name, size in kernel.dims.items() if dims[name] != size]:
            raise Refused(f"{', '.join(wrong)} is another than that of the arguments")
        return results

    def claimed(self, claim: dict[str, Any]) -> int:
        place, result, name = claim["value"], claim["is"], claim["output"]
        source, numbers = self.of_result.get(result, ("", None))
        if place in self.of_result or source not in SOURCES.get(name, (name,)):
            raise Refused(f"{name} is not claimed of a value and of that result")
        a, b = (self.point.drawn(self.values[whole(index)]) for index in (place, result))
        refuse(not np.array_equal(a, b), f"{name} is not what the kernel gives")
        rows, numbers = self.results[source], numbers.ravel()
        every, is_rounded = np.arange(rows.size), self.call["attributes"].get("query_quant_mode")
        if source in HEADED:  # the first heads are the model's
            every, others = np.split(every.reshape(rows.shape), [self.call["dims"]["N"]], 1)
            refuse(not is_rounded and rows.reshape(-1)[others].any(), "heads beyond N are no zeros")
        given = numbers[: rows.size] if name in CACHES else np.sort(numbers)
        is_whole = numbers.size == b.size and np.array_equal(given, every.ravel())
        refuse(not is_whole, f"{name} is claimed in part, or in another order")
        return a.size


def all_claimed(certificate: Any, call: Any) -> None:
    """Raises Refused where not all is claimed, once, that the fusion replaces."""
    refuse(certificate["version"] != VERSION, "the certificate is of another version")
    claims = [(claim["place"], claim["output"]) for claim in certificate["claims"]]
    refuse(len(set(claims)) < len(claims) or not claims, "a value is claimed twice, or none is")
    caches, replaced = set(CACHES), [*enumerate(call["replaced"])]
    if not set(claims) <= {*replaced, *((None, name) for name in caches)}:
        raise Refused("another value is claimed than one that the fusion replaces")
    for place, name in replaced:
        if (place, name) not in claims and (name not in caches or (None, name) not in claims):
            raise Refused(f"nothing is claimed of {name}")
    caches -= {"kr_cache"} if call["attributes"].get("kv_cache_quant_mode") == 3 else set()
    refuse(call["in_place"] and caches - {name for _, name in claims}, "a cache is not claimed")


def proved(certificate: Any, call: Any, points: int, seed: str) -> Accepted:
    """What holds at so many points, or more until the chance is small. Raises Refused."""
    all_claimed(certificate, call)
    squares, weights = factors_of_roots(certificate), dict[int, Weight]()
    done, by_zero, chance, work = 0, 0, 1.0, 0
    while done < points or chance > CHANCE:
        try:
            run = Run(certificate, call, Point(f"{seed} {done} {by_zero}", squares), weights)
            done, work = done + 1, work + run.work
            # of both signs of each root a height is larger, and fewer primes are drawn
            chance = (run.height * 4 ** len(squares) / PRIMES) ** done
        except ZeroDivisionError:  # at one random point it may be chance
            # weights are numbered anew: those that were not reached would be as the first
            by_zero, weights = by_zero + 1, {}
        if by_zero > POINTS or done > MOST_POINTS or work > MOST_WORK:
            raise Refused("a quotient by 0" if by_zero > POINTS else "of too high a degree or size")
    return Accepted(run.count, done, chance)


def call_of(fusion: Any) -> dict[str, Any]:
    """What the report says of a fusion, as far as a proof depends on it."""
    call = {name: fusion[name] for name in ("operator", "attributes", "dims")}
    call["replaced"] = list(fusion["replaced"].values())
    call["in_place"] = fusion["placement"] == "in place"
    call["floors"] = any(text.startswith("no row comes near") for text in fusion["assumptions"])
    return call | {"scales": any(re.match(SCALES, text) for text in fusion["proof"])}


def checked(
    report: Any, points: int = POINTS, seed: str | None = None
) -> Iterator[tuple[str, Accepted | Refused]]:
    """Each fusion's layer, and what was found of it. Raises NoReport."""
    if not isinstance(report, dict) or not isinstance(report.get("fused"), list):
        raise NoReport("it has no list of fusions")
    known: dict[str, Accepted] = {}
    seed = os.urandom(16).hex() if seed is None else seed
    for fusion in report["fused"]:
        layer = str(fusion.get("layer")) if isinstance(fusion, dict) else "a fusion"
        try:
            refuse(fusion["certificate"] is None, "no certificate: not proved in exact arithmetic")
            place, call = whole(fusion["certificate"]), call_of(fusion)
            key = f"{place} {call}"
            known[key] = known.get(key) or proved(report["certificates"][place], call, points, seed)
            yield layer, known[key]
        except Refused as refusal:
            yield layer, refusal
        except WRONG as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            yield layer, Refused(f"no certificate of the known form ({said})")


def read(path: Path) -> Any:
    """Raises NoReport, OSError."""
    if path.stat().st_size > MOST_BYTES:
        raise NoReport("it is too large")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NoReport("it is no JSON") from error


def line(layer: str, found: Accepted | Refused) -> str:
    """One line, whatever the names in the report hold: nothing in it ends or overwrites a line."""
    text = f"{layer}: {'refused' if isinstance(found, Refused) else 'accepted'}: {found}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


if __name__ == "__main__":
    outcomes = [one for path in sys.argv[1:] for one in checked(read(Path(path)))]
    print("\n".join(line(*one) for one in outcomes))
    sys.exit(any(isinstance(found, Refused) for _, found in outcomes))
