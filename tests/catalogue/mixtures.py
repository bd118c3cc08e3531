"""Spellings in which one tensor holds what the kernel keeps apart, or two names stand for one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import spellings as s
from .near_misses import Base
from .spellings import BLOCK_SIZE, DR, HCKV, HCQ, HE, D, linear
from .variants import IN_PLACE, STAGED


class Parts(Base):
    """The prologue with seams where its values meet."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c_kv, k_pe = self.latent(x)
        q_nope, q_pe, k_pe = self.rotated(q_nope, q_pe, k_pe.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1))
        self.write(kv_cache, kr_cache, slots, c_kv, k_pe.squeeze(1))
        return self.scores(q_nope, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)), torch.full_like(c_kv, 0.5)

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q_nope, self.rotate(q_pe, c, sn), self.rotate(k_pe, c, sn)

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        return s.attend(self.absorb(q_nope), q_pe, kv_rows, kr_rows)


class RotatedTogether(Parts):
    """The one key head is rotated as one more query head."""

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_pe, k_pe = self.rotate(torch.cat([q_pe, k_pe], 1), c, sn).split([self.heads, 1], 1)
        return q_nope, q_pe, k_pe


class JoinedAndSplitAgain(Parts):
    """Hugging Face's habit, absorbed: q is put together again after RoPE, and taken apart for the two products."""

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_nope, q_pe = torch.cat([q_nope, self.rotate(q_pe, c, sn)], -1).split([D, DR], -1)
        return q_nope, q_pe, self.rotate(k_pe, c, sn)


class QueryAssembled(Parts):
    """query and query_rope are written into one buffer, made like q_nope, which the kernel never gives out."""

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        query = q_nope.new_empty(*q_nope.shape[:-1], HCKV + DR)
        query[..., :HCKV] = self.absorb(q_nope)
        query[..., HCKV:] = q_pe
        return query.float().flatten(0, 1) @ torch.cat([kv_rows, kr_rows], -1).float().T


class SlotsInTwoWays(Base):
    """One cache is written by slot, the other by (block, offset)."""

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv_cache.view(-1, HCKV).index_put_((slots.view(-1),), c_kv)
        kr_cache.squeeze(2).index_put_((slots // BLOCK_SIZE, slots % BLOCK_SIZE), k_pe)


class BothByOneOperator(Base):
    """vLLM-Ascend without rotation of its own: npu_scatter_pa_kv_cache takes the rows of both caches."""

    mode = "Norm"

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        rows = c_kv.unsqueeze(1), k_pe.unsqueeze(1)
        torch.ops.npu.npu_scatter_pa_kv_cache(*rows, kv_cache, kr_cache, slots, cache_mode=self.mode)


class WeightOnTheLeft(Base):
    """Column-major habits: (W x^T)^T."""

    def down(self, x: Tensor) -> Tensor:
        return (self.q_a_proj.weight @ x.T).T


class WeightOfThreeAxes(Base):
    """JAX ports: W_uq_qr is [Hcq, N, 192], W_uk [Hckv, N, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.w_uq_qr = nn.Parameter((torch.randn(HCQ, self.heads, D + DR) / 32).bfloat16())
        self.w_uk_cnd = nn.Parameter((torch.randn(HCKV, self.heads, D) / 8).bfloat16())
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.einsum("tc,cnd->tnd", c_q, self.w_uq_qr)
        return q[..., :D], q[..., D:]

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("tnd,cnd->tnc", q_nope, self.w_uk_cnd)


class SlotsFromBlockTable(Base):
    """vLLM: slot = block_table[request, position // BlockSize] * BlockSize + position % BlockSize."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, table: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:
        block = table.gather(1, (position // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        slots = block * BLOCK_SIZE + position % BLOCK_SIZE
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)


def block_table_args() -> tuple[Tensor, ...]:
    *rest, kr_cache, _ = s.paged_args(8)
    blocks = kr_cache.shape[0]
    table = torch.stack([torch.arange(blocks).roll(row) for row in range(8)])
    return *rest, kr_cache, table, torch.arange(8) * 3


class IndexerBeside(Base):
    """A sparse-attention indexer projects c_q and x by weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b, self.wk = linear(HCQ, 256), linear(HE, 128)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.wq_b(c_q)


class HalvesOfTheBatch(Base):
    """Two micro-batches over one pair of caches: the second writes to what the first has written."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, second = (
            super(HalvesOfTheBatch, self).forward(x[part], cos[part], sin[part], kv_cache, kr_cache, slots[part])[0]
            for part in (slice(None, 4), slice(4, None))
        )
        return first, second


MIXTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], list[str]]] = {
    **{
        model.__name__: (model, s.paged_args, [IN_PLACE])
        for model in (
            RotatedTogether,
            QueryAssembled,
            JoinedAndSplitAgain,
            SlotsInTwoWays,
            WeightOnTheLeft,
            WeightOfThreeAxes,
            IndexerBeside,
            BothByOneOperator,
        )
    },
    "SlotsFromBlockTable": (SlotsFromBlockTable, block_table_args, [IN_PLACE]),
    "HalvesOfTheBatch": (HalvesOfTheBatch, s.paged_args, [IN_PLACE, STAGED]),
}
