"""Near misses: one thing is wrong with the writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import BLOCK_SIZE, DR, HCKV, Base, one_token
from .entry import IN_PLACE, STAGED, Methods, based, miss, misses
from .prologues import NpuOperators
from .writes import parts_args


@miss(IN_PLACE, tags="run, cache", name="SlotsFromSizeOfQuery")
class SlotsFromQuery(Base):
    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots + (query[:, 0, 0] * 0).abs().long()


@miss("reader.latent", tags="cache, operators", of="NpuOperators")
class OperatorNormMode(NpuOperators):
    """npu_kv_rmsnorm_rope_cache on a cache that is a view of a pool."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        return super().forward(x, cos, sin, kv_cache[:2], kr_cache[:2], slots % 32)


@miss("kv_latent.absent", tags="cache, layout", of="PartsOfTheBatch", args=parts_args)
class PartsCrossed(Base):
    """The query's rows are the first, the key's are others."""

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        x, cos, sin, kv_cache, kr_cache, slots, decoding = given
        count = decoding.shape[0]
        x, self.others, _ = x.split([count, count, x.shape[0] - 2 * count])
        return super().forward(x, cos[:count], sin[:count], kv_cache, kr_cache, slots[:count])

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().latent(self.others)


@miss("reader.latent", tags="cache, operators", of="NpuOperators")
class OperatorAndSum(NpuOperators):
    """The rows that the operator overwrites are read as they were."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        before = kv_cache.float().sum()
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots) + before


# -- write(kv_cache, kr_cache, slots, c_kv, k_pe) of the base prologue, compiled and run


def written(kv: Any, kr: Any) -> Any:
    """A write of both caches, given rows of the cache, slots and new rows."""

    def write(
        self: Any, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv(kv_cache.view(-1, HCKV), slots, c_kv)
        kr(kr_cache.view(-1, DR), slots, k_pe)

    return write


def put(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_((slots,), new)


def put_later(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_(((slots + 1) % rows.shape[0],), new)


def put_other_offset(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.view(-1, BLOCK_SIZE, rows.shape[-1]).index_put_((slots % 4, slots // 4), new)


def put_where(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_((slots,), torch.where((slots % 2 == 0)[:, None], new, rows[slots]))


def put_twice(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    put(rows, slots, new)
    put_later(rows, slots, new)


def put_added(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_((slots,), new, accumulate=True)


def put_shifted(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_((slots,), new.roll(1, 0))


def put_some(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_((slots[:4],), new[:4])


def put_none(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_((slots[1:],), new[1:])


def put_negative(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.index_put_((slots - rows.shape[0],), new)


def put_other_blocks(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    rows.view(-1, 8, rows.shape[-1]).index_put_((slots % 4, slots // 4 % 8), new)


def put_repeated(
    self: Any, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
) -> None:
    """Two slots of one block may have one place: the divisors differ where the size is not 8."""
    place = slots // kv_cache.shape[1], slots % (kv_cache.shape[1] // 2)
    kv_cache.squeeze(2).index_put_(place, c_kv)
    kr_cache.squeeze(2).index_put_(place, k_pe)


MISSES: dict[str, tuple[Methods, str]] = {
    "kr_elsewhere": (dict(write=written(put, put_later)), STAGED),
    "kr_by_other_blocks": (dict(write=written(put, put_other_offset)), STAGED),
    "both_by_other_blocks": (dict(write=written(put_other_offset, put_other_offset)), STAGED),
    "each_by_blocks_of_its_own": (dict(write=written(put_other_offset, put_other_blocks)), STAGED),
    "repeated_place": (dict(write=put_repeated), STAGED),
    "where_even": (dict(write=written(put_where, put)), STAGED),
    "twice": (dict(write=written(put_twice, put)), STAGED),
    "added": (dict(write=written(put_added, put)), STAGED),
    "rows_shifted": (dict(write=written(put_shifted, put_shifted)), STAGED),
    "half_of_the_tokens": (dict(write=written(put_some, put_some)), STAGED),
    "negative": (dict(write=written(put_negative, put_negative)), STAGED),
}
misses("cache", MISSES)


# All rows but those of the only token: values without elements are read, and mean nothing.
miss(STAGED, tags="cache, run", name="no_token", args=one_token)(
    based("m", 1, write=written(put_none, put_none))
)
