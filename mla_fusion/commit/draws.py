"""Values of a region's leaves: seeded, and chosen to tell apart what ordinary numbers do not.

The kinds of draw:

* "normal": x from the standard normal distribution, its rows of different size, some of the size
  of an epsilon's root.
* "small", "large": floats of float64, for a run that rounds nothing. Rows of x span forty decades,
  from 1e-20 to 1e20, and so do those of float inputs that have no part. Of norm weights, those of
  "large" are 1e20 times as large: behind a norm, too, values span forty decades. Where a floor is
  taken for granted, rows are 1 and larger.
* "outliers": in every other row of x some channels are a hundred to ten thousand times as large;
  some elements and one row are exactly zero. Weights have channels far larger than the rest, so
  that latents have them, normed ones too.
* "edges": normal rows of x; integers and flags at the ends of what they may be, at residues of each
  modulus, and where floats of two bytes round.

Tables and scales are drawn once, tables with zeros, weights twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.commit.interpreter import widened
from mla_fusion.commit.region import Region, same_elements
from mla_fusion.fx.kinds import (
    MODEL_FLOATS,
    argument,
    holds_integers,
    is_cast,
    is_float,
    is_view,
    tensor_held,
    word,
)
from mla_fusion.fx.view import View
from mla_fusion.meta.number_formats import ELEMENTS
from mla_fusion.operators.known import dtype_of, shape_of, value_of
from mla_fusion.plan.plan import InPlace, Plan
from mla_fusion.prove.evaluate import same_attribute
from mla_fusion.reference import hifloat8

KINDS = ("normal", "outliers", "edges")
WIDE = ("small", "large")
_DECADES = 20  # from 1 to the largest, and to the smallest
# Largest integer of a leaf of which no reader says how large it may be. Each is tried where a step
# fails at the one before: far beyond what bfloat16 and int16 count exactly, then lengths of tables
# and sequences.
CEILINGS = (100_000, 2_048, 64, 8, 2, 1)
_ROUNDED = (255, 257, 511, 513, 2047, 2049, 4095, 4097)  # by bfloat16, and by float16
_INTEGERS = (torch.int16, torch.int32, torch.int64)
_ONE_BYTE = frozenset((torch.int8, torch.uint8, *ELEMENTS, torch.float8_e8m0fnu))
_INT8 = 40  # standard deviation of drawn int8 values
_OF_ONE = 127  # the e8m0 code of 1
# drawn anew each time; "" where they are integers or flags
_CHANGING = frozenset(("x", "slots", "token_scale", ""))


class Draws:
    """Draws the leaves of one region at one binding of its sizes."""

    def __init__(
        self,
        view: View,
        plan: Plan,
        region: Region,
        blocks: int | None,
        row_constant: bool,
        seed: int,
    ) -> None:
        """``blocks``: of a cache cut to fewer of them; ``row_constant``: kr_cache holds one number
        a row.
        """
        self.view, self.plan, self.region, self.blocks = view, plan, region, blocks
        self._format = plan.candidate.format
        self._generator = torch.Generator().manual_seed(seed)
        # prime length: no period lines up with a row
        self._pool = torch.randn(65537, generator=self._generator, dtype=torch.float32)
        self._row_constant = row_constant
        self._bounds = _bounds(view, region)
        self._edges = _edges(region)
        self._fixed: dict[object, Any] = {}
        self._place = {node: number for number, node in enumerate(region.leaves)}
        self._least = 0 if any(view.steps.floored(node) for node in region.nodes) else -_DECADES

    def values(self, kind: str, ceiling: int) -> dict[Node, Any]:
        """A value for each leaf."""
        values = dict(self._slots(kind))
        for node, role in self.region.leaves.items():
            if node not in values:
                values[node] = self._value(node, role, kind, ceiling)
        return values

    def changes(self, node: Node, wide: bool = False) -> bool:
        """Is this leaf drawn anew each time? ``wide``: among the draws of float64"""
        role = self.region.leaves[node]
        return (role in _CHANGING and not self._is_fixed(node)) or (wide and role in ("", "gamma"))

    def _is_fixed(self, node: Node) -> bool:
        value = node.meta["val"]
        return (
            self.region.leaves[node] == ""
            and isinstance(value, torch.Tensor)
            and is_float(value.dtype)
        )

    def _value(self, node: Node, role: str, kind: str, ceiling: int) -> Any:
        if self.changes(node):
            return self._drawn(node, node.meta["val"], role, kind, ceiling)
        known = same_attribute(node), role == "weight" and has_large_channels(kind)
        if known not in self._fixed:  # an attribute has one value, however often the graph reads it
            self._fixed[known] = self._drawn(node, node.meta["val"], role, kind, ceiling)
        if kind not in WIDE:
            return self._fixed[known]
        if (known, WIDE) not in self._fixed:
            self._fixed[known, WIDE] = widened(self._fixed[known])
        return self._scaled(self._fixed[known, WIDE], role, kind)

    def _scaled(self, value: Any, role: str, kind: str) -> Any:
        if role == "gamma" and kind == "large":
            return value * 10.0**_DECADES
        if role == "" and isinstance(value, torch.Tensor) and is_float(value.dtype) and value.dim():
            rows = value.shape[:-1] if value.dim() > 1 else value.shape
            return value * self._decades(math.prod(rows), kind).reshape(
                *rows, *(1,) * (value.dim() - len(rows))
            )
        return value

    def _decades(self, count: int, kind: str) -> torch.Tensor:
        """Scales over all decades, in any order."""
        scales = torch.logspace(self._least, _DECADES, count, dtype=torch.float64)
        if count == 1 and kind == "large":
            return scales.fill_(10.0**_DECADES)
        return scales[torch.randperm(count, generator=self._generator)]

    def _drawn(self, node: Node, value: Any, role: str, kind: str, ceiling: int) -> Any:
        if isinstance(value, (tuple, list)):  # the results of an operator that nothing is known of
            return type(value)(self._drawn(node, item, role, kind, ceiling) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        if role == "constant":
            constant = tensor_held(node)
            assert constant is not None
            return constant.detach().cpu()
        shape = self._shape(node, value, role)
        if role == "x":
            return self._tokens(shape, value.dtype, kind)
        if value.dtype == torch.bool or (role == "" and value.dtype in _INTEGERS):
            return self._integers(node, shape, value.dtype, kind, ceiling)
        drawn = self._numbers(node, shape, value.dtype, role)
        if role == "weight" and has_large_channels(kind) and value.dtype in MODEL_FLOATS:
            for axis in {0, len(shape) - 1}:
                for place, factor in zip(
                    (shape[axis] // 3, shape[axis] // 2), (60, 15), strict=True
                ):
                    drawn.select(axis, place).mul_(factor)
        return drawn

    def _shape(self, node: Node, value: torch.Tensor, role: str) -> tuple[int, ...]:
        shape = self.view.binding.shape(value.shape)
        if role != "cache" or self.blocks is None:
            return shape
        assert isinstance(self.plan.caches, InPlace)
        whole = self.view.binding.size(self.plan.caches.kv_shape[0])
        return (shape[0] * self.blocks // whole, *shape[1:])

    def _numbers(
        self, node: Node, shape: tuple[int, ...], dtype: torch.dtype, role: str
    ) -> torch.Tensor:
        pool, form = self._pool, self._format
        if role.startswith("one_"):
            return self._one(node, role).to(dtype).expand(shape).contiguous()
        if role == "cache" and self.plan.kv_cache_quant_mode == 3:
            # rows that are not written are compared as numbers too
            return torch.zeros(shape, dtype=dtype)
        elements = _INT8 if form is None or form.element == torch.int8 else 1
        if role in ("scale", "token_scale"):
            wanted = (1 + pool.clamp(-4, 4) / 8) / (elements * (32 if role == "scale" else 1))
            pool = wanted if form is None or not form.in_blocks else wanted.log2().round() + _OF_ONE
        elif form is not None and role in ("weight", "cache") and dtype == form.element:
            pool = _as_elements(pool, dtype)
        elif dtype == torch.int8:
            pool = (_INT8 * pool).clamp(-127, 127)
        elif dtype == torch.uint8:
            pool = (_INT8 * pool).abs()
        elif role == "weight":
            pool = (pool / 32).bfloat16()  # what a wider weight holds too
        elif role in ("cache_scale", "inverse"):
            pool = (1 + pool.clamp(-4, 4) / 8) * (_INT8 if role == "cache_scale" else 1 / _INT8)
        elif role == "gamma":
            pool = (1 + pool / 8).bfloat16()  # what a wider one holds too
        start = 4099 * self._place[node]
        if dtype.is_complex:
            parts = [_repeat(pool, shape, start + shift) for shift in (0, 17)]
            return torch.complex(*parts).to(dtype)
        is_codes = dtype == torch.float8_e8m0fnu
        drawn = _repeat(
            pool.to(torch.uint8).view(dtype) if is_codes else pool.to(dtype), shape, start
        )
        if not role and drawn.dim() > 1:  # a table: a sine is exactly 0 at position 0
            drawn.view(-1)[3::61] = 0
        is_kr = node in self.plan.caches.inputs[1:]
        return drawn[..., :1].expand(shape).contiguous() if self._row_constant and is_kr else drawn

    def _one(self, node: Node, role: str) -> torch.Tensor:
        """What a vector repeats: an offset, or a scale that bfloat16 holds, or the reciprocal of
        one.
        """
        number = self._pool[4099 * self._place[node] % len(self._pool)].clamp(-3, 3)
        if role == "one_offset":
            return (_INT8 * number).round()
        scale = ((1 + number / 8) / _INT8).bfloat16().float()
        return scale.reciprocal() if role == "one_inverse" else scale

    def _uniform(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float32)

    def _tokens(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
        tokens, width = math.prod(shape[:-1]), shape[-1]
        x = torch.randn((tokens, width), generator=self._generator, dtype=torch.float32)
        if dtype in ELEMENTS:
            return _as_elements(x, dtype).reshape(shape)
        if kind in WIDE:
            return (x * self._decades(tokens, kind).unsqueeze(1)).reshape(shape)
        if kind == "normal":
            # 0.0003 to 10, so that an epsilon weighs as much as some rows
            x = x * 10 ** (self._uniform((tokens, 1)) * 4.5 - 3.5)
        if kind == "outliers":
            channels = torch.randperm(width, generator=self._generator)[: max(2, width // 100)]
            x[::2, channels] *= 10 ** (2 + 2 * self._uniform((1, len(channels))))
            x = x * (self._uniform(x.shape) > 0.1)
            # a scale of zero divides zero by zero
            if tokens > 1 and not self.plan.candidate.weight_quant_mode:
                x[tokens // 2] = 0
        return x.to(dtype).reshape(shape)

    def _integers(
        self, node: Node, shape: tuple[int, ...], dtype: torch.dtype, kind: str, ceiling: int
    ) -> torch.Tensor:
        if dtype == torch.bool:
            if kind not in ("outliers", "edges") and shape:
                return self._uniform(shape) < 0.5
            return torch.full(shape, kind == "outliers", dtype=torch.bool)
        bound = self._bounds.get(node)
        limit = min(ceiling, torch.iinfo(dtype).max) if bound is None else max(bound - 1, 0)
        low = limit // 2 if kind == "edges" else 0
        drawn = torch.randint(low, limit + 1, shape, generator=self._generator)
        flat = drawn.reshape(-1)
        ends = {"outliers": (0, 0), "edges": (limit, 0)}.get(kind, (0, limit))
        if len(flat) == 1:
            flat[0] = {"outliers": 0, "edges": limit}.get(kind, min(1, limit))
        elif len(flat):
            edges = [edge for edge in self._edges if edge <= limit] if kind == "edges" else []
            for place, edge in zip(range(1, len(flat), 2), itertools.cycle(edges), strict=False):
                flat[place] = edge
            flat[0], flat[-1] = ends
        return flat.reshape(shape).to(dtype)

    def _slots(self, kind: str) -> dict[Node, torch.Tensor]:
        """Distinct rows of the cache, its first and its last among them."""
        caches = self.plan.caches
        if not isinstance(caches, InPlace) or caches.slots.span is not None:
            return {}
        blocks, size = self.view.binding.shape(caches.kv_shape[:2])
        rows = (self.blocks or blocks) * size
        leaves = [same_elements(node) for node in caches.slots.nodes]
        if caches.slots.in_sequences:
            return self._in_sequences(kind, caches.slots.block_size, rows, leaves)
        value = leaves[0].meta["val"]
        shape = self.view.binding.shape(value.shape)
        count = math.prod(shape)
        order = torch.randperm(max(rows - 2, 0), generator=self._generator) + 1
        ends = [0, rows - 1] if kind != "edges" else [rows - 1, 0]
        slots = torch.cat([torch.tensor(ends[: min(rows, 2)], dtype=torch.int64), order])
        none = torch.full((count,), -1, dtype=torch.int64)
        slots = slots[torch.arange(count) % len(slots)] if len(slots) else none
        if kind == "outliers":
            slots = slots[torch.randperm(count, generator=self._generator)]
        slots = slots.reshape(shape)
        if caches.slots.index is not None:
            return {leaves[0]: slots.to(value.dtype)}
        block, offset = leaves
        size = self.view.binding.size(caches.slots.block_size)
        shape = self.view.binding.shape_of(offset)
        return {
            block: (slots // size).to(value.dtype),
            offset: (slots % size).reshape(shape).to(dtype_of(offset)),
        }

    def _in_sequences(
        self, kind: str, block_size: Any, rows: int, leaves: list[Node]
    ) -> dict[Node, torch.Tensor]:
        """Places in sequences, and which sequences; no number is near where it stands already."""
        size, found = self.view.binding.size(block_size), dict[Node, torch.Tensor]()
        for leaf, limit in zip(reversed(leaves), (size, rows // size), strict=False):
            value = leaf.meta["val"]
            shape = self.view.binding.shape(value.shape)
            steps = torch.arange(math.prod(shape)) * (-1 if kind == "edges" else 1)
            first = {"edges": -1, "outliers": limit // 2}.get(kind, 0)
            found[leaf] = ((first + steps) % limit).reshape(shape).to(value.dtype)
        return found


def _edges(region: Region) -> list[int]:
    """Integers around each literal of a step, a modulus for one, and around those that floats of
    two bytes no longer tell apart.
    """
    given = {abs(arg) for node in region.nodes for arg in node.args if type(arg) is int}
    literals = sorted(number for number in given if 1 < number < CEILINGS[0])
    around = (edge for number in literals for edge in (number - 1, number, 2 * number - 1))
    return list(dict.fromkeys([*around, *_ROUNDED]))


def _as_elements(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers in a format of one byte."""
    if dtype == torch.int8:
        return (_INT8 * numbers).clamp(-127, 127).to(dtype)
    return hifloat8.encode(numbers) if dtype == torch.uint8 else numbers.to(dtype)


def rounds_nothing(region: Region) -> bool:
    """Is every number of a region a float of two bytes or more, an integer or a flag, so that
    float64 rounds none?
    """
    values = (node.meta["val"] for node in (*region.leaves, *region.nodes))
    return not any(isinstance(value, torch.Tensor) and value.dtype in _ONE_BYTE for value in values)


def has_large_channels(kind: str) -> bool:
    """Are weights drawn otherwise than in ordinary draws?"""
    return kind == "outliers"


def _repeat(pool: torch.Tensor, shape: Iterable[int], offset: int) -> torch.Tensor:
    shape = tuple(shape)
    size = math.prod(shape)
    # pairs are read as complex numbers where they start at an even place
    start = offset % len(pool) & ~15
    return pool.repeat((size + start) // len(pool) + 1)[start : start + size].reshape(shape)


def _bounds(view: View, region: Region) -> dict[Node, int]:
    """Of integer leaves that index an axis, through views and casts alone: how long it is."""
    leaf_of = {
        node: node for node, role in region.leaves.items() if role == "" and holds_integers(node)
    }
    found: dict[Node, int] = {}
    for node in region.nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and source in leaf_of and (is_view(node) or is_cast(node)):
            leaf_of[node] = leaf_of[source]
        for index, size in _indexed(node):
            if isinstance(index, Node) and index in leaf_of:
                leaf = leaf_of[index]
                found[leaf] = min(found.get(leaf, 1 << 62), view.binding.size(size))
    return found


def _indexed(node: Node) -> list[tuple[Any, Any]]:
    """Index tensors of a node, with the size of the axis that each picks from."""
    name = word(node)
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or not isinstance(value_of(base), torch.Tensor):
        return []
    shape: Sequence[Any] = shape_of(base)
    if name in ("index", "index_put"):
        indices: Any = node.args[1]
        return list(zip(indices, shape, strict=False))
    if name in ("index_select", "gather", "index_copy", "scatter"):
        return [(node.args[2], shape[argument(node, "dim", 0)])] if shape else []
    if name == "embedding":
        return [(node.args[1], shape[0])]
    return []
