"""Draws the values of leaves: seeded, and chosen to tell apart what ordinary numbers do not.

Kinds of draws:

normal        x is normal; its rows lie evenly between 0.0003 and 10, near the roots of epsilons
outliers      some channels of x, of every other row, are up to ten thousand times as large; some of
              its elements, and one row, are zero; weights have channels far larger than the others,
              so that latents have them behind a norm too; flags are true
edges         integers lie at the ends of what they may be, around literals of the graph (a modulus
              m: residues m - 1, 0 and 1), and where floats of two bytes round; flags are false
small, large  for float64 where nothing is quantised: rows of x, and of tables, span forty decades.
              In large, norm weights are 1e20 times as large: so do values behind a norm

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fusion.fx.kinds import MODEL_FLOATS, holds_integers, is_float, word
from mla_fusion.fx.sizes import Binding
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.reference import hifloat8
from mla_fusion.witness.interpreter import Unrunnable, widened

KINDS = ("normal", "outliers", "edges")
WIDE = ("small", "large")
CACHES = ("cache", "tiles", "halves")
CHANGING = frozenset(("x", "token_scale", "slots", "block", "place", "positions", "sequences"))
_ROWS = ("slots", "block", "place", "positions", "sequences", "table")
_DECADES = 20
_HIGHEST = 100_000  # of an integer: far beyond what bfloat16 and int16 count exactly
_ROUNDED = (255, 257, 511, 513, 2047, 2049, 4095, 4097)  # by bfloat16, and by float16
_INT8 = 40  # standard deviation of drawn int8 values
_OF_ONE = 127  # the e8m0 code of 1
_FLOORS = ("clamp", "clamp_min", "maximum")


def changes(node: Node, role: str) -> bool:
    """Is the leaf drawn anew for each draw?"""
    return role in CHANGING or (role == "" and holds_integers(node))


class Draws:
    """Draws the leaves of one comparison at one binding.

    rows, block_size  of the caches: what slots count
    leaves            the role of each
    nodes             what is computed from them
    shapes            of leaves that are drawn smaller than the graph says
    """

    def __init__(
        self,
        leaves: Mapping[Node, str],
        nodes: Sequence[Node],
        binding: Binding,
        shapes: Mapping[Node, tuple[int, ...]],
        rows: int,
        block_size: int,
        seed: int,
    ) -> None:
        self.leaves, self._binding, self._shapes = leaves, binding, shapes
        self._rows, self._block = rows, block_size
        self._generator = torch.Generator().manual_seed(seed)
        # of prime length: no period lines up with a row
        self._pool = torch.randn(65537, generator=self._generator)
        self._places = {node: 4099 * number for number, node in enumerate(leaves)}
        self._highest = dict.fromkeys(leaves, _HIGHEST)
        self._fixed: dict[tuple[Node, bool], Any] = {}
        literals = {abs(arg) for node in nodes for arg in node.args if type(arg) is int}
        around = ((edge - 1, edge, edge + 1, 2 * edge - 1) for edge in sorted(literals) if edge > 1)
        self._edges = list(dict.fromkeys([*itertools.chain(*around), *_ROUNDED]))
        floors = any(word(node) in _FLOORS and not holds_integers(node) for node in nodes)
        self._least = 0 if floors else -_DECADES
        is_int8 = any(
            role == "weight" and node.meta["val"].dtype == torch.int8
            for node, role in leaves.items()
        )
        self._element = _INT8 if is_int8 else 1
        self._is_quantised = not {"scale", "token_scale", "tiles"}.isdisjoint(leaves.values())
        sizes = {role: self._shape(node) for node, role in leaves.items() if role in _ROWS}
        # how many blocks a sequence has, and whether there are more tokens than places in a block
        self._table = (
            sizes.get("table", (1,))[-1],
            math.prod(sizes.get("positions", ())) > block_size,
        )

    def values(self, kind: str) -> dict[Node, Any]:
        """A value for each leaf. Raises ``Unrunnable`` where there are more tokens than rows."""
        slots = torch.randperm(self._rows, generator=self._generator)
        if kind != "outliers" and self._rows > 1:  # the first and the last, in turns
            ends = [0, self._rows - 1][:: -1 if kind == "edges" else 1]
            inner = slots[(slots != 0) & (slots != self._rows - 1)]
            slots = torch.cat([torch.tensor(ends), inner])
        return {
            node: self._row_numbers(node, role, slots)
            if role in _ROWS
            else self._value(node, role, kind)
            for node, role in self.leaves.items()
        }

    def lower(self, failed: Node) -> bool:
        """After ``failed`` did not run: draw the integers that it reads lower from now on, to the
        next smaller size of what it reads. False where they are as low as they can be.
        """
        above, stack = set[Node](), [failed]
        while stack:
            for read in stack.pop().all_input_nodes:
                if read not in above and holds_integers(read):
                    above.add(read)
                    stack += () if read in self.leaves else (read,)
        read = [node for node in failed.all_input_nodes if isinstance(value_of(node), Tensor)]
        sizes = [size - 1 for node in read for size in self._binding.shape_of(node)]
        lowered = False
        for leaf in above & self.leaves.keys():
            highest = self._highest[leaf]
            if self.leaves[leaf] == "" and highest > 0:
                lower = (size for size in sizes if size < highest)
                self._highest[leaf] = max([highest // 4, *lower])
                lowered = True
        return lowered

    def _shape(self, node: Node) -> tuple[int, ...]:
        return self._shapes.get(node) or self._binding.shape(shape_of(node))

    def _value(self, node: Node, role: str, kind: str) -> Any:
        value = value_of(node)
        if not isinstance(value, Tensor):
            return value
        if changes(node, role):
            return self._drawn(node, role, kind)
        large = role == "weight" and kind == "outliers"
        if (node, large) not in self._fixed:
            self._fixed[node, large] = self._drawn(node, role, kind)
        found = self._fixed[node, large]
        if kind not in WIDE:
            return found
        found = widened(found)
        if role == "gamma" and kind == "large":
            return found * 10.0**_DECADES
        if role == "" and is_float(found.dtype) and found.dim():
            rows = found.shape[:-1] if found.dim() > 1 else found.shape
            decades = self._decades(math.prod(rows), kind).reshape(rows)
            return found * (decades if found.dim() == 1 else decades.unsqueeze(-1))
        return found

    def _drawn(self, node: Node, role: str, kind: str) -> Tensor:
        shape, dtype = self._shape(node), value_of(node).dtype
        if role == "x":
            return self._tokens(shape, dtype, kind)
        if dtype == torch.bool or (role == "" and holds_integers(node) and dtype.itemsize > 1):
            return self._integers(shape, dtype, kind, self._highest[node])
        drawn = self._numbers(node, shape, dtype, role)
        if role == "weight" and kind == "outliers" and dtype in MODEL_FLOATS:
            for axis in {0, len(shape) - 1}:
                for place, factor in ((shape[axis] // 3, 60), (shape[axis] // 2, 15)):
                    drawn.select(axis, place).mul_(factor)
        return drawn

    def _numbers(self, node: Node, shape: tuple[int, ...], dtype: torch.dtype, role: str) -> Tensor:
        pool, start = self._pool, self._places[node]
        near_one = 1 + pool.clamp(-4, 4) / 8
        if role == "tiles":  # of any bytes, some are no numbers
            return torch.zeros(shape, dtype=dtype)
        if role.startswith("one_"):
            return self._one(start, role).to(dtype).expand(shape).contiguous()
        if role in ("scale", "token_scale"):
            pool = near_one / (self._element * (32 if role == "scale" else 1))
            if dtype.itemsize == 1:
                pool = pool.log2().round() + _OF_ONE
        elif dtype.itemsize == 1:
            pool = _as_elements(pool, dtype)
        elif role == "weight":
            pool = (pool / 32).bfloat16()  # what a wider weight holds too
        elif role in ("cache_scale", "inverse"):
            pool = near_one * (_INT8 if role == "cache_scale" else 1 / _INT8)
        elif role == "gamma":
            pool = (1 + pool / 8).bfloat16()
        if dtype.is_complex:
            parts = [_repeated(pool, shape, start + shift) for shift in (0, 17)]
            return torch.complex(*parts).to(dtype)
        codes = dtype == torch.float8_e8m0fnu
        drawn = _repeated(
            pool.to(torch.uint8).view(dtype) if codes else pool.to(dtype), shape, start
        )
        if (role == "" and drawn.dim() > 1) or (role == "scale" and dtype.itemsize > 1):
            drawn.view(-1)[3::61] = 0  # a sine is 0 at position 0
        return drawn[..., :1].expand(shape).contiguous() if role == "halves" else drawn

    def _one(self, start: int, role: str) -> Tensor:
        """What a vector repeats: an offset, or a scale that bfloat16 holds, or the reciprocal of
        one.
        """
        number = self._pool[start % len(self._pool)].clamp(-3, 3)
        if role == "one_offset":
            return (_INT8 * number).round()
        scale = ((1 + number / 8) / _INT8).bfloat16().float()
        return scale.reciprocal() if role == "one_inverse" else scale

    def _tokens(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
        tokens, width = math.prod(shape[:-1]), shape[-1]
        x = torch.randn((tokens, width), generator=self._generator)
        if dtype.itemsize == 1:
            return _as_elements(x, dtype).reshape(shape)
        if kind in WIDE:
            return (x * self._decades(tokens, kind).unsqueeze(1)).reshape(shape)
        if kind == "normal":
            sizes = torch.logspace(-3.5, 1, tokens) if tokens > 1 else torch.tensor([1e-3])
            x = x * sizes[torch.randperm(tokens, generator=self._generator)].unsqueeze(1)
        if kind == "outliers":
            channels = torch.randperm(width, generator=self._generator)[: max(2, width // 100)]
            x[::2, channels] *= 10 ** (2 + 2 * self._uniform((1, len(channels))))
            x = x * (self._uniform(x.shape) > 0.1)
            if tokens > 1 and not self._is_quantised:  # a row's scale of 0 would divide 0 by 0
                x[tokens // 2] = 0
        return x.to(dtype).reshape(shape)

    def _integers(
        self, shape: tuple[int, ...], dtype: torch.dtype, kind: str, highest: int
    ) -> Tensor:
        if dtype == torch.bool:
            if kind not in ("outliers", "edges") and shape:
                return self._uniform(shape) < 0.5
            return torch.full(shape, kind == "outliers")
        limit = min(highest, torch.iinfo(dtype).max)
        low = limit // 2 if kind == "edges" else 0
        flat = torch.randint(low, limit + 1, (math.prod(shape),), generator=self._generator)
        ends = {"outliers": (0, 0), "edges": (limit, 0)}.get(kind, (0, limit))
        if len(flat) == 1:
            flat[0] = min(1, limit) if kind in ("normal", *WIDE) else ends[0]
        elif len(flat):
            edges = [edge for edge in self._edges if edge <= limit] if kind == "edges" else []
            for place, edge in zip(range(1, len(flat), 2), itertools.cycle(edges), strict=False):
                flat[place] = edge
            flat[0], flat[-1] = ends
        return flat.reshape(shape).to(dtype)

    def _row_numbers(self, node: Node, role: str, slots: Tensor) -> Tensor:
        """``slots``: all rows, in the order of this draw."""
        shape, size = self._shape(node), self._block
        count, blocks = math.prod(shape), self._rows // size
        every = slots[slots < blocks]
        width, crowded = self._table
        if role == "table":
            of_row = torch.arange(count) // width
            found = every[(torch.arange(count) + (0 if crowded else of_row)) % width % blocks]
        elif role == "sequences":
            found = every
        elif role == "positions" and not crowded:  # their places are distinct, whatever the block
            found = slots[slots < size]
            found = found + size * (slots[: len(found)] % width)
        elif role == "positions":
            found = slots[slots < size * min(width, blocks)]
        else:
            found = {"block": slots // size, "place": slots % size}.get(role, slots)
        if count > len(found):
            raise Unrunnable(node, f"{count} tokens have {len(found)} rows to lie in")
        return found[:count].reshape(shape).to(node.meta["val"].dtype)

    def _uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def _decades(self, count: int, kind: str) -> Tensor:
        """Scales over all decades, in any order."""
        scales = torch.logspace(self._least, _DECADES, count, dtype=torch.float64)
        if count == 1 and kind == "large":
            return scales.fill_(10.0**_DECADES)
        return scales[torch.randperm(count, generator=self._generator)]


def _as_elements(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers in a format of one byte; uint8 is hifloat8."""
    if dtype == torch.int8:
        return (_INT8 * numbers).clamp(-127, 127).to(dtype)
    return hifloat8.encode(numbers) if dtype == torch.uint8 else numbers.to(dtype)


def _repeated(pool: Tensor, shape: Iterable[int], offset: int) -> Tensor:
    shape = tuple(shape)
    size = math.prod(shape)
    # pairs are read as complex numbers where they start at an even place
    start = offset % len(pool) & ~15
    return pool.repeat((size + start) // len(pool) + 1)[start : start + size].reshape(shape)
