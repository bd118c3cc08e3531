"""Prologues with int8 weights, as the stacks write them: npu_dynamic_quant, then npu_quant_matmul."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .near_misses import Base
from .spellings import DR, HCKV, HCQ, HE, D, attend, linear, paged_args, rotate_half

npu = torch.ops.npu


class QuantLinear(nn.Module):
    """int8 weight [in, out] with a scale per column; quantises its input per token.

    In float64 it is the same weight without any quantisation of the input: the maths that both runs approximate.
    """

    def __init__(self, width_in: int, width_out: int, smooth: bool = False) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (width_in, width_out), dtype=torch.int8)
        scale = (0.5 + torch.rand(width_out)) / (73 * width_in**0.5)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.smooth = nn.Parameter(0.5 + torch.rand(width_in)) if smooth else None

    def matrix(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return (x if self.smooth is None else x * self.smooth) @ (self.matrix() * self.scale)
        x, x_scale = npu.npu_dynamic_quant(x, smooth_scales=self.smooth)
        return self.product(x, x_scale)

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(
            x, self.matrix(), self.scale, pertoken_scale=x_scale, output_dtype=torch.bfloat16
        )


class TransposedLinear(QuantLinear):
    """The weight held as [out, in]."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.weight = nn.Parameter(self.weight.t().contiguous(), requires_grad=False)

    def matrix(self) -> Tensor:
        return self.weight.t()


class FlattenedLinear(QuantLinear):
    """cann-recipes: rows and scales flattened between the two operators."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        rows = super().product(x.view(-1, x.shape[-1]), x_scale.view(-1))
        return rows.view(*x.shape[:-1], -1)


class Partial(Base):
    """Only W_uq_qr is int8."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = QuantLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


class PartialSmooth(Base):
    """Smooth scales on c_q alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = QuantLinear(HCQ, self.heads * (D + DR), smooth=True)  # type: ignore[assignment]


class Full(Base):
    """All three; each projection quantises x by itself, as AscendW8A8Dynamic and cann-recipes do."""

    linear: type[QuantLinear] = QuantLinear

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = self.linear(HE, HCQ)  # type: ignore[assignment]
        self.q_b_proj = self.linear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]
        self.kv_a_proj_with_mqa = self.linear(HE, HCKV + DR)  # type: ignore[assignment]


class FullBfloat16Scales(Full):
    def __init__(self) -> None:
        super().__init__()
        for module in (self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa):
            module.scale = nn.Parameter(module.scale.bfloat16(), requires_grad=False)  # type: ignore[union-attr]


class FullSmooth(Full):
    """One tensor of smooth scales for x, one for c_q."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth_x, self.smooth_cq = (nn.Parameter(0.5 + torch.rand(width)) for width in (HE, HCQ))
        self.q_a_proj.smooth = self.kv_a_proj_with_mqa.smooth = self.smooth_x  # type: ignore[assignment]
        self.q_b_proj.smooth = self.smooth_cq  # type: ignore[assignment]


class FullTransposed(Full):
    linear = TransposedLinear


class FullFlattened(Full):
    linear = FlattenedLinear


class MergedDown(Full):
    """vLLM: one product for W_dq and W_dkv_kr, x quantised once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_a = QuantLinear(HE, HCQ + HCKV + DR)

    def down(self, x: Tensor) -> Tensor:
        return self.qkv_a(x)[..., :HCQ]

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, c_kv, k_pe = self.qkv_a(x).split([HCQ, HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


class Chunked(Full):
    """vllm-ascend's chunked W8A8: two products of one quantised c_q, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(QuantLinear(HCQ, self.heads // 2 * (D + DR)) for _ in range(2))
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(torch.cat([half(c_q) for half in self.halves], -1))


class HalfRope(Full):
    """Half-layout RoPE: columns of int8 weights and of their scales are permuted together."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + rotate_half(x) * s


class InterleavedRope(Full):
    """Pairs in, pairs out: staged."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (t[..., : DR // 2].repeat_interleave(2, -1) for t in (c, s))
        return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


class IndexerReads(Full):
    """The indexer projects c_q too, by a quantisation of its own that equals the first."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b = QuantLinear(HCQ, 128)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.wq_b(c_q)


class OperatorCache(Partial):
    """int8 caches written by the fused cache operator, a scale per channel."""

    scales = (HCKV, DR)

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (nn.Parameter(20 + 10 * torch.rand(width)) for width in self.scales)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        query, query_rope = self.absorb(q_nope), self.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        tables = [table.view(-1, 1, 1, DR) for table in (cos, sin)]
        latent = self.kv_a_proj_with_mqa(x).view(-1, 1, 1, HCKV + DR)
        npu.npu_kv_rmsnorm_rope_cache_v2(
            latent,
            self.kv_a_layernorm.weight,
            *tables,
            slots,
            kr_cache,
            kv_cache,
            k_rope_scale=self.kr_scale,
            c_kv_scale=self.kv_scale,
            epsilon=1e-6,
            cache_mode="PA_BNSD",
        )
        return attend(query, query_rope, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


class OperatorCacheOneScale(OperatorCache):
    scales = (1, 1)


class PlainCache(Partial):
    """int8 caches, rows quantised by plain operators."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (nn.Parameter(20 + 10 * torch.rand(width)) for width in (HCKV, DR))

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp(torch.round(rows.float() * scale), -128, 127).to(torch.int8)

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv, self.kv_scale)
        kr_cache.view(-1, DR)[slots] = self.quantise(k_pe, self.kr_scale)


class DividedRows(PlainCache):
    """The scale is what a step is worth, and one for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (nn.Parameter(torch.tensor([0.04])) for _ in range(2))

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.float() / scale).round().clamp(-128, 127).char()


class LiteralScale(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp((rows.float() * 25.0).round(), -128, 127).to(torch.int8)


class SymmetricClamp(PlainCache):
    """-127 is the lowest code: not the kernel's saturation."""

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp(torch.round(rows.float() * scale), -127, 127).to(torch.int8)


class Truncated(PlainCache):
    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp(rows.float() * scale, -128, 127).to(torch.int8)


class FullPlainCache(Full):
    """Per-channel caches with all three projections int8: no mode of the kernel."""

    write = PlainCache.write
    quantise = PlainCache.quantise

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale, self.kr_scale = (nn.Parameter(20 + 10 * torch.rand(width)) for width in (HCKV, DR))


class PackedRows(Full):
    """One cache of 656-byte rows: int8 tiles of the latent, the bfloat16 key, a float32 scale per tile."""

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        tiles = c_kv.float().view(-1, 4, 128)
        scale = tiles.abs().amax(-1, keepdim=True) / 127
        values = torch.round(tiles / scale).clamp(-128, 127).to(torch.int8).flatten(1)
        parts = [values, k_pe.contiguous().view(torch.int8), scale.squeeze(-1).contiguous().view(torch.int8)]
        kv_cache.view(-1, 656)[slots] = torch.cat(parts, -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1))
        return torch.cat([self.absorb(q_nope), self.rotate(q_pe, c, s)], -1)


class PackedByOperators(PackedRows):
    """vllm-ascend's sparse C8: npu_dynamic_block_quant, cat, npu_scatter_nd_update_."""

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        values, scale = npu.npu_dynamic_block_quant(c_kv, row_block_size=1, col_block_size=128)
        packed = torch.cat([values, k_pe.contiguous().view(torch.int8), scale.view(torch.int8)], -1)
        npu.npu_scatter_nd_update_(kv_cache.view(-1, 656), slots.view(-1, 1), packed)


class PackedClipped(PackedRows):
    """Every tile clipped to 0.9 of its largest magnitude; only W_uq_qr is int8."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = linear(HE, HCQ), linear(HE, HCKV + DR)

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        tiles = c_kv.float().unflatten(-1, (4, 128))
        limit = 0.9 * tiles.abs().amax(-1, keepdim=True)
        scale = (limit / 127).clamp(min=1e-8)
        values = torch.maximum(torch.minimum(tiles, limit), -limit).div(scale).round().to(torch.int8)
        as_bytes = [part.contiguous().view(torch.int8) for part in (k_pe, scale.squeeze(-1))]
        index = torch.stack([slots // 16, slots % 16])
        kv_cache.view(-1, 16, 656)[index[0], index[1]] = torch.cat([values.flatten(-2), *as_bytes], -1)


class PackedOtherwise(PackedRows):
    """The scales before the key: no row of the kernel's."""

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        values, scale = npu.npu_dynamic_block_quant(c_kv)
        packed = torch.cat([values, scale.view(torch.int8), k_pe.contiguous().view(torch.int8)], -1)
        kv_cache.view(-1, 656)[slots] = packed


class PackedAndRead(PackedRows):
    """The new rows are read as they are, too."""

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        self.last = c_kv

    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([super().forward(*args).flatten(1), self.last], -1)


class PackedUnquantised(PackedRows):
    """bfloat16 weights: packed rows do not go with them."""

    def __init__(self) -> None:
        Base.__init__(self)


class Int8Attention(Full):
    """int8 query and latent cache, the key and its query in bfloat16; scores are brought back by both scales at once.

    ``Tq`` of the cache is ``1 / 25``: rows are multiplied by 25.
    """

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv)
        kr_cache.view(-1, DR)[slots] = k_pe

    def quantise(self, rows: Tensor) -> Tensor:
        return torch.clamp(torch.round(rows.float() * 25.0), -128, 127).to(torch.int8)

    def in_int8(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_quant(query)

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope.float() * (25.0 / scale.unsqueeze(-1))).to(query_rope.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        query, scale = self.in_int8(self.absorb(q_nope))
        query_rope = self.to_scale(self.rotate(q_pe, c, s), scale)
        self.write_rows(x, c, s, kv_cache, kr_cache, slots)
        scores = torch.einsum("tnc,sc->tns", query.float(), kv_cache.view(-1, HCKV).float())
        scores = scores + torch.einsum("tnc,sc->tns", query_rope.float(), kr_cache.view(-1, DR).float())
        return scores * scale.unsqueeze(-1) / 25.0

    def write_rows(self, x: Tensor, c: Tensor, s: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> None:
        c_kv, k_pe = self.latent(x)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1))


class Int8AttentionOperator(Int8Attention):
    """vllm-ascend's C8 decode: the fused cache operator with one scale, which divides query_rope as its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_scale = nn.Parameter(torch.tensor([25.0]))

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope / scale.view(-1, self.heads, 1) * self.kv_scale).to(query_rope.dtype)

    def write_rows(self, x: Tensor, c: Tensor, s: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> None:
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
        )


class Int8AttentionByQuantize(Int8Attention):
    """Rows by npu_quantize, which divides by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor([0.04]))

    def quantise(self, rows: Tensor) -> Tensor:
        return npu.npu_quantize(rows, self.step, None, torch.int8, -1, True)

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope.float() / (scale.unsqueeze(-1) * self.step)).to(query_rope.dtype)


class RopeNotToScale(Int8Attention):
    """query_rope as it is: the kernel gives it out scaled, so it writes no int8 cache here."""

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return query_rope


class RopeToOtherScale(Int8Attention):
    """quant_scale_ckv is 24, and kc_scale takes the rest of 25."""

    def to_scale(self, query_rope: Tensor, scale: Tensor) -> Tensor:
        return (query_rope.float() * (24.0 / scale.unsqueeze(-1))).to(query_rope.dtype)


class QueryReadTwice(Int8Attention):
    """Somebody reads the query in bfloat16 beside its int8 form."""

    def in_int8(self, query: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = npu.npu_dynamic_quant(query)
        return values, scale * (1 + 0 * query.float().amax(-1))


class SmoothedQuery(Int8Attention):
    def in_int8(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_quant(query, smooth_scales=torch.full((HCKV,), 2.0, dtype=query.dtype))


class PerTokenQuery(Int8Attention):
    """One scale for all heads of a token."""

    def in_int8(self, query: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = npu.npu_dynamic_quant(query.flatten(1))
        return values.view(query.shape), scale.unsqueeze(-1).expand(-1, self.heads)


def packed_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, torch.randint(-9, 9, (*kv_cache.shape[:3], 656), dtype=torch.int8), kr_cache, slots


def int8_latent_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, (kv_cache * 20).to(torch.int8), kr_cache, slots


def int8_cache_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    return x, cos, sin, (kv_cache * 20).to(torch.int8), (kr_cache * 20).to(torch.int8), slots


# name: (model, arguments, weight_quant_mode, placement)
QUANTISED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], int, str]] = {
    "Partial": (Partial, paged_args, 1, "in place"),
    "PartialSmooth": (PartialSmooth, paged_args, 1, "in place"),
    "Full": (Full, paged_args, 2, "in place"),
    "FullBfloat16Scales": (FullBfloat16Scales, paged_args, 2, "in place"),
    "FullSmooth": (FullSmooth, paged_args, 2, "in place"),
    "FullTransposed": (FullTransposed, paged_args, 2, "in place"),
    "FullFlattened": (FullFlattened, paged_args, 2, "in place"),
    "MergedDown": (MergedDown, paged_args, 2, "in place"),
    "Chunked": (Chunked, paged_args, 2, "in place"),
    "HalfRope": (HalfRope, paged_args, 2, "in place"),
    "InterleavedRope": (InterleavedRope, paged_args, 2, "staged"),
    "IndexerReads": (IndexerReads, paged_args, 2, "in place"),
}

# name: (model, kv_cache_quant_mode, placement): int8 caches
INT8_CACHES: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "OperatorCache": (OperatorCache, 2, "in place"),
    "OperatorCacheOneScale": (OperatorCacheOneScale, 2, "in place"),
    "PlainCache": (PlainCache, 2, "in place"),
    "DividedRows": (DividedRows, 2, "in place"),
    "LiteralScale": (LiteralScale, 2, "in place"),
    "SymmetricClamp": (SymmetricClamp, 0, "staged"),
    "Truncated": (Truncated, 0, "staged"),
    "FullPlainCache": (FullPlainCache, 0, "staged"),
}

# name: (model, kv_cache_quant_mode, placement): one cache of packed rows
PACKED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "PackedRows": (PackedRows, 3, "in place"),
    "PackedByOperators": (PackedByOperators, 3, "in place"),
    "PackedClipped": (PackedClipped, 3, "in place"),
    "PackedOtherwise": (PackedOtherwise, 0, "staged"),
    "PackedAndRead": (PackedAndRead, 0, "staged"),
    "PackedUnquantised": (PackedUnquantised, 0, "staged: packed rows do not go with weight_quant_mode 0"),
}

# name: (model, kv_cache_quant_mode, placement): an int8 latent cache and an int8 query
INT8_ATTENTION: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "Int8Attention": (Int8Attention, 1, "in place"),
    "Int8AttentionOperator": (Int8AttentionOperator, 1, "in place"),
    "Int8AttentionByQuantize": (Int8AttentionByQuantize, 1, "in place"),
    "RopeNotToScale": (RopeNotToScale, 0, "staged"),
    "RopeToOtherScale": (RopeToOtherScale, 1, "in place"),
    "QueryReadTwice": (QueryReadTwice, 0, "staged"),
    "SmoothedQuery": (SmoothedQuery, 0, "staged"),
    "PerTokenQuery": (PerTokenQuery, 0, "staged"),
}
