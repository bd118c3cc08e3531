"""Calls of the attention operator over pages of latents, and what they are in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LATENT, ROPE, SCALE = 512, 64, 0.05
WIDE = torch.float64


@dataclass
class Latents:
    """Sequences scattered over a pool whose other rows are NaN (127 in int8).

    new     tokens of each sequence in the query, the last ones of ``lengths``
    form    of the caches: "BSD" [blocks, BlockSize, width], "NSD" [blocks, 1, BlockSize, width],
            or "NZ" [blocks, 1, width / C0, BlockSize, C0]
    """

    lengths: tuple[int, ...] = (37, 1, 60, 16)
    new: tuple[int, ...] = (1, 1, 1, 1)
    heads: int = 2
    block: int = 16
    form: str = "BSD"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        make = self.make = torch.Generator().manual_seed(0)
        self.int8 = self.dtype == torch.int8
        self.float = torch.bfloat16 if self.int8 else self.dtype
        blocks = -(-max(self.lengths) // self.block)
        sequences = len(self.lengths)
        self.table = torch.full((sequences, blocks), -7, dtype=torch.int32)
        order = torch.randperm(sequences * blocks + 1, generator=make).int()
        for index, length in enumerate(self.lengths):
            used = -(-length // self.block)
            self.table[index, :used] = order[index * blocks :][:used]
        self.kv_scale = torch.tensor([0.02])
        self.c_kv, self.k_pe = (
            self.pool(len(order), LATENT, self.dtype),
            self.pool(len(order), ROPE, self.float),
        )
        tokens = sum(self.new)
        self.query = self.noise((tokens, self.heads, LATENT), self.dtype)
        rope = torch.randn(tokens, self.heads, ROPE, generator=make, dtype=WIDE)
        self.query_scale = torch.rand(tokens, self.heads, generator=make) / 40 + 0.01
        self.query_rope = (rope / self.factor() if self.int8 else rope).to(self.float)

    def noise(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 127, shape, generator=self.make, dtype=dtype)
        return torch.randn(shape, generator=self.make, dtype=WIDE).to(dtype)

    def pool(self, blocks: int, width: int, dtype: torch.dtype) -> Tensor:
        """[blocks, BlockSize, width]"""
        pool = torch.full(
            (blocks, self.block, width), 127 if dtype == torch.int8 else float("nan"), dtype=dtype
        )
        for index, length in enumerate(self.lengths):
            for position in range(length):
                block = self.table[index, position // self.block]
                pool[block, position % self.block] = self.noise((width,), dtype)
        return pool

    def factor(self) -> Tensor:
        return (self.query_scale * self.kv_scale).to(WIDE).unsqueeze(-1)

    def cache(self, pool: Tensor) -> Tensor:
        if self.form == "NZ":
            return nz(pool)
        return pool if self.form == "BSD" else pool.unsqueeze(1)

    def call(self, layout: str = "TND") -> dict[str, Any]:
        """The operator's arguments; sequences have equally many new tokens where it is not TND."""
        axes, key = layout.split("_")[0], self.cache(self.c_kv)
        several = "T" in layout or max(self.new) > 1
        of_quantised = {
            "dequant_scale_query": self.laid_out(
                self.query_scale, axes.replace("D", "").replace("H", "N")
            ),
            "dequant_scale_key": self.kv_scale,
            "dequant_scale_value": self.kv_scale,
            "query_quant_mode": 3,
        }
        return {
            "query": self.laid_out(self.query, axes),
            "key": key,
            "value": key,
            "query_rope": self.laid_out(self.query_rope, axes),
            "key_rope": self.cache(self.k_pe),
            "block_table": self.table,
            "block_size": self.block,
            "actual_seq_qlen": torch.tensor(self.new).cumsum(0).tolist() if "T" in layout else None,
            "actual_seq_kvlen": list(self.lengths),
            "num_query_heads": self.heads,
            "num_key_value_heads": 1,
            "softmax_scale": SCALE,
            "input_layout": layout,
            "sparse_mode": 3 if several else 0,
            "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1) if several else None,
            "return_softmax_lse": True,
            **(of_quantised if self.int8 else {}),
        }

    def laid_out(self, tokens: Tensor, axes: str) -> Tensor:
        """[T, N, ..] in a layout's axes."""
        if axes.startswith("T"):
            return tokens
        rows = tokens.unflatten(0, (len(self.lengths), -1))
        if axes.endswith("H"):
            return rows.flatten(2)
        return rows.permute(["BSND".index(axis) for axis in axes]).contiguous()

    def exact(self) -> tuple[Tensor, Tensor]:
        """out [T, N, 512] and lse [T, N], of the very numbers of the call in float64."""
        q, q_rope = self.query.to(WIDE), self.query_rope.to(WIDE)
        if self.int8:
            q, q_rope = q * self.factor(), q_rope * self.factor()
        outs, lses, done = [], [], 0
        for index, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
            keys, ropes = (
                torch.stack(
                    [
                        pool[self.table[index, at // self.block], at % self.block]
                        for at in range(length)
                    ]
                ).to(WIDE)
                for pool in (self.c_kv, self.k_pe)
            )
            for token in range(new):
                seen = length - new + token + 1
                scores = SCALE * (q[done] @ keys[:seen].T + q_rope[done] @ ropes[:seen].T)
                out = torch.softmax(scores, -1) @ keys[:seen]
                outs.append(out * self.kv_scale.to(WIDE) if self.int8 else out)
                lses.append(torch.logsumexp(scores, -1))
                done += 1
        return torch.stack(outs), torch.stack(lses)


def nz(pool: Tensor) -> Tensor:
    """NZ of [blocks, BlockSize, width]; C0 elements are 32 bytes."""
    c0 = 32 // pool.element_size()
    return pool.unflatten(2, (-1, c0)).transpose(1, 2).unsqueeze(1).contiguous()


def error(found: Tensor, exact: Tensor) -> float:
    """The largest error, relative to the largest number."""
    return float((found.to(WIDE) - exact).abs().max() / exact.abs().max())
