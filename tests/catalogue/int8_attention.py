"""int8 prologues of int8 attention: query and latent cache are int8."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .base import DR, HCKV, npu, paged_args
from .entry import IN_PLACE, OURS, STAGED, entry
from .int8 import Full


def int8_latent_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, (kv_cache * 20).to(torch.int8), kr_cache, slots


attention = partial(
    entry,
    source=OURS,
    tags="int8, absorb, cache, operators",
    args=int8_latent_args,
    weight_quant_mode=2,
    kv_cache_quant_mode=1,
)


@attention(IN_PLACE)
class Int8Attention(Full):
    """int8 query and latent cache, the key and its query in bfloat16; scores are brought back by
    both scales at once.

    ``Tq`` of the cache is ``1 / 25``: rows are multiplied by 25.
    """

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv)
        kr_cache.view(-1, DR)[slots] = k_pe

    def quantise(self, rows: Tensor) -> Tensor:
        return torch.clamp(torch.round(rows.float() * 25.0), -128, 127).to(torch.int8)

    def in_bytes(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_quant(query)

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope.float() * (25.0 / scale.unsqueeze(-1))).to(query_rope.dtype)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        query, scale = self.in_bytes(self.absorb(q_nope))
        query_rope = self.to_scale(self.rotate(q_pe, c, s), scale)
        self.write_rows(x, c, s, kv_cache, kr_cache, slots)
        rows = self.numbers(kv_cache.view(-1, HCKV))
        scores = torch.einsum("tnc,sc->tns", self.numbers(query), rows)
        scores = scores + torch.einsum(
            "tnc,sc->tns", query_rope.float(), kr_cache.view(-1, DR).float()
        )
        return self.brought_back(scores, scale)

    def brought_back(self, scores: Tensor, scale: Tensor) -> Tensor:
        return scores * scale.unsqueeze(-1) / 25.0

    def numbers(self, values: Tensor) -> Tensor:
        return values.float()

    def named(self) -> dict[str, int]:
        """What says of the cache which format it is in."""
        return {}

    def write_rows(
        self, x: Tensor, c: Tensor, s: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> None:
        c_kv, k_pe = self.latent(x)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1))


# the fused cache operator with one scale
def by_operator(
    self: Any, x: Tensor, c: Tensor, s: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
) -> None:
    npu.npu_kv_rmsnorm_rope_cache_v2(
        self.kv_a_proj_with_mqa(x).view(-1, 1, 1, HCKV + DR),
        self.kv_a_layernorm.weight,
        c.unsqueeze(1),
        s.unsqueeze(1),
        slots,
        kr_cache,
        kv_cache,
        c_kv_scale=self.kv_scale,
        epsilon=1e-6,
        cache_mode="PA_BNSD",
        **self.named(),
    )


@attention(IN_PLACE, source="vllm-ascend")
class Int8AttentionOperator(Int8Attention):
    """vllm-ascend's C8 decode: fused cache operator, one scale; its inverse divides query_rope."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale = nn.Parameter(torch.tensor([25.0]))

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope / scale.view(-1, self.heads, 1) * self.kv_scale).to(query_rope.dtype)

    write_rows = by_operator


@attention(IN_PLACE)
class Int8AttentionByQuantize(Int8Attention):
    """Rows by npu_quantize, which divides by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor([0.04]))

    def quantise(self, rows: Tensor) -> Tensor:
        return npu.npu_quantize(rows, self.step, None, torch.int8, -1, True)

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope.float() / (scale.unsqueeze(-1) * self.step)).to(query_rope.dtype)


@attention(STAGED, kv_cache_quant_mode=0)
class RopeNotToScale(Int8Attention):
    """query_rope as it is: the kernel gives it out scaled, so it writes no int8 cache here."""

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return query_rope


@attention(IN_PLACE)
class RopeToOtherScale(Int8Attention):
    """quant_scale_ckv is 24, and kc_scale takes the rest of 25."""

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope.float() * (24.0 / scale.unsqueeze(-1))).to(query_rope.dtype)


@attention(IN_PLACE)
class SmoothedQuery(Int8Attention):
    def in_bytes(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_quant(
            query, smooth_scales=torch.full((HCKV,), 2.0, dtype=query.dtype)
        )


@attention(STAGED, kv_cache_quant_mode=0)
class PerTokenQuery(Int8Attention):
    """One scale for all heads of a token."""

    def in_bytes(self, query: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = npu.npu_dynamic_quant(query.flatten(1))
        return values.view(query.shape), scale.unsqueeze(-1).expand(-1, self.heads)


@attention(IN_PLACE, tags="int8, cache, absorb")
class ScaleRounded(Int8Attention):
    """query_rope is divided by the query's scale in bfloat16, which is also read in float32."""

    def to_scale(self, rope: Tensor, scale: Tensor) -> Tensor:
        return rope / scale.unsqueeze(-1).to(rope.dtype) * 25.0


@attention(IN_PLACE)
class OfSteps(Int8AttentionByQuantize):
    """The step of rows, and that of the query, are elements of one parameter."""

    of_query = 1

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.tensor([0.04, 0.05, 0.06]), requires_grad=False)

    def quantise(self, rows: Tensor) -> Tensor:
        return npu.npu_quantize(rows, self.steps[1:2], None, torch.int8, -1, True)

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        step = self.steps[self.of_query]
        return (query_rope.float() / (scale.unsqueeze(-1) * step)).to(query_rope.dtype)


@attention(STAGED, kv_cache_quant_mode=0)
class OfOtherSteps(OfSteps):
    of_query = 0
