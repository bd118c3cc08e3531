"""Draws one decode step over paged caches that hold a history."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor

from mla_fusion.paging.table import PageTable

BLOCK_SIZE, LATENT, ROPE = 128, 512, 64


class PagedBatch(NamedTuple):
    """The arguments of ``AbsorbedDecoder.forward``, in its order; see there for the shapes."""

    hidden: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    kv_caches: Sequence[Tensor]
    kr_caches: Sequence[Tensor]

    def fresh(self) -> PagedBatch:
        """Returns a copy of the step."""
        return deepcopy(self)


def random_batch(*, layers: int, batch: int, hidden: int, history: int) -> PagedBatch:
    """Returns one new token of each sequence. Lengths are random, up to ``history``; the blocks are
    scattered over the pool.
    """
    generator = torch.Generator().manual_seed(1)
    blocks = -(-(history + 1) // BLOCK_SIZE)
    spare = 2  # blocks of no sequence: a write there would show
    pool = batch * blocks + spare
    tables = torch.randperm(pool, generator=generator)[: batch * blocks].view(batch, blocks)
    seq_lens = torch.randint(history // 2 + 1, history + 2, (batch,), generator=generator)
    pages = PageTable.from_block_table(tables, seq_lens, BLOCK_SIZE)

    def rows(*shape: int) -> Tensor:
        """Returns normal numbers in bfloat16."""
        return torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)

    return PagedBatch(
        hidden=rows(batch, hidden),
        positions=seq_lens - 1,
        slot_mapping=pages.slots(torch.ones_like(seq_lens)),
        block_tables=tables,
        seq_lens=seq_lens,
        kv_caches=[rows(pool, BLOCK_SIZE, 1, LATENT) for _ in range(layers)],
        kr_caches=[rows(pool, BLOCK_SIZE, 1, ROPE) for _ in range(layers)],
    )
