"""Cache writes with one thing wrong: mistakes for the mutants."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.catalogue.base import BLOCK_SIZE, DR, HCKV

from .inputs import Named
from .writes import Rows, Write, _flat, index_put

npu = torch.ops.npu


def key_one_slot_late(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    kv[slots] = c_kv
    kr[slots + 1] = k_pe
    return kv, kr


def key_rows_reversed(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots, c_kv, k_pe.flip(0))


def slots_reversed(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots.flip(0), c_kv, k_pe)


def key_slots_reversed(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    kv[slots] = c_kv
    kr[slots.flip(0)] = k_pe
    return kv, kr


def accumulated(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    kv.index_put_((slots,), c_kv, accumulate=True)
    kr.index_put_((slots,), k_pe, accumulate=True)
    return kv, kr


def scatter_added(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    (kv, kr), rows = _flat(i), slots.reshape(-1, 1)
    kv.scatter_(0, rows.expand(-1, HCKV), c_kv.reshape(-1, HCKV), reduce="add")
    kr.scatter_(0, rows.expand(-1, DR), k_pe.reshape(-1, DR), reduce="add")
    return kv, kr


def written_twice(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = index_put(i, slots, c_kv, k_pe)
    kv[slots + 1] = c_kv * 2
    return kv, kr


def overwritten(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = index_put(i, slots, c_kv, k_pe)
    kv[slots.flatten()[:1]] = 0.0
    return kv, kr


def written_before(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    i["kv_cache"].view(-1, HCKV)[slots + 1] = c_kv.flip(0)
    return index_put(i, slots, c_kv, k_pe)


def cleared_before(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    i["kv_cache"].zero_()
    return index_put(i, slots, c_kv, k_pe)


def halved_after(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = index_put(i, slots, c_kv, k_pe)
    kr.mul_(0.5)
    return kv, kr


def blended(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    return index_put(i, slots, c_kv + kv[slots], k_pe + kr[slots])


def one_storage(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    """The rope cache is a part of the latent cache: the second write lands in rows of the first."""
    kv = i["kv_cache"].view(-1, HCKV)
    kr = i["kv_cache"].view(-1, DR)
    kv[slots] = c_kv
    kr[slots] = k_pe
    return kv, kr[: kv.shape[0]]


def key_not_stored(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    kv[slots] = c_kv
    return kv, kr.index_put((slots,), k_pe)


def old_rows_read(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    old = kv + 0
    index_put(i, slots, c_kv, k_pe)
    return old, kr


def slots_before_zero(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots - 1, c_kv, k_pe)


def slots_plus_minus_one(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, torch.add(slots, -1), c_kv, k_pe)


def slots_before_zero_by_product(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots * -1, c_kv, k_pe)


def slots_padded(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    """The first token is marked as padding."""
    first = torch.arange(slots.numel(), device=slots.device).view(slots.shape) == 0
    return index_put(i, slots.masked_fill(first, -1), c_kv, k_pe)


def offset_wrong(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    block, offset = slots // BLOCK_SIZE, (slots + 1) % BLOCK_SIZE
    i["kv_cache"][block, offset, 0] = c_kv
    i["kr_cache"][block, offset, 0] = k_pe
    return _flat(i)


def blocks_of_eight(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    block, offset = slots // 8 % 4, slots % 8
    i["kv_cache"][block, offset, 0] = c_kv
    i["kr_cache"][block, offset, 0] = k_pe
    return _flat(i)


def block_and_offset_swapped(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    block, offset = slots % 4, slots // 4
    i["kv_cache"][block, offset, 0] = c_kv
    i["kr_cache"][block, offset, 0] = k_pe
    return _flat(i)


def latent_clamped_on_the_way(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots, c_kv.clamp(-0.5, 0.5), k_pe)


def key_through_float8(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots, c_kv, k_pe.to(torch.float8_e4m3fn).to(k_pe.dtype))


def columns_rolled(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots, c_kv.roll(1, -1), k_pe)


def some_tokens_dropped(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    rows, c_kv, k_pe = slots.reshape(-1)[1:], c_kv.reshape(-1, HCKV)[1:], k_pe.reshape(-1, DR)[1:]
    return index_put(i, rows, c_kv, k_pe)


def slots_repeated(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    return index_put(i, slots // 2 * 2, c_kv, k_pe)


WRONG_WRITES: dict[str, Write] = {
    f.__name__: f
    for f in (
        key_one_slot_late,
        key_rows_reversed,
        slots_reversed,
        key_slots_reversed,
        accumulated,
        scatter_added,
        written_twice,
        overwritten,
        written_before,
        cleared_before,
        halved_after,
        blended,
        one_storage,
        key_not_stored,
        old_rows_read,
        slots_before_zero,
        slots_plus_minus_one,
        slots_before_zero_by_product,
        slots_padded,
        offset_wrong,
        blocks_of_eight,
        block_and_offset_swapped,
        latent_clamped_on_the_way,
        key_through_float8,
        columns_rolled,
        some_tokens_dropped,
        slots_repeated,
    )
}
