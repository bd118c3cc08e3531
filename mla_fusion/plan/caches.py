"""Where the new rows go: into the model's own caches by the kernel where that is exact, else by the
model's writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import cache_write, row_quant
from mla_fusion.facts.cache_write import Slots, WriteFact
from mla_fusion.facts.obstacle import Obstacle, Obstacles
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.fx.module_path import label
from mla_fusion.fx.sizes import same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, reshapes, reshapes_and_exact_casts, upward
from mla_fusion.match.candidate import KeyHalf
from mla_fusion.meta import layout
from mla_fusion.meta.number_formats import INT8
from mla_fusion.operators.known import dtype_of, shape_of
from mla_fusion.plan.int8_query import Int8Query
from mla_fusion.plan.outputs import Replacement, ValueTree, live_users, whole_readers
from mla_fusion.plan.plan import InPlace, Staged
from mla_fusion.plan.unwritten import no_write, read_elsewhere
from mla_fusion.report.rejection import Refuse


@dataclass(frozen=True)
class Placement:
    """caches, what replaces the caches' readers, and the query where it goes with an int8 cache."""

    caches: InPlace | Staged
    found: tuple[Replacement, ...] = ()
    query: Int8Query | None = None


class WritePlanner:
    """Two caches, each written by plain nodes: what every operator that writes caches asks of
    them.
    """

    def __init__(
        self,
        view: View,
        config: Config,
        candidate: KeyHalf,
        trees: dict[str, ValueTree],
        boundary: bool,
    ) -> None:
        """``trees``: the values by name, as the graph reads them; ``boundary``: a cache can be
        viewed outside.
        """
        self.view, self.config, self.trees, self.boundary = view, config, trees, boundary
        self.key = candidate.key

    def place(self, token_x: Node, pairs: bool, stage_because: Obstacle | None) -> Placement:
        """Write the model's caches in the kernel where that is exact, else say everything that is
        in the way.

        pairs          the caches are to hold the interleaved pairs that the model's rotation leaves
        stage_because  why the caches are left to the model whatever it writes
        """
        if stage_because is not None:
            return Placement(Staged((stage_because,)))
        if not pairs:
            return self._in_kernel(token_x)
        try:
            others = self._in_kernel(token_x).caches
        except Refuse:  # of an operator that writes in place: this one stages
            others = None
        return Placement(
            Staged((_PAIRS, *(others.obstacles if isinstance(others, Staged) else ())))
        )

    def _in_kernel(self, token_x: Node) -> Placement:
        return self.packed(token_x) or self._apart(token_x)

    # -- what differs from operator to operator

    def packed(self, token_x: Node) -> Placement | None:
        """One cache of packed rows; None where the graph, or the operator, packs no such rows."""
        return None

    def as_quantised(self, kv: CacheScale | None, kr: CacheScale | None) -> Int8Query | str | None:
        """The query that goes with caches scaled so (None: none of its own), or why the operator
        does not scale so.
        """
        others = [
            scale.format.name
            for scale in (kv, kr)
            if scale is not None and scale.format is not INT8
        ]
        return f"the operator writes no {others[0]} rows" if others else None

    def write_of(self, name: str) -> tuple[WriteFact | Obstacles, CacheScale | None]:
        """The write of the new rows by which the operator's takes its place; why there is none."""
        return self.single_write(name)

    def check_order(self, writer: Node) -> None:
        """Raise ``Refuse`` where the operator would need its slots before they exist."""

    def writable(self, cache: Any) -> bool:
        """Do rows that the operator writes to a cache with these strides arrive there?"""
        return layout.writable(cache, first_axis_free=False, ones_free=True)

    def shape_of_slots(self, token_x: Node) -> Sequence[object]:
        shape: Sequence[object] = shape_of(token_x)
        return shape[:-1]

    # -- two caches, each written by plain nodes

    def _apart(self, token_x: Node) -> Placement:
        (kv, kv_scale), (kr, kr_scale) = (self.write_of(name) for name in ("c_kv", "k_pe"))
        if not isinstance(kv, WriteFact) or not isinstance(kr, WriteFact):
            key = self.key
            widths = {"c_kv": len(key.columns), "k_pe": key.rope_dim}
            found: list[Obstacle] = []
            for write, width in ((kv, widths["c_kv"]), (kr, widths["k_pe"])):
                found += (
                    self.obstacles(token_x, write, width) if isinstance(write, WriteFact) else write
                )
            return Placement(Staged(tuple(dict.fromkeys(found))))
        obstacles = self._joint_obstacles(token_x, kv, kr)
        query = None if obstacles else self.as_quantised(kv_scale, kr_scale)
        if isinstance(query, str):
            obstacles = [Obstacle("cache.quantised", query)]
        if obstacles or isinstance(query, str):
            return Placement(Staged(tuple(dict.fromkeys(obstacles))))
        kv_shape, kr_shape = (cache_write.paged_shape(write.cache) for write in (kv, kr))
        assert kv_shape is not None and kr_shape is not None
        replaced = [
            r
            for name, write, shape in (("kv_cache", kv, kv_shape), ("kr_cache", kr, kr_shape))
            for r in whole_readers(write.result, name, shape, same_shape)
        ]
        slots = shaped(_source_of_both(kv.slots, kr.slots), self.shape_of_slots(token_x))
        trusted = tuple(dict.fromkeys((*kv.trusted, *kr.trusted)))
        in_place = InPlace(
            kv_cache=kv.cache,
            kr_cache=kr.cache,
            kv_shape=kv_shape,
            kr_shape=kr_shape,
            slots=slots,
            mode="PA_BSND",
            trusted=trusted,
            rows=(kv.value, kr.value),
        )
        in_place = replace(in_place, kv_scale=in_ratio(kv_scale, query), kr_scale=kr_scale)
        return Placement(in_place, tuple(replaced), query)

    def single_write(self, name: str) -> tuple[WriteFact | Obstacles, CacheScale | None]:
        """The one write that takes the new rows, whole and in token order, and what they are scaled
        by into int8.
        """
        tree = self.trees[name]
        readers = tree.readers()
        every = [user for users in readers.values() for user in users]
        if len(every) != 1:
            return read_elsewhere(self.view, self.trees, name, every), None
        ((value, (writer,)),) = readers.items()
        if not tree.in_order(value):
            if other := no_write(self.view, self.trees, name, writer):
                return other, None
            return (
                Obstacle("cache.row_order", f"{value.name} does not hold the rows in token order"),
            ), None
        quantised = row_quant.find(self.view, value)
        if quantised is None:
            if other := no_write(self.view, self.trees, name, writer):
                return other, None
            write = cache_write.find(self.view, writer, value)
            if not isinstance(write, WriteFact) and any(
                one.code == "slots.unproven" for one in write
            ):
                self.check_order(writer)
            return write, None
        writers = live_users(quantised.node)
        if len(writers) != 1:
            return read_elsewhere(self.view, self.trees, name, writers), None
        return cache_write.find(self.view, writers[0], quantised.node), quantised.scale

    def _joint_obstacles(self, token_x: Node, kv: WriteFact, kr: WriteFact) -> list[Obstacle]:
        """Everything for which two writes are not the pair that the kernel does."""
        found = []
        names = f"{kv.cache.name} and {kr.cache.name}"
        if kv.cache is kr.cache:
            found.append(Obstacle("cache.joined_row", f"both writes go to {kv.cache.name}"))
        shapes = [cache_write.paged_shape(write.cache) for write in (kv, kr)]
        if not same_shape((shapes[0] or ())[:3], (shapes[1] or ())[:3]):
            sizes = " and ".join(f"[{', '.join(map(str, shape or ()))}]" for shape in shapes)
            found.append(Obstacle("cache.blocks_differ", f"{names} are {sizes} to the kernel"))
        if not self._same_slots(kv.slots, kr.slots):
            found.append(Obstacle("cache.slots_differ", f"{names} are written at different slots"))
        key = self.key
        found += self.obstacles(token_x, kv, len(key.columns))
        return [*found, *self.obstacles(token_x, kr, key.rope_dim)]

    def obstacles(self, token_x: Node, write: WriteFact, wanted: Any) -> list[Obstacle]:
        """Everything for which the kernel cannot do this write, of rows ``wanted`` wide."""
        shape = cache_write.paged_shape(write.cache) or ()
        name, value, found = write.cache.name, write.cache.meta["val"], list[Obstacle]()
        if not self.boundary and not same_shape(value.shape, shape):
            message = (
                f"{name} has shape {list(value.shape)}, and no wrapper can view it as {list(shape)}"
            )
            found.append(Obstacle("cache.boundary", message))
        if not self.writable(value):
            message = (
                f"{name} has strides {list(value.stride())}, and rows that the kernel writes to "
                "it do not arrive"
            )
            found.append(Obstacle("cache.strides", message))
        slots = write.slots.shape
        if not self.as_many(slots, token_x):
            tokens = list(shape_of(token_x)[:-1])
            found.append(
                Obstacle(
                    "cache.slots_count",
                    f"{write.slots} has {list(slots)} slots for tokens {tokens}",
                )
            )
        late = cache_write.readers(write.cache, write.node, write.result, *write.inside)
        if late:
            found.append(
                Obstacle(
                    "cache.old_rows_read", f"{late[0].name} reads {name} as it was before the write"
                )
            )
        width = value.shape[-1]
        if not self.view.binding.same(width, wanted):
            which = remedy = ""
            if self.view.binding.varies(width):
                which = " (a size that the graph leaves open)"
                named = label(write.cache)
                remedy = (
                    f"Say it in the model, torch._check({named}.shape[-1] == {wanted}), or mark "
                    f"it static: torch._dynamo.mark_static({named}, {value.dim() - 1})."
                )
            message = f"{name} is {width} wide{which}, the rows written to it {wanted}"
            found.append(Obstacle("cache.width", message, remedy))
        dtype = dtype_of(write.value)
        if value.dtype != dtype:
            found.append(
                Obstacle("cache.dtype", f"{name} is {value.dtype}, the rows written to it {dtype}")
            )
        return found

    def as_many(self, slots: Sequence[Any], token_x: Node) -> bool:
        """Is there, whenever the graph runs, a slot for each token?"""
        return self.view.binding.same(math.prod(shape_of(token_x)[:-1]), math.prod(slots))

    def _same_slots(self, a: Slots, b: Slots) -> bool:
        sizes = [(one.block_size or 1, *(one.every or (0, 0))) for one in (a, b)]
        if a.span != b.span or not all(map(self.view.binding.same, *sizes)):
            return False
        pairs = zip((a.index, a.block, a.offset), (b.index, b.block, b.offset), strict=True)
        return all(
            x is y or (x is not None and y is not None and self.view.terms.same(x, y))
            for x, y in pairs
        )


_PAIRS = Obstacle(
    "rope.pairs",
    "the key cache holds pairs (a0 b0 a1 b1 ..) as RoPE leaves them, the kernel writes halves (a0 "
    "a1 .. b0 b1 ..)",
)


def in_ratio(scale: CacheScale | None, query: Int8Query | None) -> CacheScale | None:
    """The scale of the cache as the query was multiplied by it; what is left of the factor goes to
    kc_scale.
    """
    return (
        scale
        if scale is None or query is None
        else replace(scale, factor=scale.factor * query.ratio)
    )


def shaped(slots: Slots, lead: Sequence[object]) -> Slots:
    """The slots as what they reshape, where that already has the wanted shape (saves a reshape)."""
    above = upward(slots.index, reshapes) if slots.index is not None else ()
    shaped = next((node for node in above if same_shape(shape_of(node), lead)), None)
    return slots if shaped is None else Slots(shaped)


def _source_of_both(a: Slots, b: Slots) -> Slots:
    """Of slots that are equal, what both are made from."""
    return a if a == b or a.index is None else Slots(origin(a.index, reshapes_and_exact_casts))
