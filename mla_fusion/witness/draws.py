"""Draws the values of leaves: seeded, and chosen to tell apart what ordinary numbers do not.

Kinds of draws:

normal        x is normal; its rows lie evenly between 0.0003 and 10, near the roots of epsilons
outliers      some channels of x, of every other row, are up to ten thousand times as large; some of
              its elements, and one row, are zero; weights have channels far larger than the others,
              so that latents have them behind a norm too; flags are true
edges         integers lie at the ends of what they may be, around literals of the graph (a modulus
              m: residues m - 1, 0 and 1), and where floats of two bytes round; flags are false
small, large  for float64 where nothing is quantised: rows of x span forty decades. In large, norm
              weights are 1e20 times as large: so do values behind a norm

Weights are drawn twice, tables (with zeros) and caches once, all else for each draw.

Roles of leaves:

x                activations, a row a token
weight, gamma    of a product; of a norm, or what else scales columns and is near 1
scale            of the columns of a quantised weight
token_scale      of the rows of a quantised x
cache_scale, inverse   of a quantised cache: 1 / step and step
cache            any numbers; "tiles": rows of tiles; "halves": rows of one number each
slots            distinct rows of the cache
block, place     block and place of distinct rows, apart
positions        places in blocks or sequences, distinct
sequences        distinct blocks, or sequences
table            numbers of blocks, from which ``positions`` pick
one_scale, one_inverse, one_offset   one number everywhere
""             floats are a table; integers and flags are anything that the graph runs for
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fusion.fx.kinds import MODEL_FLOATS, holds_integers, word
from mla_fusion.fx.sizes import Binding
from mla_fusion.operators.known import dtype_of, value_of
from mla_fusion.reference import hifloat8
from mla_fusion.witness.side import Unrunnable, cone_of

KINDS = ("normal", "outliers", "edges")
WIDE = ("small", "large")
CACHES = ("cache", "tiles", "halves")
_ROWS = ("slots", "block", "place", "positions", "sequences", "table")
_DECADES = 20
_HIGHEST = 100_000  # of an integer: far beyond what bfloat16 and int16 count exactly
_ROUNDED = (255, 257, 511, 513, 2047, 2049, 4095, 4097)  # by bfloat16, and by float16
_INT8 = 40  # standard deviation of drawn int8 values
_OF_ONE = 127  # the e8m0 code of 1
_FLOORS = ("clamp", "clamp_min", "maximum")
_OF_POOL = {  # normal numbers, and numbers near 1, as what a role has
    "weight": lambda pool, near: (pool / 32).bfloat16(),  # what a wider weight holds too
    "gamma": lambda pool, near: (1 + pool / 8).bfloat16(),
    "scale": lambda pool, near: near / 32,
    "token_scale": lambda pool, near: near,
    "cache_scale": lambda pool, near: near * _INT8,
    "inverse": lambda pool, near: near / _INT8,
    "one_scale": lambda pool, near: (near / _INT8).bfloat16().float(),
    "one_inverse": lambda pool, near: (near / _INT8).bfloat16().float().reciprocal(),
    "one_offset": lambda pool, near: (pool * _INT8).round(),
    "tiles": lambda pool, near: pool * 0,  # among any bytes some are no numbers
}


def changes(leaf: Node, role: str) -> bool:
    """Is the leaf drawn anew for each draw?"""
    return role in ("x", "token_scale", *_ROWS) or (role == "" and holds_integers(leaf))


class Draws:
    """Draws the leaves of one comparison at one binding.

    leaves            the role of each
    nodes             what is computed from them
    rows, block_size  of the caches: what slots count
    least             of large caches as many blocks are drawn as hold so many rows; None: all
    """

    def __init__(
        self,
        leaves: Mapping[Node, str],
        nodes: Sequence[Node],
        binding: Binding,
        rows: Any,
        block_size: Any,
        least: int | None,
        seed: int,
    ) -> None:
        self._leaves, self._binding = leaves, binding
        tensors = [leaf for leaf in leaves if isinstance(value_of(leaf), Tensor)]
        self._shapes = {leaf: binding.shape_of(leaf) for leaf in tensors}
        caches = {leaf: self._shapes[leaf] for leaf in tensors if leaves[leaf] in CACHES}
        whole = min((math.prod(shape[:-1]) for shape in caches.values()), default=1)
        self._rows = whole if rows is None else binding.size(rows)
        self._block = binding.size(block_size)
        if least is not None:
            parts = math.gcd(*(shape[0] for shape in caches.values()))
            kept = min(parts, -(-(least + 2 * self._block) * parts // self._rows))
            for leaf, (first, *rest) in caches.items():
                self._shapes[leaf] = first * kept // parts, *rest
            self._rows = self._rows * kept // parts
        self._generator = torch.Generator().manual_seed(seed)
        # of prime length: no period lines up with a row
        self._pool = torch.randn(65537, generator=self._generator)
        self._places = {leaf: 4099 * number for number, leaf in enumerate(leaves)}
        self._highest = {leaf: _HIGHEST for leaf, role in leaves.items() if role == ""}
        self._fixed: dict[tuple[Node, bool], Tensor] = {}
        literals = {abs(arg) for node in nodes for arg in node.args if type(arg) is int}
        around = ((m - 1, m, m + 1, 2 * m - 1) for m in sorted(literals) if m > 1)
        self._edges = [*itertools.chain(*around), *_ROUNDED]
        floors = any(word(node) in _FLOORS and not holds_integers(node) for node in nodes)
        self._least = 0 if floors else -_DECADES
        roles = {role: leaf for leaf, role in leaves.items()}
        is_int8 = "weight" in roles and dtype_of(roles["weight"]) == torch.int8
        self._element = _INT8 if is_int8 else 1
        self._is_quantised = not {"scale", "token_scale", "tiles"}.isdisjoint(roles)
        # how many blocks a sequence has, and whether there are more tokens than places in a block
        self._blocks, tokens = 1, 1
        if "table" in roles:
            self._blocks = self._shapes[roles["table"]][-1]
        if "positions" in roles:
            tokens = math.prod(self._shapes[roles["positions"]])
        self._crowded = tokens > self._block

    def values(self, kind: str) -> dict[Node, Any]:
        """A value for each leaf. Raises ``Unrunnable`` where there are more tokens than rows."""
        slots = torch.randperm(self._rows, generator=self._generator)
        if kind != "outliers":  # the first and the last, in turns
            ends = torch.tensor([0, self._rows - 1] if kind == "normal" else [self._rows - 1, 0])
            slots = torch.cat([ends, slots[~torch.isin(slots, ends)]])[: self._rows]
        return {leaf: self._value(leaf, role, kind, slots) for leaf, role in self._leaves.items()}

    def lower(self, failed: Node) -> bool:
        """After ``failed`` did not run: draw the integers above it lower from now on, to the next
        smaller size of what it reads. False where they are as low as they can be.
        """
        read = [node for node in failed.all_input_nodes if isinstance(value_of(node), Tensor)]
        sizes = [size - 1 for node in read for size in self._binding.shape_of(node)]
        lowered = False
        for leaf in self._highest.keys() & cone_of([failed], ())[1]:
            highest = self._highest[leaf]
            self._highest[leaf] = max([highest // 4, *(size for size in sizes if size < highest)])
            lowered |= highest > 0 and holds_integers(leaf)
        return lowered

    def _value(self, leaf: Node, role: str, kind: str, slots: Tensor) -> Any:
        if leaf not in self._shapes:
            return value_of(leaf)
        shape, dtype = self._shapes[leaf], dtype_of(leaf)
        if role in _ROWS:
            found = self._row_numbers(role, math.prod(shape), slots)
            if math.prod(shape) > len(found):
                raise Unrunnable(leaf, f"{len(found)} rows are fewer than tokens")
            return found[: math.prod(shape)].reshape(shape).to(dtype)
        if role == "x":
            return self._tokens(shape, dtype, kind)
        if dtype == torch.bool:
            random = torch.rand(shape, generator=self._generator) < 0.5
            return random if kind == "normal" and shape else torch.full(shape, kind == "outliers")
        if role == "" and holds_integers(leaf) and dtype.itemsize > 1:
            return self._integers(shape, dtype, kind, self._highest[leaf])
        large = role == "weight" and kind == "outliers"
        known = leaf, large
        if known not in self._fixed or role == "token_scale":
            self._fixed[known] = self._numbers(shape, dtype, role, self._places[leaf])
            for axis in {0, len(shape) - 1} if large and dtype in MODEL_FLOATS else ():
                self._fixed[known].select(axis, shape[axis] // 3).mul_(60)
                self._fixed[known].select(axis, shape[axis] // 2).mul_(15)
        found = self._fixed[known]
        return found.double() * 10.0**_DECADES if (role, kind) == ("gamma", "large") else found

    def _numbers(self, shape: tuple[int, ...], dtype: torch.dtype, role: str, start: int) -> Tensor:
        pool = self._pool
        if role in _OF_POOL:
            pool = _OF_POOL[role](pool, 1 + pool.clamp(-4, 4) / 8)
        if role in ("scale", "token_scale"):
            pool = pool / self._element
            if dtype.itemsize == 1:
                pool = (pool.log2().round() + _OF_ONE).to(torch.uint8).view(dtype)
        elif dtype.itemsize == 1:
            pool = _as_elements(pool, dtype)
        if dtype.is_complex:
            pool = torch.complex(pool, pool.roll(17))
        if role.startswith("one_"):
            pool = pool[start % len(pool)]
            return pool.to(dtype).expand(shape).contiguous()
        count = math.prod(shape)
        start = start % len(pool) & ~15  # pairs, read as complex numbers, start at an even place
        drawn = pool.to(dtype).repeat((count + start) // len(pool) + 1)[start : start + count]
        if role in ("", "scale") and dtype.itemsize > 1:
            drawn[3::61] = 0  # a sine is 0 at position 0
        drawn = drawn.reshape(shape)
        return drawn[..., :1].expand(shape).contiguous() if role == "halves" else drawn

    def _tokens(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
        tokens, width = math.prod(shape[:-1]), shape[-1]
        x = torch.randn((tokens, width), generator=self._generator)
        order = torch.randperm(tokens, generator=self._generator)
        if dtype.itemsize == 1:
            return _as_elements(x, dtype).reshape(shape)
        if kind in WIDE:
            sizes = torch.logspace(self._least, _DECADES, tokens + 2, dtype=torch.float64)
            sizes = sizes[:-2] if kind == "small" else sizes[2:]
            return (x * sizes[order].unsqueeze(1)).reshape(shape)
        if kind == "normal":
            sizes = torch.logspace(-3.5, 1, tokens) if tokens > 1 else torch.tensor([1e-3])
            x = x * sizes[order].unsqueeze(1)
        if kind == "outliers":
            channels = torch.randperm(width, generator=self._generator)[: max(2, width // 100)]
            x[::2, channels] *= torch.logspace(2, 4, len(channels))
            x[torch.rand(x.shape, generator=self._generator) < 0.1] = 0
            if tokens > 1 and not self._is_quantised:  # a row's scale of 0 would divide 0 by 0
                x[tokens // 2] = 0
        return x.to(dtype).reshape(shape)

    def _integers(
        self, shape: tuple[int, ...], dtype: torch.dtype, kind: str, highest: int
    ) -> Tensor:
        limit = min(highest, torch.iinfo(dtype).max)
        low = limit // 2 if kind == "edges" else 0
        flat = torch.randint(low, limit + 1, (math.prod(shape),), generator=self._generator)
        edges = [edge for edge in self._edges if edge <= limit] if kind == "edges" else []
        for place, edge in zip(range(1, len(flat), 2), itertools.cycle(edges), strict=False):
            flat[place] = edge
        flat[-1:] = 0 if kind == "outliers" else limit
        lone = len(flat) == 1 and kind != "outliers"
        flat[:1] = limit if kind == "edges" else min(lone, limit)
        return flat.reshape(shape).to(dtype)

    def _row_numbers(self, role: str, count: int, slots: Tensor) -> Tensor:
        """``slots``: all rows, in the order of this draw."""
        size, blocks = self._block, self._blocks
        every = slots[slots < self._rows // size]
        if role == "table":
            numbers = torch.arange(count)
            shift = 0 if self._crowded else numbers // blocks
            return every[(numbers + shift) % blocks % len(every)]
        if role == "positions" and self._crowded:
            return slots[slots < size * min(blocks, len(every))]
        if role == "positions":  # their places are distinct, whatever the block
            found = slots[slots < size]
            return found + size * (slots[: len(found)] % blocks)
        named = {"block": slots // size, "place": slots % size, "sequences": every}
        return named.get(role, slots)


def _as_elements(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers in a format of one byte; uint8 is hifloat8."""
    if dtype == torch.int8:
        return (_INT8 * numbers).clamp(-127, 127).to(dtype)
    return hifloat8.encode(numbers) if dtype == torch.uint8 else numbers.to(dtype)
