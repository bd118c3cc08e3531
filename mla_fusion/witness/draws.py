"""Draws the values of leaves for ``compare.py``.

The values are seeded, and chosen to show what ordinary numbers do not.

Kinds of draws:

normal        x is normal; its rows spread in size from 0.0003 to 10, near the roots of epsilons
outliers      In every other row of x, some channels are up to ten thousand times as large. Some
              elements and one row are zero. Weights have channels far larger than the others, so
              that latents have them after a norm too. Flags are true.
edges         Integers lie at the ends of their ranges, around literals of the graph (for a modulus
              m: residues m - 1, 0 and 1), and where floats of two bytes round. Flags are false.
small, large  Drawn in float64 if nothing is quantised. Rows of x span forty decades. In large,
              norm weights are 1e20 times as large, and so are the values after a norm.

Weights are drawn twice, tables (with zeros) and caches once, everything else for each draw.

Roles of leaves:

x                activations, one row for each token
weight           the weight of a product
gamma            the weight of a norm, or what else scales columns and is near 1
scale            scales of the columns of a quantised weight
token_scale      scales of the rows of a quantised x
cache_scale      for a quantised cache: 1 / step
cache            any numbers; "tiles": rows of tiles; "halves": rows of one number each
slots            distinct rows of the cache
block, place     block and place of distinct rows, as two leaves
positions        distinct places in blocks or sequences; "positions -1 4": 4 are counted from each,
                 the first of which is less by 1; "positions -1": as many as each has tokens
sequences        distinct blocks, or sequences
table            numbers of blocks, from which ``positions`` pick
""               floats are a table; integers and flags are anything for which the graph runs
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fusion.fx.kinds import MODEL_FLOATS, dtype_of, holds_integers, value_of, word
from mla_fusion.fx.sizes import Binding, sizes_of
from mla_fusion.reference import hifloat8
from mla_fusion.witness.side import Nodes, Unrunnable, Values, cone_of

KINDS: tuple[str, ...] = ("normal", "outliers", "edges")
WIDE = ("small", "large")
CACHES = ("cache", "tiles", "halves")
_DECADES = 20
_LARGEST_INTEGER = 100_000  # far beyond what bfloat16 and int16 count exactly
_FIRST_ROUNDED = (255, 257, 511, 513, 2047, 2049)  # integers that bfloat16 and float16 round
_INT8 = 40  # standard deviation of drawn int8 values
_CODE_OF_ONE = 127  # the e8m0 code of 1
_FLOORS = ("clamp", "clamp_min", "maximum")
_NUMBERS = {  # by role: are its numbers near 1 rather than around 0, and their factor
    "weight": (False, 1 / 32),
    "gamma": (True, 1),
    "scale": (True, 1 / 32 / _INT8),
    "token_scale": (True, 1 / 4),
    "cache_scale": (True, _INT8),
    "tiles": (False, 0),  # zeros: arbitrary bytes may be NaN
}


class Draws:
    """Draws the leaves of one comparison at one binding.

    leaves            the role of each leaf
    nodes             the nodes that are computed from them
    rows, block_size  sizes of the caches that slots count
    least             for large caches, draw only blocks for so many rows; 0: draw all
    """

    def __init__(
        self,
        leaves: Mapping[Node, str],
        nodes: Nodes,
        binding: Binding,
        rows: Any,
        block_size: Any,
        least: int,
    ) -> None:
        self._leaves, self._binding = leaves, binding
        self._shapes = {
            leaf: binding.shape_of(leaf) for leaf in leaves if isinstance(value_of(leaf), Tensor)
        }
        caches = {leaf: shape for leaf, shape in self._shapes.items() if leaves[leaf] in CACHES}
        self._rows, self._block = binding.size(rows), binding.size(block_size)
        if least:
            part_count = math.gcd(*(shape[0] for shape in caches.values()))
            roles = {role.partition(" ")[0] for role in leaves.values()}
            has_sequences = "positions" in roles and "table" not in roles  # a part for each
            needed = -(-(least + 2 * self._block) * part_count // self._rows)
            kept_parts = min(part_count, max(needed, least if has_sequences else 0))
            for leaf, (block_count, *row_shape) in caches.items():
                self._shapes[leaf] = block_count * kept_parts // part_count, *row_shape
            self._rows = self._rows * kept_parts // part_count
        self._generator = torch.Generator().manual_seed(0)
        # prime length, so that no period lines up with a row
        self._pool = torch.randn(65537, generator=self._generator, dtype=torch.float32)
        self._highest: dict[Node, int] = {}
        self._end = self._rows  # slots are below this
        self._fixed: dict[tuple[Node, torch.dtype, str], Tensor] = {}
        literals = sorted(
            {
                abs(arg)
                for node in nodes
                if any(map(holds_integers, node.all_input_nodes))
                for arg in node.args
                if isinstance(arg, int) and abs(arg) > 1
            }
        )
        around = (edge for m in literals for edge in (m - 1, m, m + 1, 2 * m - 1))
        self._edges = [*around, *_FIRST_ROUNDED]
        self._ones = itertools.cycle([1, *literals])
        has_floor = any(word(node) in _FLOORS and not holds_integers(node) for node in nodes)
        self._least = 0 if has_floor else -_DECADES
        by_role = {leaves[leaf]: shape for leaf, shape in self._shapes.items()}
        self._token_count = math.prod(by_role.get("x", ())[:-1])
        self._is_quantised = not {"scale", "token_scale", "tiles"}.isdisjoint(by_role)
        self._table = by_role.get("table", (1,))

    def values(self, kind: str) -> Values:
        """Returns a value for each leaf of a kind of draw.

        Raises ``Unrunnable`` if there are more tokens than rows.
        """
        slots = torch.randperm(self._rows, generator=self._generator)
        end = self._rows - 1 if kind == "edges" else 0
        slots[slots == end], slots[0] = slots[0].clone(), end
        slots = slots[slots < self._end]
        size, blocks = self._block, self._table[-1]
        block_numbers = slots[slots < max(1, self._rows // size)]
        rows = {
            "slots": slots,
            "block": slots // size,
            "place": slots % size,
            "positions": slots[slots < size * min(blocks, len(block_numbers))],
            "sequences": block_numbers,
            "table": block_numbers[self._order_of_blocks(len(block_numbers))],
        }
        return {leaf: self._value(leaf, role, kind, rows) for leaf, role in self._leaves.items()}

    def _order_of_blocks(self, count: int) -> Tensor:
        """Returns places among so many blocks, for each entry of the table.

        One order serves all sequences, so that distinct positions name distinct slots. If positions
        are counted, sequences have blocks of their own if there are enough.
        """
        entries = torch.arange(math.prod(self._table))
        is_counted = any(role.startswith("positions ") for role in self._leaves.values())
        if not is_counted or len(entries) > count:
            entries = entries % self._table[-1]
        return entries % count

    def lower_integers(self, failed_node: Node) -> bool:
        """Draws the integers above a node lower from now on, after the node did not run.

        They become lower than the next smaller size of what the node reads. Returns False if they
        cannot be lower.
        """
        sizes_read = [size for node in failed_node.all_input_nodes for size in sizes_of(node)]
        sizes = self._binding.shape(sizes_read)
        leaves_above = cone_of([failed_node], ())[1]
        integers_above = [leaf for leaf in leaves_above if self._highest.get(leaf)]
        for leaf in integers_above:
            highest = self._highest[leaf]
            lower = [size - 1 for size in sizes if 0 < size <= highest]
            if highest + 1 in sizes or not lower:  # something may be added to them
                lower.append(highest * 3 // 4)
            self._highest[leaf] = max(lower)
        if integers_above:
            return True
        # slots may be places in a table, or something may be added to them
        lower_ends = (size for size in (*sizes, self._end * 3 // 4) if size < self._end)
        end = max(lower_ends, default=0)
        roles_above = {self._leaves.get(leaf, "").partition(" ")[0] for leaf in leaves_above}
        if end > 1 and not roles_above.isdisjoint(("slots", "positions")):
            self._end = end
            return True
        return False

    def _value(self, leaf: Node, role: str, kind: str, rows: Mapping[str, Tensor]) -> Any:
        """Returns the value of one leaf."""
        if leaf not in self._shapes:
            return value_of(leaf)
        shape, dtype = self._shapes[leaf], dtype_of(leaf)
        count = math.prod(shape)
        if kind in WIDE and dtype in MODEL_FLOATS:
            dtype = torch.float64
        role, _, counted = role.partition(" ")
        if role in rows:
            drawn = rows[role]
            if counted:
                first, *steps = map(int, counted.split())
                (step,) = steps or [max(1, self._token_count // count)]
                drawn = drawn[(drawn % step == 0) & (drawn + step <= len(drawn))] - first
            drawn = drawn[:count]
            # each start has a sequence of its own, whose blocks are no other's
            is_apart = counted and math.prod(self._table) <= len(rows["sequences"])
            if len(drawn) < count <= self._token_count and not (is_apart and len(drawn)):
                raise Unrunnable(leaf, f"{len(drawn)} rows are fewer than tokens")
            drawn = drawn.repeat(-(-count // len(drawn)))[:count]  # not all are read
        elif role == "x":
            drawn = self._tokens(count // shape[-1], shape[-1], kind, dtype.itemsize == 1)
        elif dtype == torch.bool:
            true_share = {"outliers": 1.0, "edges": 0.0}.get(kind, 0.5)
            drawn = torch.rand(count, generator=self._generator, dtype=torch.float32) < true_share
        elif role == "" and holds_integers(leaf) and dtype.itemsize > 1:
            highest = self._highest.setdefault(leaf, min(_LARGEST_INTEGER, torch.iinfo(dtype).max))
            drawn = self._integers(count, kind, highest)
        else:
            large = kind if (role, kind) in (("weight", "outliers"), ("gamma", "large")) else ""
            key = leaf, dtype, large
            if key not in self._fixed:
                self._fixed[key] = self._numbers(shape, dtype, role, large)
            return self._fixed[key]
        return _as_elements(drawn, dtype).reshape(shape)

    def _numbers(self, shape: Sequence[int], dtype: torch.dtype, role: str, large: str) -> Tensor:
        """Returns floats for a role, in a dtype and shape."""
        pool, start = self._pool, 4099 * len(self._fixed)
        if role in _NUMBERS:
            is_near_one, factor = _NUMBERS[role]
            pool = (1 + pool.clamp(-4, 4) / 8 if is_near_one else pool) * factor
            pool = pool.bfloat16().float()  # wider dtypes hold the same numbers
        if role in ("scale", "token_scale") and dtype.itemsize == 1:
            pool = (pool.log2().round() + _CODE_OF_ONE).to(torch.uint8).view(dtype)
        if dtype.is_complex:
            pool = torch.complex(pool, pool.roll(17))
        count, start = math.prod(shape), start % len(pool) & ~15  # pairs start at an even place
        pool = _as_elements(pool, dtype)
        drawn = pool.repeat((count + start) // len(pool) + 1)[start : start + count]
        if role in ("", "scale") and dtype.itemsize > 1:
            drawn[3::61] = 0  # a sine is 0 at position 0
        drawn = drawn.reshape(shape)
        if role == "halves":
            drawn = drawn[..., :1].expand(shape).contiguous()
        if large and role == "gamma":
            drawn *= 10.0**_DECADES
        for axis in {0, len(shape) - 1} if large and shape and dtype in MODEL_FLOATS else ():
            drawn.select(axis, shape[axis] // 3).mul_(60)
            drawn.select(axis, shape[axis] // 2).mul_(15)
        return drawn

    def _tokens(self, tokens: int, width: int, kind: str, is_one_byte: bool) -> Tensor:
        """Returns rows of x."""
        x = torch.randn((tokens, width), generator=self._generator, dtype=torch.float64)
        if is_one_byte:
            return x
        if kind not in ("outliers", "edges"):
            ends = {"small": (self._least, _DECADES), "large": (_DECADES, self._least)}
            first, last = ends.get(kind, (-3.5, 1))
            sizes = torch.logspace(first, last, tokens, dtype=torch.float64)
            x = x * sizes[torch.randperm(tokens, generator=self._generator)].unsqueeze(1)
        if kind == "outliers":
            x[::2, 3::100] *= torch.logspace(2, 4, len(range(3, width, 100)), dtype=torch.float32)
            x[torch.rand(x.shape, generator=self._generator, dtype=torch.float32) < 0.1] = 0
            if tokens > 1 and not self._is_quantised:  # a row's scale of 0 would divide 0 by 0
                x[tokens // 2] = 0
        return x

    def _integers(self, count: int, kind: str, limit: int) -> Tensor:
        """Returns ``count`` integers from 0 to ``limit``."""
        low = limit // 2 if kind == "edges" else 0
        integers = torch.randint(low, limit + 1, (count,), generator=self._generator)
        edges = [edge for edge in self._edges if edge <= limit] if kind == "edges" else []
        for place, edge in zip(range(1, count, 2), itertools.cycle(edges), strict=False):
            integers[place] = edge
        integers[-1:] = 0 if kind == "outliers" else limit
        first = next(self._ones) if count == 1 and kind != "outliers" else 0
        integers[:1] = limit if kind == "edges" else min(first, limit)
        return integers


def _as_elements(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns standard normal numbers in a dtype. For one byte, uint8 is hifloat8."""
    if dtype == torch.int8:
        numbers = (_INT8 * numbers).clamp(-127, 127)
    if dtype == torch.uint8 and numbers.is_floating_point():
        return hifloat8.encode(numbers.float())
    return numbers.to(dtype)
