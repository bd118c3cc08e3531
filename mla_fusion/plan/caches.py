"""Where the new rows go: into the model's own caches by the kernel where that is exact, else by the model's writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import cache_write, row_quant
from mla_fusion.facts.cache_write import Slots, WriteFact
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.facts.slots import Unproven
from mla_fusion.fx.sizes import same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, reshapes, reshapes_and_exact_casts, upward
from mla_fusion.match.candidate import KeyHalf
from mla_fusion.meta import layout
from mla_fusion.meta.number_formats import INT8
from mla_fusion.plan.int8_query import Int8Query
from mla_fusion.plan.outputs import Replacement, ValueTree, live_users, whole_readers
from mla_fusion.plan.plan import InPlace, Staged


@dataclass(frozen=True)
class Placement:
    """caches, what replaces the caches' readers, and the query where it goes with an int8 cache."""

    caches: InPlace | Staged
    found: tuple[Replacement, ...] = ()
    query: Int8Query | None = None


class WritePlanner:
    """Two caches, each written by plain nodes: what every operator that writes caches asks of them."""

    def __init__(
        self, view: View, config: Config, candidate: KeyHalf, trees: dict[str, ValueTree], boundary: bool
    ) -> None:
        """``trees``: the values by name, as the graph reads them; ``boundary``: a cache can be viewed outside."""
        self.view, self.config, self.trees, self.boundary = view, config, trees, boundary
        self.key = candidate.key

    def place(self, token_x: Node, interleaved: bool, stage_because: str) -> Placement:
        """Write the model's caches in the kernel where that is exact, else say why not."""
        if stage_because:
            return Placement(Staged(stage_because))
        if interleaved:
            return Placement(Staged("RoPE leaves interleaved rows and the kernel writes half rows"))
        return self.packed(token_x) or self._apart(token_x)

    # -- what differs from operator to operator

    def packed(self, token_x: Node) -> Placement | None:
        """One cache of packed rows; None where the graph, or the operator, packs no such rows."""
        return None

    def as_quantised(self, kv: CacheScale | None, kr: CacheScale | None) -> Int8Query | str | None:
        """The query that goes with caches scaled so (None: none of its own), or why the operator does not scale so."""
        others = [scale.format.name for scale in (kv, kr) if scale is not None and scale.format is not INT8]
        return f"the operator writes no {others[0]} rows" if others else None

    def write_of(self, name: str) -> tuple[WriteFact | str, CacheScale | None]:
        """The write of the new rows by which the operator's takes its place; why there is none."""
        return self.single_write(name)

    def check_order(self, writer: Node) -> None:
        """Raise ``Refuse`` where the operator would need its slots before they exist."""

    def writable(self, cache: Any) -> bool:
        """Do rows that the operator writes to a cache with these strides arrive there?"""
        return layout.writable(cache, first_axis_free=False, ones_free=True)

    def shape_of_slots(self, token_x: Node) -> Sequence[object]:
        shape: Sequence[object] = token_x.meta["val"].shape
        return shape[:-1]

    # -- two caches, each written by plain nodes

    def _apart(self, token_x: Node) -> Placement:
        writes, scales = [], []
        for name in ("c_kv", "k_pe"):
            write, scale = self.write_of(name)
            if isinstance(write, str):
                return Placement(staged_by(write))
            writes.append(write)
            scales.append(scale)
        kv, kr = writes
        reason = self._joint_reason(token_x, kv, kr)
        query = None if reason else self.as_quantised(*scales)
        if reason or isinstance(query, str):
            return Placement(Staged(reason or str(query)))
        kv_shape, kr_shape = (cache_write.paged_shape(write.cache) for write in writes)
        assert kv_shape is not None and kr_shape is not None
        found = [
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
        )
        in_place = replace(in_place, kv_scale=in_ratio(scales[0], query), kr_scale=scales[1])
        return Placement(in_place, tuple(found), query)

    def single_write(self, name: str) -> tuple[WriteFact | str, CacheScale | None]:
        """The one write that takes the new rows, whole and in token order, and what they are scaled by into int8."""
        tree = self.trees[name]
        readers = tree.readers()
        if len(readers) != 1:
            return f"the new {name} rows are read at {len(readers)} places", None
        ((value, users),) = readers.items()
        if len(users) != 1:
            return f"{value.name} is read by {', '.join(user.name for user in users)}", None
        if not tree.in_order(value):
            return f"{value.name} does not hold the rows in token order", None
        quantised = row_quant.find(self.view, value)
        if quantised is None:
            write = cache_write.find(self.view, users[0], value)
            if isinstance(write, Unproven):
                self.check_order(users[0])
            return write, None
        writers = live_users(quantised.node)
        if len(writers) != 1:
            return f"{quantised.node.name} is read by {', '.join(user.name for user in writers)}", None
        return cache_write.find(self.view, writers[0], quantised.node), quantised.scale

    def _joint_reason(self, token_x: Node, kv: WriteFact, kr: WriteFact) -> str:
        """Why two writes are not the pair that the kernel does, or ""."""
        if kv.cache is kr.cache:
            return f"both writes go to {kv.cache.name}"
        shapes = [cache_write.paged_shape(write.cache) for write in (kv, kr)]
        if not same_shape((shapes[0] or ())[:3], (shapes[1] or ())[:3]):
            return f"{kv.cache.name} and {kr.cache.name} differ in blocks"
        if not self._same_slots(kv.slots, kr.slots):
            return f"{kv.cache.name} and {kr.cache.name} are written at different slots"
        key = self.key
        return self.reason(token_x, kv, len(key.columns)) or self.reason(token_x, kr, key.rope_dim)

    def reason(self, token_x: Node, write: WriteFact, wanted: int) -> str:
        """Why the kernel cannot do this write, of rows ``wanted`` wide, or ""."""
        shape = cache_write.paged_shape(write.cache) or ()
        value = write.cache.meta["val"]
        if not self.boundary and not same_shape(value.shape, shape):
            return f"{write.cache.name} has shape {list(value.shape)}, and no wrapper can view it as {list(shape)}"
        if not self.writable(value):
            return f"{write.cache.name} has strides {list(value.stride())}, and rows written to such do not arrive"
        slots = write.slots.shape
        if not self.as_many(slots, token_x):
            tokens = list(token_x.meta["val"].shape[:-1])
            return f"{write.slots} has {list(slots)} slots for tokens {tokens}"
        late = cache_write.readers(write.cache, write.node, write.result, *write.inside)
        if late:
            return f"{late[0].name} reads {write.cache.name} as it was before the write"
        width = self.view.binding.size(value.shape[-1])
        if width != wanted:
            return f"{write.cache.name} is {width} wide"
        if value.dtype != write.value.meta["val"].dtype:
            return f"{write.cache.name} is {value.dtype}"
        return ""

    def as_many(self, slots: Sequence[Any], token_x: Node) -> bool:
        """Is there, whenever the graph runs, a slot for each token?"""
        return self.view.binding.same(math.prod(token_x.meta["val"].shape[:-1]), math.prod(slots))

    def _same_slots(self, a: Slots, b: Slots) -> bool:
        if a.span != b.span:
            return False
        pairs = zip((a.index, a.block, a.offset), (b.index, b.block, b.offset), strict=True)
        return all(
            x is y or (x is not None and y is not None and self.view.terms.same(x, y)) for x, y in pairs
        )


def staged_by(reason: str) -> Staged:
    return Staged(reason, "slots.unproven" if isinstance(reason, Unproven) else "")


def in_ratio(scale: CacheScale | None, query: Int8Query | None) -> CacheScale | None:
    """The scale of the cache as the query was multiplied by it; what is left of the factor goes to kc_scale."""
    return scale if scale is None or query is None else replace(scale, factor=scale.factor * query.ratio)


def shaped(slots: Slots, lead: Sequence[object]) -> Slots:
    """The slots as what they reshape, where that already has the wanted shape (saves a reshape)."""
    above = upward(slots.index, reshapes) if slots.index is not None else ()
    shaped = next((node for node in above if same_shape(node.meta["val"].shape, lead)), None)
    return slots if shaped is None else Slots(shaped)


def _source_of_both(a: Slots, b: Slots) -> Slots:
    """Of slots that are equal, what both are made from."""
    return a if a == b or a.index is None else Slots(origin(a.index, reshapes_and_exact_casts))
