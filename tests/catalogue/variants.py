"""More ways to write one step of the prologue, each beside the stack that writes it so."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import near_misses
from . import spellings as s
from .near_misses import Base
from .spellings import DR, HCKV, HCQ, HE, D, HfNorm, linear, rotate_half

npu = torch.ops.npu


class NpuRopeHeadsFirst(Base):
    """cann-recipes: [1, N, T, Dr] into npu_interleave_rope."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = c.view(1, 1, -1, DR), s.view(1, 1, -1, DR)
        return npu.npu_interleave_rope(x.unsqueeze(0).transpose(1, 2), c, s).transpose(1, 2).view(*x.shape)


class NpuRotaryMul(Base):
    """Half layout by npu_rotary_mul."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return npu.npu_rotary_mul(x.unsqueeze(0), c.unsqueeze(0), s.unsqueeze(0)).squeeze(0)


class GptjStack(Base):
    """vLLM and SGLang native, is_neox_style=False: interleaved in and out, tables repeated by pairs."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (t[..., : DR // 2].repeat_interleave(2, -1) for t in (c, s))
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * c + turned * s


class GptjOneByOne(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = c[..., : DR // 2], s[..., : DR // 2]
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((x1 * c - x2 * s, x2 * c + x1 * s), -1).flatten(-2)


class RollWithSigns(Base):
    """Rotate-half by roll and a constant vector of signs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.cat([-torch.ones(DR // 2), torch.ones(DR // 2)]).bfloat16())

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        signs = torch.cat([x.new_full((DR // 2,), -1.0), x.new_ones(DR // 2)])
        return x * c + x.roll(DR // 2, -1) * signs * s


class WideRope(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x.float(), c.float(), s.float()).to(x.dtype)


class ChunkedWeights(Base):
    """A large weight multiplied chunk by chunk, the chunks cut in the graph."""

    def down(self, x: Tensor) -> Tensor:
        return torch.cat([x @ chunk.t() for chunk in self.q_a_proj.weight.chunk(3)], -1)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = torch.cat([F.linear(x, w) for w in self.kv_a_proj_with_mqa.weight.split(192)], -1).split(
            [HCKV, DR], -1
        )
        return self.kv_a_layernorm(c_kv), k_pe


class ChunkedHeads(Base):
    """W_uq_qr held as several parameters, cut in the middle of a head."""

    def __init__(self) -> None:
        super().__init__()
        chunks = self.q_b_proj.weight.detach().split([100, 184, 100])
        self.chunks = nn.ParameterList(nn.Parameter(chunk.clone()) for chunk in chunks)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, c_q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(torch.cat([F.linear(c_q, chunk) for chunk in self.chunks], -1))


class SlotsFromQuery(Base):
    """Slots cast from a product may be negative, so the model's own writes stay, which also come late enough."""

    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots + (query[:, 0, 0] * 0).long()


class SeparateUpProjections(Base):
    """W_uq and W_qr, W_dkv and W_kr as four linears."""

    def __init__(self) -> None:
        super().__init__()
        self.uq, self.qr = linear(HCQ, self.heads * D), linear(HCQ, self.heads * DR)
        self.dkv, self.kr = linear(HE, HCKV), linear(HE, DR)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.uq(q).view(-1, self.heads, D), self.qr(q).view(-1, self.heads, DR)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kv_a_layernorm(self.dkv(x)), self.kr(x)


class AllNopeThenAllRope(Base):
    """q_b columns: every head's nope part, then every head's rope part."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        nope, rope = q.split([self.heads * D, self.heads * DR], -1)
        return nope.reshape(-1, self.heads, D), rope.reshape(-1, self.heads, DR)


class RopeBeforeNope(Base):
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_pe, q_nope = q.view(-1, self.heads, D + DR).split([DR, D], -1)
        return q_nope, q_pe


class UnbindPairs(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        x = torch.cat((even, odd), -1)
        return x * c + rotate_half(x) * s


class NpuAddRmsNorm(HfNorm):
    """omni-infer: add_rms_norm with a residual of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return npu.npu_add_rms_norm(x, torch.zeros_like(x), self.weight, self.eps)[0]


class ZeroResidual(Base):
    norm = NpuAddRmsNorm


class PowerNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        return (self.weight * (wide * (torch.mean(wide.square(), -1, True) + self.eps).pow(-0.5))).to(x.dtype)


class Power(Base):
    norm = PowerNorm


class NormByVector(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * torch.rsqrt(size * size / x.shape[-1] + self.eps)).to(x.dtype) * self.weight


class VectorNorm(Base):
    norm = NormByVector


class OnePlusGammaNorm(HfNorm):
    """GemmaRMSNorm: the parameter is gamma - 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight + 1, self.eps)


class OnePlusGamma(Base):
    norm = OnePlusGammaNorm


class LongCat(Base):
    """Both halves of q scaled after the projection, the latent after its norm."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = super().split(q)
        return q_nope * 2.0, q_pe * 2.0

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return c_kv * 3.46, k_pe


class AbsorbByEinsum(Base):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk())


class AbsorbUnsqueezed(Base):
    """ktransformers: 4-D by 3-D matmul."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.matmul(q_nope.unsqueeze(2), self.w_uk()).squeeze(2)


class AbsorbTransposedWeight(Base):
    """madsys: W_uk kept as [N, Hckv, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.w_uk_t = nn.Parameter(torch.randn(self.heads, HCKV, D).bfloat16() / 8)

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.bmm(q_nope.transpose(0, 1), self.w_uk_t.transpose(1, 2)).transpose(0, 1)


class AbsorbNpu(Base):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return npu.npu_transpose_batchmatmul(q_nope, self.w_uk(), perm_x1=(1, 0, 2), perm_y=(1, 0, 2))


class CombinedCache(Base):
    """vLLM: one row [c_kv | k_pe] in one cache of 576."""

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        rows = torch.cat([c_kv, k_pe], -1)
        kv_cache.view(-1, HCKV)[slots] = rows[:, :HCKV]
        kr_cache.view(-1, DR)[slots] = rows[:, HCKV:]


class ScatterRows(Base):
    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv_cache.view(-1, HCKV).scatter_(0, slots.unsqueeze(1).expand(-1, HCKV), c_kv)
        kr_cache.view(-1, DR).scatter_(0, slots.unsqueeze(1).expand(-1, DR), k_pe)


class ScatterNd(Base):
    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        npu.npu_scatter_nd_update_(kv_cache.view(-1, HCKV), slots.view(-1, 1), c_kv)
        npu.npu_scatter_nd_update_(kr_cache.view(-1, DR), slots.view(-1, 1), k_pe)


class MaskedWrite(Base):
    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        kv_cache.view(-1, HCKV).index_add_(0, slots, c_kv)
        kr_cache.view(-1, DR).index_add_(0, slots, k_pe)


class Int32Slots(Base):
    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots.int()


class ReadsOldCache(Base):
    """Something reads the cache as it was before the write."""

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        self.old = kv_cache.view(-1, HCKV)[slots].sum()
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.old


class NewRowsRead(Base):
    """The new tokens' latents are also used directly."""

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.new_rows.sum(-1)

    def write(self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        self.new_rows = c_kv
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)


class QueryReadRounded(Base):
    """Something reads the query through float8: the rounding must stay."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        return near_misses.through(super().absorb(q_nope), torch.float8_e4m3fn)


class WeightsInOut(Base):
    """cann-recipes: weights [in, out], x @ W."""

    def __init__(self) -> None:
        super().__init__()
        self.w_dq = nn.Parameter(self.q_a_proj.weight.detach().t().contiguous())

    def down(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.w_dq)


class SlicedWeights(Base):
    """Both down-projections are slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HCQ + HCKV + DR, HE).bfloat16() / 32)

    def down(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w[:HCQ])

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = F.linear(x, self.w[HCQ:]).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


class EinsumLinear(Base):
    def down(self, x: Tensor) -> Tensor:
        return torch.einsum("tk,nk->tn", x, self.q_a_proj.weight)


class WideResidual(Base):
    """x arrives in float32 and is cast for every projection."""

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.float().mul(1.0).to(x.dtype), *args)


class InPlaceQuery(Base):
    """vLLM: the rotated part is written back into q, which is split again."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(-1, self.heads, D + DR)
        c_kv, k_pe = self.latent(x)
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        q[..., D:] = self.rotate(q[..., D:], c, sn)
        q_nope, q_pe = q.split([D, DR], -1)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, sn).squeeze(1))
        scores = s.attend(self.absorb(q_nope), q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))
        return scores, torch.zeros(1)


class GatheredTables(Base):
    """Tables of all positions, indexed in the graph; slots serve as positions."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        positions = slots % 8
        return super().forward(x, cos[positions], sin.index_select(0, positions), kv_cache, kr_cache, slots)


class TablesLookedUpTwice(Base):
    """Each side of the attention looks its rows up with an operator of its own."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.tables, self.positions = (cos, sin), slots % 8
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (table[self.positions].unsqueeze(1) for table in self.tables)
        return self.rotate(q_pe, c, s)

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c, s = (F.embedding(self.positions, table).unsqueeze(1) for table in self.tables)
        return self.rotate(k_pe, c, s)


class TablesFromTheEnd(Base):
    """Tables of every position so far, of which the last rows are the new tokens'."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        before = cos.shape[0] - x.shape[0]
        return super().forward(x, cos[before:], sin[before:], kv_cache, kr_cache, slots)


class ComputedTables(Base):
    """Hugging Face: frequencies times positions, in float32."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        inverse = 1.0 / (10000 ** (torch.arange(0, DR, 2, device=x.device, dtype=torch.float32) / DR))
        angles = (inverse[:, None] @ slots[None, :].float()).transpose(0, 1)
        both = torch.cat((angles, angles), -1)
        return super().forward(x, both.cos().to(x.dtype), both.sin().to(x.dtype), kv_cache, kr_cache, slots)


class ChunkedTables(Base):
    """SGLang: one table [cos | sin], chunked and repeated."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat([cos[:, : DR // 2], sin[:, : DR // 2]], -1)[slots % 8]
        c, s_ = joined.chunk(2, -1)
        return super().forward(x, c.repeat(1, 2), s_.repeat(1, 2), kv_cache, kr_cache, slots)


class Sequences(s.PagedRotateHalf):
    """[B, S, He] with heads moved forward, as Hugging Face lays them out."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, self.heads, D + DR).transpose(1, 2)
        q_nope, q_pe = q.split([D, DR], -1)
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        c_kv, k_pe = self.kv_a_layernorm(c_kv), k_pe.view(batch, 1, length, DR)
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = s.hf_interleave(q_pe), s.hf_interleave(k_pe)
        q_pe, k_pe = q_pe * c + rotate_half(q_pe) * sn, k_pe * c + rotate_half(k_pe) * sn
        query = torch.matmul(q_nope, self.w_uk().unsqueeze(0))
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = k_pe.squeeze(1)
        return s.attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


def sequence_args(batch: int = 2, length: int = 3) -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = s.paged_args(batch * length)
    lead = (batch, length)
    return x.view(*lead, HE), cos.view(*lead, DR), sin.view(*lead, DR), kv_cache, kr_cache, slots.view(lead)


def shared_table_args() -> tuple[Tensor, ...]:
    """One row of the table per position, for all sequences."""
    x, cos, sin, *rest = sequence_args()
    return (x, cos[:1], sin[:1], *rest)


class StaticCache(s.PagedRotateHalf):
    """Hugging Face StaticCache: [B, 1, S_max, width], index_copy_ on axis 2."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, position: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        c, sn = cos.unsqueeze(2), sin.unsqueeze(2)
        q_pe, k_pe = s.hf_interleave(q_pe), s.hf_interleave(k_pe.unsqueeze(2))
        q_pe, k_pe = q_pe * c + rotate_half(q_pe) * sn, k_pe * c + rotate_half(k_pe) * sn
        query = torch.einsum("bsnd,ndc->bsnc", q_nope, self.w_uk())
        kv_cache.index_copy_(2, position, c_kv.unsqueeze(1))
        kr_cache.index_copy_(2, position, k_pe.transpose(1, 2))
        scores = torch.einsum("bsnc,btc->bsnt", query.float(), kv_cache.squeeze(1).float())
        return scores + torch.einsum("bsnr,btr->bsnt", q_pe.float(), kr_cache.squeeze(1).float())


def static_cache_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = sequence_args()
    return (
        x,
        cos,
        sin,
        torch.randn(2, 1, 32, HCKV).bfloat16(),
        torch.randn(2, 1, 32, DR).bfloat16(),
        torch.arange(4, 7),
    )


def longer_table_args() -> tuple[Tensor, ...]:
    x, _, _, *rest = s.paged_args(5)
    return (x, *s.tables(13), *rest)


def one_token_args() -> tuple[Tensor, ...]:
    return s.paged_args(1)


IN_PLACE, STAGED = "in place", "staged"

VARIANTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], str]] = {
    **{
        model.__name__: (model, s.paged_args, IN_PLACE)
        for model in (
            NpuRopeHeadsFirst,
            NpuRotaryMul,
            RollWithSigns,
            WideRope,
            ChunkedWeights,
            ChunkedHeads,
            SeparateUpProjections,
            AllNopeThenAllRope,
            RopeBeforeNope,
            UnbindPairs,
            ZeroResidual,
            Power,
            VectorNorm,
            OnePlusGamma,
            LongCat,
            AbsorbByEinsum,
            AbsorbUnsqueezed,
            AbsorbTransposedWeight,
            AbsorbNpu,
            ScatterRows,
            ScatterNd,
            Int32Slots,
            QueryReadRounded,
            WeightsInOut,
            SlicedWeights,
            EinsumLinear,
            WideResidual,
            InPlaceQuery,
            GatheredTables,
            TablesLookedUpTwice,
            ComputedTables,
            ChunkedTables,
        )
    },
    **{
        model.__name__: (model, s.paged_args, STAGED)
        for model in (
            GptjStack,
            GptjOneByOne,
            CombinedCache,
            MaskedWrite,
            ReadsOldCache,
            NewRowsRead,
            SlotsFromQuery,
        )
    },
    "Sequences": (Sequences, sequence_args, IN_PLACE),
    "SequencesShareRows": (Sequences, shared_table_args, IN_PLACE),
    "StaticCache": (StaticCache, static_cache_args, STAGED),
    "TablesFromTheEnd": (TablesFromTheEnd, longer_table_args, IN_PLACE),
    "OneToken": (s.PagedRotateHalf, one_token_args, IN_PLACE),
    "Gated": (near_misses.GatedLatent, s.paged_args, STAGED),
}
