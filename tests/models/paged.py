"""Small paged pools of latents, and torch's own attention over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion.models.attention import mla_paged_attention

N, HCKV, DR, BLOCK, BLOCKS = 2, 32, 8, 16, 4
SCALE = 0.2
LENGTHS = [37, 1, 64, 16]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


class Paged:
    """Four sequences scattered over a pool whose other rows are NaN."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, lengths: list[int] | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths or LENGTHS
        sequences = len(self.lengths)
        pool = sequences * BLOCKS + 1
        order = torch.randperm(pool, generator=generator)[: sequences * BLOCKS].view(
            sequences, BLOCKS
        )
        self.kv = torch.full((pool, BLOCK, 1, HCKV), float("nan"), dtype=dtype)
        self.kr = torch.full((pool, BLOCK, 1, DR), float("nan"), dtype=dtype)
        # vLLM leaves anything behind the last block
        self.tables = torch.full((sequences, BLOCKS), -7)
        for index, length in enumerate(self.lengths):
            used = -(-length // BLOCK)
            self.tables[index, :used] = order[index, :used]
            for position in range(length):
                block, row = order[index, position // BLOCK], position % BLOCK
                self.kv[block, row].normal_(generator=generator)
                self.kr[block, row].normal_(generator=generator)
        self.generator, self.dtype = generator, dtype

    def queries(self, tokens: int) -> tuple[Tensor, Tensor]:
        shapes = ((tokens, N, HCKV), (tokens, N, DR))
        return tuple(
            torch.empty(shape, dtype=self.dtype).normal_(generator=self.generator)
            for shape in shapes
        )

    def keys(self, index: int) -> tuple[Tensor, Tensor]:
        """(key [L, Hckv + Dr], value [L, Hckv]) of one sequence, in order."""
        table = self.tables[index, : -(-self.lengths[index] // BLOCK)]
        c_kv, k_pe = (
            cache[table].flatten(0, 2)[: self.lengths[index]] for cache in (self.kv, self.kr)
        )
        return torch.cat((c_kv, k_pe), dim=-1), c_kv

    def attend(self, query: Tensor, query_rope: Tensor, **options: object):
        options.setdefault("seq_lens", torch.tensor(self.lengths))
        options.setdefault("block_tables", self.tables)
        return mla_paged_attention(query, query_rope, self.kv, self.kr, scale=SCALE, **options)


def dense(
    query: Tensor, query_rope: Tensor, key: Tensor, value: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """torch's attention of [Q, N, ..] over [L, ..], with the log-sum-exp of the same scores."""
    q = torch.cat((query, query_rope), dim=-1).transpose(0, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, key.expand(N, -1, -1), value.expand(N, -1, -1), attn_mask=visible, scale=SCALE
    )
    scores = (q @ key.T * SCALE).masked_fill(~visible, float("-inf"))
    return out.transpose(0, 1), scores.logsumexp(-1).T


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def rows(layer: Any) -> list[Tensor]:
    """The tokens that a layer of MlaPagedCache holds: copies ``[B, 1, length, width]``."""
    return [layer.read(pool)[:, :, : layer.token_count()].clone() for _, pool in layer.pools()]
