"""Cache writes: rows of c_kv and k_pe at their slots. Each returns what attention reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.catalogue.base import BLOCK_SIZE, DR, HCKV

from .inputs import Named

npu = torch.ops.npu
Rows = tuple[Tensor, Tensor]
Write = Callable[[Named, Tensor, Tensor, Tensor], Rows]
"""``write(inputs, slots, c_kv, k_pe)``; c_kv [.., Hckv] and k_pe [.., Dr] have the tokens'
shape, as slots has.
"""


def _flat(i: Named) -> Rows:
    return i["kv_cache"].view(-1, HCKV), i["kr_cache"].view(-1, DR)


def index_put(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    kv[slots] = c_kv
    kr[slots] = k_pe
    return kv, kr


def index_copy(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    kv.index_copy_(0, slots.flatten(), c_kv.flatten(0, -2))
    kr.index_copy_(0, slots.flatten(), k_pe.flatten(0, -2))
    return kv, kr


def scatter(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    (kv, kr), rows = _flat(i), slots.reshape(-1, 1)
    kv.scatter_(0, rows.expand(-1, HCKV), c_kv.reshape(-1, HCKV))
    kr.scatter_(0, rows.expand(-1, DR), k_pe.reshape(-1, DR))
    return kv, kr


def scatter_nd(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = _flat(i)
    npu.npu_scatter_nd_update_(kv, slots.view(-1, 1), c_kv.reshape(-1, HCKV))
    npu.npu_scatter_nd_update_(kr, slots.view(-1, 1), k_pe.reshape(-1, DR))
    return kv, kr


def block_and_offset(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    i["kv_cache"][block, offset, 0] = c_kv
    i["kr_cache"][block, offset, 0] = k_pe
    return _flat(i)


def combined_cache(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    rows = i["combined_cache"].view(-1, HCKV + DR)
    rows[slots] = torch.cat([c_kv, k_pe], -1)
    return rows[:, :HCKV], rows[:, HCKV:]


def pool_of_layers(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    layer = i["pool"][1].view(-1, HCKV + DR)
    kv, kr = layer[:, :HCKV], layer[:, HCKV:]
    kv.index_put_((slots,), c_kv)
    kr.index_put_((slots,), k_pe)
    return kv, kr


def dense_assignment(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv, kr = i["dense_kv_cache"], i["dense_kr_cache"]
    batch, length = (1, c_kv.shape[0]) if c_kv.dim() == 2 else c_kv.shape[:2]
    kv[:batch, 3 : 3 + length] = c_kv
    kr[:batch, 3 : 3 + length] = k_pe
    return kv.flatten(0, 1), kr.flatten(0, 1)


def concatenated(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    kv = torch.cat([i["kv_rows_cache"], c_kv.reshape(-1, HCKV)])
    kr = torch.cat([i["kr_rows_cache"], k_pe.reshape(-1, DR)])
    return kv, kr


def by_mask(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    """Functional: a fresh cache where each row is the new one or the old."""
    kv, kr = _flat(i)
    kv.copy_(kv.index_put((slots,), c_kv))
    kr.copy_(kr.index_put((slots,), k_pe))
    return kv, kr


def both_by_one_operator(i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> Rows:
    rows = (value.reshape(-1, 1, value.shape[-1]) for value in (c_kv, k_pe))
    npu.npu_scatter_pa_kv_cache(
        *rows, i["kv_cache"], i["kr_cache"], slots.reshape(-1), cache_mode="Norm"
    )
    return _flat(i)


WRITES: dict[str, Write] = {
    f.__name__: f
    for f in (
        index_put,
        index_copy,
        scatter,
        scatter_nd,
        block_and_offset,
        combined_cache,
        pool_of_layers,
        dense_assignment,
        concatenated,
        by_mask,
        both_by_one_operator,
    )
}


# -- slots


def plain(slots: Tensor) -> Tensor:
    return slots


def wrapped(slots: Tensor) -> Tensor:
    return slots % 64


def from_blocks(slots: Tensor) -> Tensor:
    return slots // 8 * 8 + slots % 8


def one_later(slots: Tensor) -> Tensor:
    return slots + 1


SLOTS = {f.__name__: f for f in (plain, wrapped, from_blocks, one_later)}
