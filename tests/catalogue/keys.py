"""Prologues that npu_mla_prolog_v3 does not take, and whose key half npu_kv_rmsnorm_rope_cache
does.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import (
    BLOCK_SIZE,
    BLOCKS,
    DR,
    HCKV,
    HCQ,
    HE,
    Base,
    D,
    attend,
    hf_interleave,
    linear,
    npu,
    paged_args,
    rotate_half,
    rotated,
)
from .entry import IN_PLACE, OURS, STAGED, Entry, add, based, words
from .entry import entry as any_entry
from .int8 import QuantLinear
from .norms import NpuAddRmsNorm
from .prologues import COMPLEX, ComplexDense, dense_args
from .writes import static_cache_args

BOTH = ("v3", "key")
entry = partial(any_entry, targets=BOTH, instead_of="q_lora.absent", slack=1.1)


class Lite(Base):
    """DeepSeek-V2-Lite, Moonlight, Bailing, Mistral-Large-4: the query comes from the hidden state
    directly.
    """

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.q_proj = linear(HE, heads * (D + DR))
        self.q_a_proj = self.q_a_layernorm = self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def down(self, x: Tensor) -> Tensor:
        return self.q_proj(x)


@entry(
    IN_PLACE,
    source="Hugging Face's remote code of DeepSeek-V2-Lite",
    tags="key, whole, symbolic, device, export",
)
class PagedLite(Lite):
    """Tables gathered by position, halves by view and transpose, pages."""


@entry(IN_PLACE, source="Kimi Linear", tags="key, whole, symbolic, device")
class UnrotatedLite(Lite):
    """Nothing is rotated: cos = 1, sin = 0."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


@any_entry(
    STAGED,
    source="DeepSeek's own code, q_lora_rank 0",
    tags="key, whole, symbolic, device",
    args=dense_args,
    targets=BOTH,
    instead_of="q_lora.absent",
    slack=COMPLEX,
)
class ComplexLite(ComplexDense):
    """Complex rotation, which leaves interleaved rows; a slice of each sequence's own cache."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.q_proj = linear(HE, heads * (D + DR))

    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.q_proj(x).view(*x.shape[:-1], self.heads, D + DR).split([D, DR], -1)
        return q_nope, q_pe


def combined_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_, slots = paged_args()
    return x, cos, sin, torch.randn(BLOCKS, BLOCK_SIZE, HCKV + DR).bfloat16(), slots


@entry(STAGED, source="vLLM", tags="key, whole, symbolic, device", args=combined_args)
class OneCacheLite(Lite):
    """concat_and_cache_mla: latent and key side by side in rows of 576."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_proj(x))
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = self.rotate(q_pe, c, s), self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1)
        rows = cache.view(-1, HCKV + DR)
        rows[slots] = torch.cat([c_kv, k_pe], -1)
        return attend(self.absorb(q_nope), q_pe, rows[:, :HCKV], rows[:, HCKV:])


@entry(
    IN_PLACE,
    source="cann-recipes' prefill",
    tags="key, whole, operators, readers, symbolic, device",
)
class RowsReadToo(Lite):
    """torch_npu's operators one by one; the new rows go to their caches and, expanded, to
    attention.
    """

    norm = NpuAddRmsNorm

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        c_kv, k_pe = self.latent(x)
        c, s = cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR)
        q_nope, q_pe = self.split(self.q_proj(x))
        q_pe = npu.npu_interleave_rope(q_pe.view(-1, self.heads, 1, DR), c, s).view(
            -1, self.heads, DR
        )
        k_pe = npu.npu_interleave_rope(k_pe.view(-1, 1, 1, DR), c, s).view(-1, DR)
        kv, kr = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        npu.npu_scatter_nd_update_(kv, slots.view(-1, 1), c_kv)
        npu.npu_scatter_nd_update_(kr, slots.view(-1, 1), k_pe)
        own = torch.einsum(
            "tnd,snd->tsn",
            q_nope.float(),
            (c_kv @ self.w_uk().transpose(1, 2)).transpose(0, 1).float(),
        )
        own = own + torch.einsum("tnr,sr->tsn", q_pe.float(), k_pe.float())
        return own.sum() + kv.float().sum() + kr.float().sum()


@entry(
    IN_PLACE, source="transformers", tags="key, whole, layout", alone=(STAGED,),
    args=static_cache_args,
)  # fmt: skip
class StaticCacheLite(Lite):
    """Latents of [B, 1, S, ..] in a static cache; keys and values are expanded from what it
    returns.
    """

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, D + DR).transpose(1, 2)
        q_nope, q_pe = q.split([D, DR], -1)
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        c_kv, k_pe = self.kv_a_layernorm(c_kv).unsqueeze(1), k_pe.view(batch, 1, length, DR)
        c, s = cos.view(batch, 1, length, DR), sin.view(batch, 1, length, DR)
        q_pe, k_pe = rotated(q_pe, c, s), rotated(k_pe, c, s)
        kv_cache.index_copy_(2, slots, c_kv)
        kr_cache.index_copy_(2, slots, k_pe)
        keys = self.kv_b_proj(kv_cache.view(batch, -1, HCKV)).view(batch, -1, self.heads, 2 * D)[
            ..., :D
        ]
        scores = torch.einsum("bnsd,btnd->bnst", q_nope.float(), keys.float())
        return scores + torch.einsum(
            "bnsd,btd->bnst", q_pe.float(), kr_cache.view(batch, -1, DR).float()
        )


@entry(IN_PLACE, source="Flash Linear Attention", tags="key, weights, norm, device, symbolic")
class SeparateDown(Lite):
    """W_dkv and W_kr apart, F.rms_norm."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.dkv, self.kr = linear(HE, HCKV), linear(HE, DR)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.rms_norm(self.dkv(x), (HCKV,), self.kv_a_layernorm.weight, 1e-5), self.kr(x)


@entry(IN_PLACE, source="Mistral-Large-4's layout, in pages", tags="key, rope, device, symbolic")
class NeoxLite(Lite):
    """Halves in, halves out: the key's columns are permuted on their way."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + rotate_half(x) * s


@entry(IN_PLACE, source=OURS, tags="key, rope, device")
class WideLite(Lite):
    """The rotation in float32, by tables that were widened."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        wide = hf_interleave(x).float()
        return (wide * c.float() + rotate_half(wide) * s.float()).to(x.dtype)


class AssembledKey(Lite):
    """The rotation is assigned into a fresh join of latent and key, of which each cache takes its
    part.
    """

    def assemble(self, c_kv: Tensor, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        rows = torch.cat([c_kv, k_pe], -1).unsqueeze(1)
        rows[..., HCKV:] = self.rotate(rows[..., HCKV:], c, s)
        return rows.squeeze(1)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = self.split(self.q_proj(x))
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        rows = self.assemble(*self.latent(x), c, s)
        self.write(kv_cache, kr_cache, slots, rows[:, :HCKV], rows[:, HCKV:])
        caches = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return attend(self.absorb(q_nope), self.rotate(q_pe, c, s), *caches)


entry(IN_PLACE, source="ShallowMLA", tags="key, layout, symbolic, device")(AssembledKey)


@entry(IN_PLACE, source=OURS, tags="key, layout, device")
class KeyInEmptyRows(AssembledKey):
    def assemble(self, c_kv: Tensor, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        rows = c_kv.new_empty(*c_kv.shape[:-1], HCKV + DR)
        rows[..., :HCKV] = c_kv
        rows[..., HCKV:].copy_(self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1))
        return rows


@entry(IN_PLACE, source=OURS, tags="key, readers, device, symbolic")
class RawKeyRead(Lite):
    """Who reads the product itself goes on doing so."""

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return k_pe.float().sum(-1)


class Int8Rows(Lite):
    """int8 caches: a scale for each channel of the latent, one for the key."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.kv_scale, self.kr_scale = (
            nn.Parameter(20 + 10 * torch.rand(HCKV)),
            nn.Parameter(torch.full((1,), 25.0)),
        )

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        for cache, rows, scale in (
            (kv_cache, c_kv, self.kv_scale),
            (kr_cache, k_pe, self.kr_scale),
        ):
            cache.view(-1, rows.shape[-1])[slots] = (
                (rows.float() * scale).round().clamp(-128, 127).to(torch.int8)
            )


def int8_blocks_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_, slots = paged_args()
    return (
        x,
        cos,
        sin,
        *(torch.zeros(2, 32, 1, width, dtype=torch.int8) for width in (HCKV, DR)),
        slots,
    )


entry(IN_PLACE, source=OURS, tags="key, int8, cache", args=int8_blocks_args)(Int8Rows)


# -- whole prologues with one thing that the other operator has no place for


def instead(name: str, code: str, **methods: object) -> None:
    """The base prologue with something in its query that v3 does not take."""
    model = based(name, **methods)
    given = {
        "targets": BOTH,
        "instead_of": code,
        "slack": 1.1,
        "source": OURS,
        "tags": words("key, device"),
    }
    add(Entry(name=name, model=model, outcome=(IN_PLACE,), **given))  # type: ignore[arg-type]


def _clamped(self: Base, q: Tensor) -> tuple[Tensor, Tensor]:
    return Base.split(self, q.clamp(-8, 8))


instead("QueryClamped", "step.choice", split=_clamped)


@entry(IN_PLACE, source=OURS, tags="key, weights, device", instead_of="linear.bias")
class BiasedQuery(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = linear(HCQ, self.heads * (D + DR), bias=True)


class StaticLinear(QuantLinear):
    """A scale fixed ahead of time, as in W8A8 checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return x @ (self.matrix() * self.scale)
        steps = npu.npu_quantize(x, torch.full((x.shape[-1],), 0.05), None, 1, -1, True)
        return npu.npu_quant_matmul(
            steps, self.matrix(), self.scale * 0.05, output_dtype=torch.bfloat16
        )


@entry(
    IN_PLACE,
    source="vllm-ascend, static W8A8",
    tags="key, int8, operators",
    instead_of="quant.static",
)
class StaticInt8(Base):
    """Every projection int8 by a fixed scale: the key half begins behind its product."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = StaticLinear(HE, HCKV + DR)  # type: ignore[assignment]
        self.q_b_proj = StaticLinear(HCQ, self.heads * (D + DR))  # type: ignore[assignment]
        self.q_a_proj = StaticLinear(HE, HCQ)  # type: ignore[assignment]


def float16_args() -> tuple[Tensor, ...]:
    return tuple(value.half() if value.is_floating_point() else value for value in paged_args())


def _float16() -> nn.Module:
    return PagedLite().half()


add(
    Entry(
        name="Float16Lite",
        model=_float16,
        args=float16_args,
        outcome=(IN_PLACE,),
        source=OURS,
        tags=words("key, device"),
        targets=("key",),
        slack=1.1,
    )
)
