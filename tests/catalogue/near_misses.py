"""Prologues with one thing wrong. Each must stay unfused, for the reason its name says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import spellings as s
from .spellings import DR, HCKV, HCQ, HE, D, HfNorm, Prologue, hf_interleave, linear, rotate_half


class Base(Prologue):
    """Spelling (a) with a seam at every step."""

    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(x)

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(q_pe, c, s)

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, c, s)

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        x = hf_interleave(x)
        return x * c + rotate_half(x) * s

    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return torch.zeros(1)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        c_q_raw = self.down(x)
        c_q = self.q_a_layernorm(c_q_raw)
        q_nope, q_pe = self.split(self.q_b_proj(c_q))
        c_kv, k_pe = self.latent(x)
        c, s_ = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated_q, rotated_k = self.rotate_q(q_pe, c, s_), self.rotate_k(k_pe.unsqueeze(1), c, s_).squeeze(1)
        query = self.absorb(q_nope)
        self.write(kv_cache, kr_cache, self.slots(slots, query), c_kv, rotated_k)
        scores = s.attend(query, rotated_q, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))
        return scores, self.extra(c_q_raw, c_q, k_pe)

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = q.view(-1, self.heads, D + DR).split([D, DR], -1)
        return q_nope, q_pe

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = k_pe


class NoQueryLora(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HE, self.heads * (D + DR))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_proj(x))
        c_kv, k_pe = self.latent(x)
        c, s_ = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = self.rotate(q_pe, c, s_), self.rotate(k_pe.unsqueeze(1), c, s_).squeeze(1)
        query = self.absorb(q_nope)
        self.write(kv_cache, kr_cache, slots, c_kv, k_pe)
        return s.attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


class KeyNotNormed(Base):
    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return c_kv, k_pe


class NoRotation(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


class TablesSwappedOnKey(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, s, c)


class KeyOnePositionLater(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, c.roll(1, 0), s.roll(1, 0))


class LayoutsDiffer(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd, c, s = k_pe[..., 0::2], k_pe[..., 1::2], c[..., : DR // 2], s[..., : DR // 2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd, c, s = q_pe[..., 0::2], q_pe[..., 1::2], c[..., : DR // 2], s[..., : DR // 2]
        return torch.cat([even * c - odd * s, odd * c + even * s], -1)


class Unabsorbed(Base):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


class NoGamma(Base):
    def down(self, x: Tensor) -> Tensor:
        return F.rms_norm(self.q_a_proj(x), (HCQ,), None, 1e-6)

    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm = nn.Identity()  # type: ignore[assignment]


class Fp32Gamma(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + 0.1 * torch.randn(HCKV))

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return F.rms_norm(c_kv.float(), (HCKV,), self.gamma, 1e-6).bfloat16(), k_pe


class Bf16Norm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class LowPrecision(Base):
    norm = Bf16Norm


class Bias(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = linear(HCQ, self.heads * (D + DR), bias=True)


class ScaledAddmm(Base):
    def down(self, x: Tensor) -> Tensor:
        return torch.addmm(x.new_zeros(HCQ), x, self.q_a_proj.weight.t(), alpha=2.0)


class ScaledRope(Base):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(2.0 * q_pe, c, s)


def through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a narrow dtype and back."""
    return x.to(dtype).to(x.dtype)


class KeyTableRounded(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(k_pe, through(c, torch.float8_e4m3fn), through(s, torch.float8_e4m3fn))


class QueryInputRounded(Base):
    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(through(x, torch.float8_e4m3fn))


class QueryInputHalf(Base):
    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(through(x, torch.float16))


class LatentRounded(Base):
    norm = HfNorm

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(through(q, torch.float8_e4m3fn))


class RankFour(Base):
    """x is [.., .., .., He] and only the products are flattened."""

    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(x).flatten(0, 2)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).flatten(0, 2).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


class SharedRows(Base):
    """Two sequences of four tokens share the table's rows, and x has no sequence axis."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x.view(2, 4, -1, DR), c, s).flatten(0, 1)


class RawLatentRead(Base):
    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return c_q_raw.sum(-1)


class UnrotatedKeyRead(Base):
    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return k_pe.sum(-1)


class SlotsFromQuery(Base):
    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots + (query[:, 0, 0] * 0).abs().long()


class LayerNormInstead(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm = nn.LayerNorm(HCQ, dtype=torch.bfloat16)  # type: ignore[assignment]


class ClampedNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-4, 4)


class LatentClamped(Base):
    """Between the norm and W_uq_qr."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm = ClampedNorm(HCQ)


class CenteredNorm(HfNorm):
    """LayerNorm without a bias, on both latents."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (x.shape[-1],), self.weight)


class LayerNorms(Base):
    norm = CenteredNorm


@torch.library.custom_op("mla_fusion_test::norm", mutates_args=())
def own_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


@own_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


class OpaqueNorm(HfNorm):
    """An operator of the model's own, on both latents."""

    def forward(self, x: Tensor) -> Tensor:
        return own_norm(x, self.weight, self.eps)


class LatentOutliersCut(Base):
    """Values that a probe of magnitude 1 never has are cut off before the norm."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv.clamp(-50, 50)), k_pe


class LatentDropout(Base):
    """In training."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(F.dropout(c_kv, 0.1)), k_pe


@torch.library.custom_op("mla_fusion_test::own_scale", mutates_args=())
def own_scale(x: Tensor) -> Tensor:
    return x * 1.0


@own_scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OpaqueScale(Base):
    """An operator of the model's own before RoPE of the query."""

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(own_scale(q_pe), c, s)


class OpaqueNorms(Base):
    norm = OpaqueNorm


class NoNorms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm = self.kv_a_layernorm = nn.Identity()  # type: ignore[assignment]


class NormOverHalf(HfNorm):
    """The mean is taken over the first half of the row."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        half = wide[..., : x.shape[-1] // 2]
        return self.weight * (wide * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class WrongMean(Base):
    norm = NormOverHalf


class RopeOnHalfTheColumns(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first = hf_interleave(first)
        return torch.cat([first * c[..., : DR // 2] + rotate_half(first) * s[..., : DR // 2], second], -1)


class RopeMixesHeads(Base):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        q_pe = hf_interleave(q_pe)
        return q_pe * c + rotate_half(q_pe.flip(1)) * s


class NormedKey(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(F.rms_norm(k_pe, (DR,)), c, s)


class GatedLatent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(HE, HCKV)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv * torch.sigmoid(self.gate(x)), k_pe


class Adapted(nn.Module):
    """A low-rank adapter beside the weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, linear(layer.in_features, 8), linear(8, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


class Packed(nn.Module):
    """int4 weights, eight to an int32."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        packed = torch.randint(-9, 9, (layer.in_features, layer.out_features // 8), dtype=torch.int32)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(1, layer.out_features).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_weight_quant_batchmatmul(x, self.weight, self.scale)


class Scaled8(nn.Module):
    """float8 weights and activations."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        step, one = x.float().abs().max() / 448, torch.ones((), device=x.device)
        rows = (x.float() / step).to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, self.weight.t(), scale_a=step, scale_b=one, out_dtype=x.dtype)


class Hidden(Base):
    """None of the three layers is a plain product."""

    layer: type[nn.Module] = Adapted
    names: tuple[str, ...] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            setattr(self, name, self.layer(getattr(self, name)))


class AdaptedQuery(Hidden):
    names = ("q_b_proj",)


class AdaptedQueryLatent(Hidden):
    names = ("q_a_proj",)


class AdaptedLatent(Hidden):
    names = ("kv_a_proj_with_mqa",)


class PackedLatent(AdaptedLatent):
    layer = Packed


class AllPacked(Hidden):
    layer = Packed


class AllScaled8(Hidden):
    layer = Scaled8


class PreMerged(Base):
    """W_uq and W_uk multiplied beforehand: the kernel cannot be given the product."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = linear(HCQ, self.heads * HCKV)
        self.q_rope_proj = linear(HCQ, self.heads * DR)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        c_q = self.q_a_layernorm(self.q_a_proj(x))
        query = self.merged(c_q).view(-1, self.heads, HCKV)
        c_kv, k_pe = self.latent(x)
        c, s_ = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe = self.rotate(self.q_rope_proj(c_q).view(-1, self.heads, DR), c, s_)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s_).squeeze(1))
        return s.attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


class OperatorNormMode(s.NpuOperators):
    """npu_kv_rmsnorm_rope_cache on a cache that is a view of a pool."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:
        return super().forward(x, cos, sin, kv_cache[:2], kr_cache[:2], slots % 32)


class SlicedBehindTheProjections(Base):
    """A batch that is padded to eight tokens, four of them real."""

    def down(self, x: Tensor) -> Tensor:
        return self.q_a_proj(x)[:4]

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x)[:4].split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().forward(x, cos[:4], sin[:4], kv_cache, kr_cache, slots[:4])


REFUSED: dict[str, tuple[str, type[nn.Module]]] = {
    "sliced_behind_the_projections": ("tokens.cut", SlicedBehindTheProjections),
    "no_query_lora": ("q_lora.absent", NoQueryLora),
    "key_not_normed": ("kv_latent.absent", KeyNotNormed),
    "no_rotation": ("rope.absent", NoRotation),
    "tables_swapped": ("rope.tables_differ", TablesSwappedOnKey),
    "key_one_position_later": ("rope.tables_differ", KeyOnePositionLater),
    "layouts_differ": ("rope.layouts_differ", LayoutsDiffer),
    "unabsorbed": ("absorb.absent", Unabsorbed),
    "no_gamma": ("norm.gamma_absent", NoGamma),
    "fp32_gamma": ("norm.gamma_dtype", Fp32Gamma),
    "low_precision": ("norm.low_precision", LowPrecision),
    "bias": ("linear.bias", Bias),
    "scaled_addmm": ("linear.scaled", ScaledAddmm),
    "scaled_rope": ("scale.unequal", ScaledRope),
    "key_table_rounded": ("rope.tables_differ", KeyTableRounded),
    "query_input_rounded": ("kv_latent.absent", QueryInputRounded),
    "query_input_half": ("dtype.region", QueryInputHalf),
    "query_rounded": ("q_lora.absent", LatentRounded),
    "raw_latent_read": ("reader.latent", RawLatentRead),
    "unrotated_key_read": ("reader.latent", UnrotatedKeyRead),
    "slots_from_query": ("order.cycle", SlotsFromQuery),
    "layer_norm": ("norm.absent", LayerNormInstead),
    "latent_clamped": ("q_lora.interrupted", LatentClamped),
    "layer_norms": ("norm.absent", LayerNorms),
    "latent_outliers_cut": ("step.choice", LatentOutliersCut),
    "latent_dropout": ("step.random", LatentDropout),
    "opaque_scale": ("step.unknown", OpaqueScale),
    "opaque_norms": ("norm.absent", OpaqueNorms),
    "no_norms": ("norm.absent", NoNorms),
    "rope_on_half": ("reader.latent", RopeOnHalfTheColumns),
    "rope_mixes_heads": ("rope.absent", RopeMixesHeads),
    "normed_key": ("kv_latent.absent", NormedKey),
    "all_adapted": ("linear.hidden", Hidden),
    "adapted_query": ("linear.hidden", AdaptedQuery),
    "adapted_query_latent": ("linear.hidden", AdaptedQueryLatent),
    "adapted_latent": ("linear.hidden", AdaptedLatent),
    "packed_latent": ("linear.hidden", PackedLatent),
    "all_packed": ("linear.hidden", AllPacked),
    "all_scaled": ("linear.hidden", AllScaled8),
    "pre_merged": ("absorb.absent", PreMerged),
    "pool_view": ("cache.view_of_input", OperatorNormMode),
}
