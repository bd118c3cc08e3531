"""Prologues of public code that stay as they are, each with its reason: unabsorbed ones, and those
the kernel has no form for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, DV, HCKV, HCQ, HE, Base, D, H, HfNorm, attend, linear, npu, rotated, wide
from .entry import IN_PLACE, STAGED, entry
from .prologues import NpuOperators


class Unabsorbed(Base):
    """Keys and values of all heads from kv_b_proj, and attention over the tokens at hand."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(x, cos, sin)

    def keys(self, c_kv: Tensor) -> tuple[Tensor, Tensor]:
        k_nope, value = self.kv_b_proj(c_kv).view(-1, self.heads, D + DV).split([D, DV], -1)
        return k_nope, value

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *given: Tensor) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        q_pe, k_pe = (
            self.turn(part, cos.unsqueeze(1), sin.unsqueeze(1))
            for part in (q_pe, k_pe.unsqueeze(1))
        )
        k_nope, value = self.keys(c_kv)
        q, k = (
            torch.cat([q_nope, q_pe], -1),
            torch.cat([k_nope, k_pe.expand(-1, self.heads, -1)], -1),
        )
        return F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (q, k, value))
        )


entry(
    "absorb.absent", source="DeepSeek's remote code", tags="near miss, public, whole", name="Hub"
)(Unabsorbed)


@entry("absorb.absent", source="litgpt", tags="near miss, public, whole")
class Litgpt(Unabsorbed):
    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


@entry("absorb.absent", source="torchtitan", tags="near miss, public, whole")
class Torchtitan(Unabsorbed):
    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn = torch.complex(cos[..., :H].float(), sin[..., :H].float())
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


@entry("absorb.absent", source="fla", tags="near miss, public, whole")
class Fla(Litgpt):
    """The rotated key has a projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa, self.k_rope = linear(HE, HCKV), linear(HE, DR)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kv_a_layernorm(self.kv_a_proj_with_mqa(x)), self.k_rope(x)


@entry("absorb.absent", source="NeMo", tags="near miss, public, whole")
class Nemo(Unabsorbed):
    """Keys before values, all heads of each."""

    def keys(self, c_kv: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.kv_b_proj(c_kv).split([self.heads * D, self.heads * DV], -1)
        return k.view(-1, self.heads, D), v.view(-1, self.heads, DV)


@entry("absorb.absent", source="Kimi-K3", tags="near miss, public, whole")
class NothingRotatedUnabsorbed(Unabsorbed):
    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x


entry(STAGED, source="Kimi-K3, prefill", tags="readers, unabsorbed", name="NothingRotatedIdentity")(
    NothingRotatedUnabsorbed
)


class NoNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x


@entry("norm.absent", source="minimal models", tags="near miss, public, norm")
class Normless(Unabsorbed):
    norm = NoNorm


@entry("norm.absent", source="minimal models", tags="near miss, public, norm")
class NormlessAbsorbed(Base):
    norm = NoNorm


@entry("q_lora.absent", source="DeepSeek-V2-Lite and Bailing", tags="near miss, public, weights")
class QueryOfHidden(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HE, self.heads * (D + DR))

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.split(self.q_proj(x))
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        self.write(kv_cache, kr_cache, slots, c_kv, rotated(k_pe.unsqueeze(1), c, s).squeeze(1))
        gate = torch.sigmoid(F.linear(x, self.kv_a_proj_with_mqa.weight[:HCKV]).float()).unsqueeze(
            1
        )
        rows = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return attend(self.absorb(q_nope) * gate, rotated(q_pe, c, s), *rows)


@entry("q_lora.interrupted", source="A.X-K2", tags="near miss, public, readers")
class RawAndNormed(Base):
    """The query is projected from c_q beside what was before its norm; an indexer reads c_q."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj, self.wq_b = linear(2 * HCQ, self.heads * (D + DR)), linear(HCQ, 4 * DR)

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        raw = self.q_a_proj(x)
        c_q = self.q_a_layernorm(raw)
        q_nope, q_pe = self.split(self.q_b_proj(torch.cat([c_q, raw], -1)))
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        self.write(kv_cache, kr_cache, slots, c_kv, rotated(k_pe.unsqueeze(1), c, s).squeeze(1))
        rows = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        picked = rotated(self.wq_b(c_q).view(-1, 4, DR), c, s)
        return attend(self.absorb(q_nope), rotated(q_pe, c, s), *rows), picked


@entry("rope.normed_key", source="dots3", tags="near miss, public, rope")
class Dots3(Base):
    def __init__(self) -> None:
        super().__init__()
        self.k_norm = HfNorm(DR)

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(self.k_norm(k_pe), c, s)


@entry("absorb.absent", source="dots3", tags="near miss, public, rope")
class Dots3Unabsorbed(Dots3):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


@entry(
    "absorb.absent",
    source="graphs that a latent's norm stands outside of",
    tags="near miss, public, norm",
)
class NormElsewhere(Base):
    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return c_kv, k_pe

    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


@entry("rope.heads_differ", source="educational models", tags="near miss, public, rope")
class OneRotatedPart(Base):
    """One rotated part of the query for all of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj, self.q_rope = linear(HCQ, self.heads * D), linear(HCQ, DR)

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        c_q = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_pe = (
            self.q_b_proj(c_q).view(-1, self.heads, D),
            rotated(self.q_rope(c_q), cos, sin),
        )
        c_kv, k_pe = self.latent(x)
        self.write(kv_cache, kr_cache, slots, c_kv, rotated(k_pe, cos, sin))
        spread = q_pe.unsqueeze(1).expand(-1, self.heads, -1)
        return attend(self.absorb(q_nope), spread, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


@entry("linear.bias", source="models with attention_bias", tags="near miss, public, weights")
class AttentionBias(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = linear(HE, HCQ, bias=True)


@entry("norm.gamma_dtype", source="DeepSeek's own code, V3.2", tags="near miss, public, norm")
class TrainedFloat32Norms(Base):
    """Float32 weights that are no bfloat16 numbers."""

    class norm(HfNorm):
        def __init__(self, width: int, eps: float = 1e-6) -> None:
            super().__init__(width, eps)
            self.weight = nn.Parameter(self.weight.float() + 1e-5)

        def forward(self, x: Tensor) -> Tensor:
            y = wide(x)
            return (self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps))).to(
                x.dtype
            )


class MixedBatch(NpuOperators):
    """Decode and prefill rows of one batch are cut apart behind the norm of c_q (vllm-ascend)."""

    decode = 5

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        c_q, latent, gamma = (
            self.q_a_layernorm(self.q_a_proj(x)),
            self.kv_a_proj_with_mqa(x),
            self.kv_a_layernorm,
        )
        made = []
        for part in (slice(0, self.decode), slice(self.decode, None)):
            c, s = (table[part].view(-1, 1, 1, DR) for table in (cos, sin))
            q_nope, q_pe = self.q_b_proj(c_q[part]).view(-1, self.heads, D + DR).split([D, DR], -1)
            q_pe = npu.npu_interleave_rope(q_pe.unsqueeze(2), c, s).squeeze(2)
            rows, mode = latent[part].view(-1, 1, 1, HCKV + DR), {"cache_mode": "PA_BNSD"}
            given = rows, gamma.weight, c, s, slots[part], kr_cache, kv_cache
            npu.npu_kv_rmsnorm_rope_cache_v2(*given, epsilon=gamma.eps, **mode)
            made.append(torch.cat([q_nope, q_pe], -1) if made else self.absorb(q_nope))
        return made


entry(
    "tokens.cut",
    source="vllm-ascend",
    tags="near miss, public, operators, layout",
    name="MixedBatch",
)(MixedBatch)


@entry("tokens.cut", source="vllm-ascend", tags="near miss, public, layout")
class DecodeRows(Base):
    """The query is projected from all tokens, and attention reads those that decode."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))[:5])
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        self.write(kv_cache, kr_cache, slots, c_kv, rotated(k_pe.unsqueeze(1), c, s).squeeze(1))
        rows = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return attend(self.absorb(q_nope), rotated(q_pe, c[:5], s[:5]), *rows)


class OfOperatorNz(NpuOperators):
    """Keys and values are made of the rows that the cache operator gives out beside NZ pages."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        c, s = cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR)
        q_nope, q_pe = self.query(x)
        q_pe = npu.npu_interleave_rope(q_pe.unsqueeze(2), c, s).squeeze(2)
        latent, norm = self.kv_a_proj_with_mqa(x).view(-1, 1, 1, HCKV + DR), self.kv_a_layernorm
        k_pe, c_kv = npu.npu_kv_rmsnorm_rope_cache(
            latent, norm.weight, c, s, slots, kr_cache, kv_cache,
            epsilon=norm.eps, cache_mode="PA_NZ", is_output_kv=True,
        )[2:]  # fmt: skip
        k_nope, value = (
            self.kv_b_proj(c_kv.view(-1, HCKV)).view(-1, self.heads, D + DV).split([D, DV], -1)
        )
        scores = torch.einsum("tnd,snd->nts", q_nope, k_nope) + torch.einsum(
            "tnd,sd->nts", q_pe, k_pe.view(-1, DR)
        )
        return scores, value


entry(
    IN_PLACE, source="cann-recipes, prefill of R1 and "
                     "LongCat-lite", tags="readers, operators, unabsorbed",
    name="PrefillNz",
)(lambda: OfOperatorNz(version=1))  # fmt: skip


# -- parts of a prologue that are another one's, or none's


@entry("rope.normed_key", source="models with a norm of each head", tags="near miss, public, norm")
class HeadNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head_norm = HfNorm(D + DR)

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.head_norm(q.view(-1, self.heads, D + DR)).split([D, DR], -1)
        return q_nope, q_pe


@entry("rope.absent", source="engines that rotate keys as they read them", tags="near miss, public")
class RotatedWhenRead(Base):
    """The key goes to its cache as it is projected."""

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return k_pe


class Sides(Base):
    """The query of its own x, the rotated part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q_nope_proj, self.q_pe_proj = linear(HCQ, self.heads * D), self.rotated_proj()

    def rotated_proj(self) -> nn.Linear:
        return linear(HCQ, self.heads * DR)

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_q = self.q_a_layernorm(self.q_a_proj(x))
        q_pe = self.q_pe_proj(x if self.q_pe_proj.in_features == HE else c_q)
        return self.q_nope_proj(c_q).view(-1, self.heads, D), q_pe.view(-1, self.heads, DR)

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        c_kv, k_pe = self.latent(x)
        self.write(kv_cache, kr_cache, slots, c_kv, rotated(k_pe, cos, sin))
        q_nope, q_pe = self.sides(x)
        c, s = (table[-len(q_pe) :].unsqueeze(1) for table in (cos, sin))
        rows = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return attend(self.absorb(q_nope), rotated(q_pe, c, s), *rows)


@entry("q_lora.absent", source="educational models", tags="near miss, public, weights")
class QueryRopeOfHidden(Sides):
    """q_pe is projected from the hidden state, beside q_nope from its latent."""

    def rotated_proj(self) -> nn.Linear:
        return linear(HE, self.heads * DR)


@entry("kv_latent.absent", source="prefill of a last layer", tags="near miss, public, layout")
class QueryOfTheLastToken(Sides):
    """All keys are kept, and the last token alone asks."""

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().sides(x[-1:])


@entry("linear.hidden", source="engines that project in chunks", tags="near miss, public, layout")
class QueryInChunks(Sides):
    def sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = zip(*map(super().sides, x.chunk(2)), strict=True)
        return torch.cat(q_nope), torch.cat(q_pe)
