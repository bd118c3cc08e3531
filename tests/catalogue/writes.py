"""How rows reach the caches, and to which slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .base import (
    BLOCK_SIZE,
    DR,
    HCKV,
    HE,
    Base,
    hf_interleave,
    linear,
    npu,
    paged_args,
    paged_caches,
    rotate_half,
    tables,
)
from .entry import IN_PLACE, OURS, STAGED, entry, step
from .layouts import sequence_args
from .prologues import PagedRotateHalf


@entry(IN_PLACE, source="vLLM", tags="cache, device, symbolic")
class CombinedCache(Base):
    """vLLM: one row [c_kv | k_pe], whose parts are written to two caches."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        rows = torch.cat([c_kv, k_pe], -1)
        kv_cache.view(-1, HCKV)[slots] = rows[:, :HCKV]
        kr_cache.view(-1, DR)[slots] = rows[:, HCKV:]


@entry(IN_PLACE, source=OURS, tags="cache, device, symbolic")
class ScatterRows(Base):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV).scatter_(0, slots.unsqueeze(1).expand(-1, HCKV), c_kv)
        kr_cache.view(-1, DR).scatter_(0, slots.unsqueeze(1).expand(-1, DR), k_pe)


@entry(IN_PLACE, source=OURS, tags="cache, operators, device")
class ScatterNd(Base):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        npu.npu_scatter_nd_update_(kv_cache.view(-1, HCKV), slots.view(-1, 1), c_kv)
        npu.npu_scatter_nd_update_(kr_cache.view(-1, DR), slots.view(-1, 1), k_pe)


@entry(STAGED, source=OURS, tags="cache, device")
class MaskedWrite(Base):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV).index_add_(0, slots, c_kv)
        kr_cache.view(-1, DR).index_add_(0, slots, k_pe)


@entry(IN_PLACE, source=OURS, tags="cache, device")
class Int32Slots(Base):
    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots.int()


@entry(STAGED, source=OURS, tags="cache, readers, device")
class ReadsOldCache(Base):
    """Something reads the cache as it was before the write."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        self.old = kv_cache.view(-1, HCKV)[slots].sum()
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.old


@entry(IN_PLACE, source=OURS, tags="cache, readers, device")
class NewRowsRead(Base):
    """The new tokens' latents are also used directly."""

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.new_rows.sum(-1)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        self.new_rows = c_kv
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)


@entry(IN_PLACE, source=OURS, tags="cache, device")
class SlotsFromQuery(Base):
    """Slots cast from a product may be negative: the model's own writes stay, and come late."""

    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots + (query[:, 0, 0] * 0).long()


@entry(IN_PLACE, source=OURS, tags="cache, device")
class SlotsInTwoWays(Base):
    """One cache is written by slot, the other by (block, offset)."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV).index_put_((slots.view(-1),), c_kv)
        kr_cache.squeeze(2).index_put_((slots // BLOCK_SIZE, slots % BLOCK_SIZE), k_pe)


@entry(IN_PLACE, source=OURS, tags="cache, device")
class SlotsInBlocksOfAView(Base):
    """By (block, offset) in a view whose blocks are not the cache's, and by slots."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, 8, HCKV).index_put_((slots // 8, slots % 8), c_kv)
        kr_cache.view(-1, DR).index_put_((slots,), k_pe)


@entry(IN_PLACE, source="LightLLM", tags="cache, device")
class SlotsInBlocksOfTheCache(Base):
    """The blocks' size is the cache's own, a number that may be symbolic."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        size = kv_cache.shape[1]
        block = torch.div(slots, size, rounding_mode="floor")
        kv_cache.squeeze(2).index_put_((block, slots - block * size), c_kv)
        kr_cache.view(-1, DR).index_put_((slots,), k_pe)


@entry(IN_PLACE, source="vllm-ascend", tags="cache, operators, device")
class BothByOneOperator(Base):
    """vLLM-Ascend without rotation: npu_scatter_pa_kv_cache takes the rows of both caches."""

    mode = "Norm"

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        rows = c_kv.unsqueeze(1), k_pe.unsqueeze(1)
        torch.ops.npu.npu_scatter_pa_kv_cache(
            *rows, kv_cache, kr_cache, slots, cache_mode=self.mode
        )


def block_table_args() -> tuple[Tensor, ...]:
    *rest, kr_cache, _ = paged_args(8)
    blocks = kr_cache.shape[0]
    table = torch.stack([torch.arange(blocks).roll(row) for row in range(8)])
    return *rest, kr_cache, table, torch.arange(8) * 3


@entry(IN_PLACE, source="vLLM", tags="cache, device", args=block_table_args)
class SlotsFromBlockTable(Base):
    """vLLM: block_table[request, position // BlockSize] * BlockSize + position % BlockSize."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
        table: Tensor,
        position: Tensor,
    ) -> tuple[Tensor, Tensor]:
        slots = self.slots_of(kv_cache, table, position)
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)

    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        block = table.gather(1, (position // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        return block * BLOCK_SIZE + position % BLOCK_SIZE


@entry(IN_PLACE, source=OURS, tags="cache, device", args=block_table_args)
class RowsOfTheTableFirst(SlotsFromBlockTable):
    """The block table's row of each token, by the number of its sequence."""

    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        rows = table.index_select(0, position // 3)
        block = rows.gather(1, (position // BLOCK_SIZE)[:, None])[:, 0]
        return block * BLOCK_SIZE + position % BLOCK_SIZE


@entry(IN_PLACE, source=OURS, tags="cache, device", args=block_table_args)
class TakenFromTheTable(SlotsFromBlockTable):
    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        block = table.take(position // 3 * table.shape[1] + position // BLOCK_SIZE)
        return block * BLOCK_SIZE + position % BLOCK_SIZE


def several_args() -> tuple[Tensor, ...]:
    *rest, table, position = block_table_args()
    return *rest, table[:4], position[:4]


@entry(IN_PLACE, source=OURS, tags="cache, symbolic, device", args=several_args)
class SeveralTokensOfEach(SlotsFromBlockTable):
    """Multi-token prediction: two tokens of each sequence, from its own position on."""

    ahead = 0

    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        positions = position[:, None] + torch.arange(2, device=position.device)
        block = table.gather(1, (positions + self.ahead) // BLOCK_SIZE) * BLOCK_SIZE
        return (block + positions % BLOCK_SIZE).flatten()


@entry(STAGED, source=OURS, tags="cache", args=several_args)
class BlockOfTheNextToken(SeveralTokensOfEach):
    ahead = 1  # two tokens of a sequence may share a row


@entry(IN_PLACE, source=OURS, tags="cache, device", args=several_args)
class SeveralTokensInARow(SeveralTokensOfEach):
    """The same tokens one behind another, and the number of each one's sequence."""

    def sequences(self, device: torch.device) -> Tensor:
        return torch.arange(4, device=device)[:, None].expand(-1, 2).reshape(-1)

    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        positions = (position[:, None] + torch.arange(2, device=position.device)).view(-1)
        block = table[self.sequences(table.device), positions // BLOCK_SIZE]
        return block * BLOCK_SIZE + positions % BLOCK_SIZE


@entry(STAGED, source=OURS, tags="cache", args=several_args)
class TokensOfOtherSequences(SeveralTokensInARow):
    def sequences(self, device: torch.device) -> Tensor:
        return torch.arange(4, device=device).expand(2, 4).reshape(-1)


@entry(STAGED, source=OURS, tags="cache", args=several_args)
class StartsOfPlaces(SeveralTokensOfEach):
    """Each of two places is counted from a start of its own: two starts may name one row."""

    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        places = position[:2, None].expand(2, 4).t() + torch.arange(2)
        return (torch.arange(4)[:, None] * BLOCK_SIZE + places).flatten()


@entry(IN_PLACE, source="vLLM", tags="cache, device", args=block_table_args)
class SlotsFromTableAndCache(SlotsFromBlockTable):
    """BlockSize is the cache's own size."""

    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        size = kv_cache.shape[1]
        return table.gather(1, (position // size)[:, None])[:, 0] * size + position % size


@entry(IN_PLACE, source=OURS, tags="cache, tables, symbolic", args=block_table_args)
class TablesAtPositions(SlotsFromBlockTable):
    """The block table is int32, and positions pick the rows of cos and sin too."""

    def forward(self, x, cos, sin, kv_cache, kr_cache, table, position):  # type: ignore[no-untyped-def,override]
        cos, sin = (part.repeat(4, 1)[position] for part in (cos, sin))
        return super().forward(x, cos, sin, kv_cache, kr_cache, table.int(), position)

    def slots_of(self, kv_cache: Tensor, table: Tensor, position: Tensor) -> Tensor:
        block = table.gather(1, (position // BLOCK_SIZE).unsqueeze(1))
        return block.flatten() * BLOCK_SIZE + (position % BLOCK_SIZE).view(1, -1).flatten()


@entry(IN_PLACE, STAGED, source=OURS, tags="cache, layout, device")
class HalvesOfTheBatch(Base):
    """Two micro-batches over one pair of caches: the second writes what the first has written."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, second = (
            super(HalvesOfTheBatch, self).forward(
                x[part], cos[part], sin[part], kv_cache, kr_cache, slots[part]
            )[0]
            for part in (slice(None, 4), slice(4, None))
        )
        return first, second


def parts_args() -> tuple[Tensor, ...]:
    return *paged_args(12), torch.zeros(5)


@entry(IN_PLACE, STAGED, source="vLLM", tags="cache, layout, device", args=parts_args)
class PartsOfTheBatch(Base):
    """Rows that decode and rows that are prefilled, as many as another argument has."""

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        x, cos, sin, kv_cache, kr_cache, slots, decoding = given
        count = decoding.shape[0]
        sizes = [count, x.shape[0] - count]
        first, second = (
            super(PartsOfTheBatch, self).forward(*part[:3], kv_cache, kr_cache, part[3])[0]
            for part in zip(*(each.split(sizes) for each in (x, cos, sin, slots)), strict=True)
        )
        return first, second


def heads_first_args() -> tuple[Tensor, ...]:
    x, cos, sin, *caches, slots = paged_args()
    return x, cos, sin, *(cache.view(-1, 1, BLOCK_SIZE, cache.shape[-1]) for cache in caches), slots


@entry(IN_PLACE, source="omni-infer", tags="cache, layout", args=heads_first_args, alone=(STAGED,))
class BlocksOfOneHead(Base):
    """Caches [BlockNum, 1, BlockSize, ..]."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        block, place = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        kv_cache[block, 0, place] = c_kv
        kr_cache[block, 0, place] = k_pe


def two_caches() -> tuple[Tensor, ...]:
    *given, slots = paged_args()
    return (*given, *paged_caches(), slots)


@entry(IN_PLACE, IN_PLACE, source="SGLang", tags="cache, layout, symbolic", args=two_caches)
class TwoKindsOfRows(Base):
    """Rows of two batches, each over caches of its own: with dynamic sizes their numbers differ."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, *caches_and_slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        *caches, slots = caches_and_slots
        scores, _ = super().forward(x[:3], cos[:3], sin[:3], *caches[:2], slots[:3])
        others, _ = super().forward(x[3:], cos[3:], sin[3:], *caches[2:], slots[3:])
        return scores, others


@entry(STAGED, source=OURS, tags="cache, device", name="Gated", slack=1.1)
class GatedLatent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(HE, HCKV)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv * torch.sigmoid(self.gate(x)), k_pe


@step("write", IN_PLACE, tags="cache")
def three_indices(
    self: Any, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
) -> None:
    """The one head is indexed too."""
    place = slots // BLOCK_SIZE, slots % BLOCK_SIZE, torch.zeros_like(slots)
    kv_cache.index_put_(place, c_kv)
    kr_cache.index_put_(place, k_pe)


def static_cache_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = sequence_args()
    caches = (torch.randn(2, 1, 32, width).bfloat16() for width in (HCKV, DR))
    return x, cos, sin, *caches, torch.arange(4, 7)


@entry(
    IN_PLACE, source="transformers", tags="cache, layout", alone=(STAGED,), args=static_cache_args
)
class StaticCache(PagedRotateHalf):
    """Hugging Face StaticCache: [B, 1, S_max, width], index_copy_ on axis 2."""

    def put(self, cache: Tensor, position: Tensor, rows: Tensor) -> None:
        cache.index_copy_(2, position, rows)

    def forward(self, *given: Tensor) -> Tensor:
        x, cos, sin, kv_cache, kr_cache, position = given
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        c, sn = cos.unsqueeze(2), sin.unsqueeze(2)
        q_pe, k_pe = hf_interleave(q_pe), hf_interleave(k_pe.unsqueeze(2))
        q_pe, k_pe = q_pe * c + rotate_half(q_pe) * sn, k_pe * c + rotate_half(k_pe) * sn
        query = torch.einsum("bsnd,ndc->bsnc", q_nope, self.w_uk())
        self.put(kv_cache, position, c_kv.unsqueeze(1))
        self.put(kr_cache, position, k_pe.transpose(1, 2))
        scores = torch.einsum("bsnc,btc->bsnt", query.float(), kv_cache.squeeze(1).float())
        return scores + torch.einsum("bsnr,btr->bsnt", q_pe.float(), kr_cache.squeeze(1).float())


@entry(IN_PLACE, source=OURS, tags="cache, layout", alone=(STAGED,), args=static_cache_args)
class CopiedBack(StaticCache):
    """The whole cache, with its new rows, is copied into itself."""

    def put(self, cache: Tensor, position: Tensor, rows: Tensor) -> None:
        cache.copy_(cache.index_copy(2, position, rows))


@entry(IN_PLACE, source="SGLang", tags="cache, operators", alone=(STAGED,), args=static_cache_args)
class FromALengthOn(StaticCache):
    """scatter_update_: the rows of each sequence, from its own number on."""

    def put(self, cache: Tensor, position: Tensor, rows: Tensor) -> None:
        npu.scatter_update_(cache, position[:2], rows, -2)


@entry(IN_PLACE, source=OURS, tags="cache", args=partial(paged_args, 1))
class OneTokenAtALiteral(Base):
    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV)[3:4] = c_kv
        kr_cache.view(-1, DR)[3:4] = k_pe


def blocks_and_places() -> tuple[Tensor, ...]:
    *others, slots = paged_args()
    return *others, torch.stack((slots // BLOCK_SIZE, slots % BLOCK_SIZE), 1)


@entry(STAGED, source=OURS, tags="cache", args=blocks_and_places)
class BlocksAndPlacesOfOneInput(Base):
    """Numbers of blocks and places in them are columns of one input."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache[slots[:, 0], slots[:, 1], 0] = c_kv
        kr_cache[slots[:, 0], slots[:, 1], 0] = k_pe


def half_of_the_rows() -> tuple[Tensor, ...]:
    return *paged_args()[:-1], torch.randperm(2 * BLOCK_SIZE)[:8]


@entry(IN_PLACE, source=OURS, tags="cache", args=half_of_the_rows)
class RowsOfTwoLayers(Base):
    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots * 2 + 1


@step("slots", IN_PLACE, tags="cache")
def slots_cast_twice(self: Base, slots: Tensor, query: Tensor) -> Tensor:
    return slots.int().long().reshape(-1)


@step("slots", STAGED, tags="cache")
def slots_halved(self: Base, slots: Tensor, query: Tensor) -> Tensor:
    return (slots / 2).long()


# -- rows assigned by slices of a view of the cache

Put = Callable[[Tensor, Tensor], None]  # of a cache and its rows


def flat(cache: Tensor) -> Tensor:
    return cache.view(-1, cache.shape[-1])


def to_part(part: Callable[[Tensor], Tensor]) -> Put:
    def put(cache: Tensor, rows: Tensor) -> None:
        to = part(cache)
        to[:] = rows.view(to.shape)

    return put


def to_places(places: list[int]) -> Put:
    def put(cache: Tensor, rows: Tensor) -> None:
        flat(cache)[places] = rows

    return put


def caches_of(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    def args() -> tuple[Tensor, ...]:
        x, cos, sin, *_, slots = paged_args()
        caches = (torch.randn(*shape, width).bfloat16() for width in (HCKV, DR))
        return x, cos, sin, *caches, slots

    return args


def from_three(cache: Tensor, rows: Tensor) -> None:
    flat(cache)[3 : 3 + rows.shape[0]] = rows


ASSIGNED: dict[str, Put] = {
    "from three": from_three,
    "the last": to_part(lambda c: flat(c)[-8:]),
    "of a slice of a slice": to_part(lambda c: flat(c)[2:60][-20:][3:11]),
    "of a block": to_part(lambda c: c.squeeze(2)[2:3, 3:11]),
    "at places": to_places([9, 2, 33, 4, 61, 0, 7, 8]),
    "at every second": to_part(lambda c: flat(c)[3:19:2]),
}
ELSEWHERE = {
    "at a place twice": to_places([9, 2, 33, 4, 9, 0, 7, 8]),
    "at a place from the end": to_places([9, 2, -3, 4, 61, 0, 7, 8]),
}
FLAT: dict[str, Put] = {
    "one": to_part(lambda c: c[8:16]),
    "of one": to_part(lambda c: c[2:][6:14]),
    "of two": to_part(lambda c: c[2:60][4:][2:10]),
    "from the start": to_part(lambda c: c[:40][8:16]),
}
DENSE: dict[str, Put] = {
    "rows": to_part(lambda c: c[:2, 4:8]),
    "rows of rows": to_part(lambda c: c[:2, 4:][:, 2:6]),
    "sequences of sequences": to_part(lambda c: c[1:][1:3, 4:8]),
    "both": to_part(lambda c: c[:, 4:12][:2][:, 2:6]),
}


def assign(
    name: str, put: Put, outcome: str = IN_PLACE, tags: str = "cache", **fields: Any
) -> None:
    def write(
        self: Any, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        put(kv_cache, c_kv)
        put(kr_cache, k_pe)

    write.__name__ = name
    step("write", outcome, tags=tags, **fields)(write)


for name, put in ASSIGNED.items():
    tags = "cache, symbolic" if name == "from three" else "cache"
    assign(f"assigned {name}", put, tags=tags)
for name, put in ELSEWHERE.items():
    assign(f"assigned {name}", put, STAGED)
for name, put in FLAT.items():
    assign(f"assigned to flat rows, {name}", put, args=caches_of(64), alone=(STAGED,))
for name, put in DENSE.items():
    assign(f"assigned to sequences, {name}", put, STAGED, args=caches_of(4, 32))


@step("write", STAGED, tags="cache")
def assigned_at_other_places(
    self: Any, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
) -> None:
    """The key's rows one further on."""
    flat(kv_cache)[3:11] = c_kv
    flat(kr_cache)[4:12] = k_pe


def pool_of_two() -> tuple[Tensor, ...]:
    x, cos, sin, *caches, slots = paged_args()
    return x, cos, sin, *(torch.stack([cache, cache]) for cache in caches), slots


@entry(IN_PLACE, source=OURS, tags="cache, layout", args=pool_of_two, alone=(STAGED,))
class AssignedToALayer(Base):
    """Rows of one layer of a pool are assigned by a slice, rows of the other by number."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        from_three(kv_cache, c_kv)
        from_three(kr_cache, k_pe)

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        *others, kv_pool, kr_pool, slots = args
        first = super().forward(*others, kv_pool[0], kr_pool[0], slots)
        flat(kv_pool[1])[slots] = 1.0
        return first


def many_tokens() -> tuple[Tensor, ...]:
    caches = (torch.zeros(64, BLOCK_SIZE, 1, width).bfloat16() for width in (HCKV, DR))
    return *(torch.randn(264, HE).bfloat16(), *tables(264), *caches), paged_args()[-1]


# of 257 and 256 bfloat16 makes one
COUNTS: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "count": (torch.arange, IN_PLACE),
    "int32": (lambda n: torch.arange(n).int().long(), IN_PLACE),
    "bfloat16": (lambda n: torch.arange(n).bfloat16().long(), STAGED),
    "counted in bfloat16": (lambda n: torch.arange(n, dtype=torch.bfloat16).long(), STAGED),
    "uint8": (lambda n: torch.arange(n).to(torch.uint8).long(), STAGED),
}


def counted(count: Callable[[int], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    return lambda self, slots, query: count(query.shape[0])


for name, (count, outcome) in COUNTS.items():
    slots_of = counted(count)
    slots_of.__name__ = f"slots by {name}"
    step("slots", outcome, tags="cache", args=many_tokens)(slots_of)


# Slots not below a number that the graph is given: several may become it.


@step("slots", STAGED, tags="cache, symbolic")
def slots_bounded(self: Base, slots: Tensor, query: Tensor) -> Tensor:
    return slots.clamp_min(slots[0] & 1023)


@step("slots", STAGED, tags="cache, symbolic")
def slots_bounded_by_maximum(self: Base, slots: Tensor, query: Tensor) -> Tensor:
    return torch.maximum(slots, slots[:1] & 1023)


@entry(IN_PLACE, source=OURS, tags="cache, symbolic")
class EverySecondRow(Base):
    """Rows between them belong to somebody else; no slots are given."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        end = 2 * c_kv.shape[0]
        flat(kv_cache)[0:end:2] = c_kv
        flat(kr_cache)[0:end:2] = k_pe


@step("slots", STAGED, tags="cache")
def slots_cast_to_few_bits(self: Base, slots: Tensor, query: Tensor) -> Tensor:
    """Of some slots it makes others, and the model wraps them."""
    return slots.to(torch.int16).long().reshape(-1)
