"""Prologues in float formats with caches in them: query and latent in float8, or rows packed with a
scale a tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.reference import hifloat8

from .base import DR, HCKV, npu, paged_args
from .entry import IN_PLACE, OURS, STAGED, entry
from .floats import HIF8, VLLM, Floats, HifLinear, RowLinear
from .int8_attention import Int8Attention, by_operator
from .int8_caches import PackedRows

TAGS = "floats, cache, operators"


def latent_args() -> tuple[Tensor, ...]:
    """The latent cache in float8."""
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, (20 * kv_cache).to(torch.float8_e4m3fn), kr_cache, slots


def latent_args_in_hifloat8() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, hifloat8.encode(20 * kv_cache), kr_cache, slots


def packed_float_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    rows = torch.randint(0, 60, (*kv_cache.shape[:3], 656), dtype=torch.uint8)
    return x, cos, sin, rows.view(torch.float8_e4m3fn), kr_cache, slots


def packed_hifloat8_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = packed_float_args()
    return x, cos, sin, kv_cache.view(torch.uint8), kr_cache, slots


class FloatAttention(Floats):
    """float8 query and latent cache, bfloat16 key and its query; both scales bring scores back."""

    dst_type: torch.dtype | int = torch.float8_e4m3fn

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale = nn.Parameter(torch.tensor([25.0]))

    def quantise(self, rows: Tensor) -> Tensor:
        return (rows.float() * self.kv_scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def in_bytes(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_quant(query, dst_type=self.dst_type)

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope.float() * (self.kv_scale / scale.unsqueeze(-1))).to(query_rope.dtype)

    def brought_back(self, scores: Tensor, scale: Tensor) -> Tensor:
        return scores * scale.unsqueeze(-1) / self.kv_scale

    write, write_rows = Int8Attention.write, Int8Attention.write_rows
    forward, numbers, named = Int8Attention.forward, Int8Attention.numbers, Int8Attention.named


latent = partial(entry, source=OURS, tags=TAGS, weight_quant_mode=3, soc="A5", args=latent_args)


@latent(IN_PLACE, source=VLLM, kv_cache_quant_mode=1)
class MxAttention(FloatAttention):
    pass


@latent(IN_PLACE, weight_quant_mode=4, kv_cache_quant_mode=1)
class Fp8Attention(FloatAttention):
    linear = RowLinear


class _ByOperator(FloatAttention):
    """vllm-ascend's fa_quant on A5: the fused cache operator with one scale."""

    write_rows = by_operator


@latent(IN_PLACE, source=VLLM, kv_cache_quant_mode=1)
class MxAttentionByOperator(_ByOperator):
    pass


@latent(IN_PLACE, weight_quant_mode=5, kv_cache_quant_mode=1, args=latent_args_in_hifloat8)
class HifAttentionByOperator(_ByOperator):
    linear = HifLinear
    dst_type = HIF8  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", hifloat8.decode(torch.arange(256, dtype=torch.uint8)))

    def numbers(self, values: Tensor) -> Tensor:
        return self.codes[values.long()]

    def named(self) -> dict[str, int]:
        return {"ckv_cache_dtype": HIF8}


@entry(STAGED, source=OURS, tags=TAGS, weight_quant_mode=3, soc="A5", args=latent_args)
class MxAttentionOverflows(FloatAttention):
    """Numbers out of range are left to the cast: NaN in one torch, 448 in another."""

    def quantise(self, rows: Tensor) -> Tensor:
        return (rows.float() * self.kv_scale).to(torch.float8_e4m3fn)


@entry(STAGED, source=OURS, tags=TAGS, weight_quant_mode=3, soc="A5", args=latent_args)
class MxAttentionBounded(FloatAttention):
    """Clipped where ordinary rows do not reach."""

    def quantise(self, rows: Tensor) -> Tensor:
        return (rows.float() * self.kv_scale).clamp(-440, 440).to(torch.float8_e4m3fn)


@entry(STAGED, source=OURS, tags=TAGS, weight_quant_mode=3, soc="A5", args=latent_args)
class MxAttentionQueryInInt8(FloatAttention):
    """The query in another format than the cache."""

    dst_type = None  # type: ignore[assignment]


class Packed(Floats):
    """One cache of 656-byte rows: float8 tiles, the bfloat16 key, a float32 scale per tile."""

    options: tuple[tuple[str, Any], ...] = (("dst_type", torch.float8_e4m3fn),)

    def pack(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        values, scale = npu.npu_dynamic_block_quant(c_kv, **dict(self.options))
        return torch.cat(
            [values, *(part.contiguous().view(values.dtype) for part in (k_pe, scale))], -1
        )

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        npu.npu_scatter_nd_update_(kv_cache.view(-1, 656), slots.view(-1, 1), self.pack(c_kv, k_pe))

    forward = PackedRows.forward


packed = partial(
    entry,
    source=OURS,
    tags=f"{TAGS}, layout",
    weight_quant_mode=3,
    soc="A5",
    args=packed_float_args,
)


@packed(IN_PLACE, source="vllm-ascend, sparse attention of GLM-5", kv_cache_quant_mode=3)
class MxPacked(Packed):
    pass


@packed(IN_PLACE, weight_quant_mode=4, kv_cache_quant_mode=3)
class Fp8Packed(Packed):
    linear = RowLinear


@packed(IN_PLACE, weight_quant_mode=5, kv_cache_quant_mode=3, args=packed_hifloat8_args)
class HifPacked(Packed):
    linear = HifLinear
    options = (("dst_type", HIF8), ("round_mode", "round"))


@packed(STAGED)
class MxPackedWithBound(Packed):
    """No scale above a hundred: the kernel has no bound."""

    options = (*Packed.options, ("min_scale", 0.01))


@packed(STAGED)
class MxPackedClipped(Packed):
    """The latent is clipped where ordinary rows do not reach."""

    def pack(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        return super().pack(c_kv.clamp(-30, 30), k_pe)


@packed(STAGED)
class MxPackedOtherwise(Packed):
    """The scales before the key: no row of the kernel's."""

    def pack(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        values, key, scale = super().pack(c_kv, k_pe).split([HCKV, 2 * DR, 16], -1)
        return torch.cat([values, scale, key], -1)
