"""Whole absorbed decode prologues, spelled in the ways that models spell them.

Every class is plain PyTorch (or torch_npu operators), written as the stacks write it; none was
shaped by the pass.
"""

from __future__ import annotations

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
    D,
    HfNorm,
    Prologue,
    attend,
    hf_interleave,
    linear,
    one_token,
    paged_args,
    paged_caches,
    rotate_half,
)
from .entry import IN_PLACE, OURS, STAGED, entry


class FNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SqrtNorm(HfNorm):
    """Square, mean, square root and a division, gamma in float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        root = torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + self.eps)
        return (wide / root * self.weight.float()).to(x.dtype)


class NpuNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, self.weight, self.eps)[0]


@entry(IN_PLACE, source="transformers", tags="whole, symbolic, device, portable", slack=1.1)
class PagedRotateHalf(Prologue):
    """(a) rotate-half after HF's interleave trick, paged index_put."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        q_pe, k_pe = self.in_halves(q_pe), self.in_halves(k_pe.unsqueeze(1))
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe = q_pe * c + rotate_half(q_pe) * s
        k_pe = k_pe * c + rotate_half(k_pe) * s
        query = self.absorb(q_nope)
        self.write(kv_cache, kr_cache, slots, c_kv, k_pe.squeeze(1))
        return attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))

    def in_halves(self, x: Tensor) -> Tensor:
        return hf_interleave(x)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = k_pe


@entry(IN_PLACE, source=OURS, tags="whole, symbolic, device, portable", slack=1.1)
class PagedFunctionalNorm(PagedRotateHalf):
    norm = FNorm


@entry(IN_PLACE, source=OURS, tags="whole, symbolic, device, portable", slack=1.1)
class PagedSqrtNorm(PagedRotateHalf):
    norm = SqrtNorm


@entry(IN_PLACE, source=OURS, tags="whole, symbolic, device, portable", slack=1.1)
class EvenOdd(Prologue):
    """Even and odd columns sliced, halves of the table, index_copy into flat rows."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        c, s = cos[:, None, : DR // 2], sin[:, None, : DR // 2]

        def rotate(x: Tensor) -> Tensor:
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.cat([even * c - odd * s, odd * c + even * s], -1)

        q_pe, k_pe = rotate(q_pe), rotate(k_pe.unsqueeze(1)).view(-1, DR)
        query = torch.matmul(q_nope.transpose(0, 1), self.w_uk()).transpose(0, 1)
        kv_cache.view(-1, HCKV).index_copy_(0, slots, c_kv)
        kr_cache.view(-1, DR).index_copy_(0, slots, k_pe)
        return attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


@entry(IN_PLACE, source=OURS, tags="whole, device, portable", slack=1.1)
class BlockOffset(PagedRotateHalf):
    """Caches indexed by (block, offset) made from the slots."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk())

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        kv_cache[block, offset, 0] = c_kv
        kr_cache[block, offset, 0] = k_pe


def dense_args(batch: int = 2, length: int = 3) -> tuple[Tensor, ...]:
    freqs = torch.view_as_real(torch.polar(torch.ones(16, DR // 2), torch.rand(16, DR // 2) * 6.28))
    x = torch.randn(batch, length, HE).bfloat16()
    return x, freqs, torch.randn(4, 16, HCKV).bfloat16(), torch.randn(4, 16, DR).bfloat16()


# The kernel takes bfloat16 tables; DeepSeek's complex table is float32, and rounding it is part of
# the kernel's contract.
COMPLEX = 1.5


@entry(
    STAGED,
    source="DeepSeek's own code",
    tags="whole, symbolic, device, portable",
    args=dense_args,
    slack=COMPLEX,
)
class ComplexDense(Prologue):
    """(b) DeepSeek's reference: complex RoPE, einsum absorb, caches [B, S_max, width], slices."""

    conjugated = False  # a table that is turned the other way, by a flag of the tensor

    norm = FNorm

    def forward(self, x: Tensor, freqs: Tensor, kv_cache: Tensor, pe_cache: Tensor) -> Tensor:
        batch, length, _ = x.shape
        start = 3
        freqs_cis = torch.view_as_complex(freqs)[start : start + length]
        freqs_cis = freqs_cis.conj() if self.conjugated else freqs_cis

        def rotate(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
            return (
                torch.view_as_real(pairs * freqs_cis.view(1, length, 1, DR // 2))
                .flatten(3)
                .to(x.dtype)
            )

        q_nope, q_pe = self.query(x)
        q_pe = rotate(q_pe)
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        k_pe = rotate(k_pe.unsqueeze(2))
        query = torch.einsum(
            "bshd,hdc->bshc", q_nope, self.kv_b_proj.weight.view(self.heads, -1, HCKV)[:, :D]
        )
        kv_cache[:batch, start : start + length] = self.kv_a_layernorm(c_kv)
        pe_cache[:batch, start : start + length] = k_pe.squeeze(2)
        scores = torch.einsum("bshc,btc->bsht", query.float(), kv_cache[:batch].float())
        return scores + torch.einsum("bshr,btr->bsht", q_pe.float(), pe_cache[:batch].float())


@entry(
    STAGED, source=OURS, tags="whole, symbolic, device, portable", args=dense_args, slack=COMPLEX
)
class ComplexConjugated(ComplexDense):
    conjugated = True


@entry(IN_PLACE, source=OURS, tags="whole, symbolic, device, portable", slack=1.1)
class Neox(PagedRotateHalf):
    """(c) halves in, halves out: the weights' rotary columns must be permuted."""

    def in_halves(self, x: Tensor) -> Tensor:
        return x


@entry(
    IN_PLACE,
    source="cann-recipes and vllm-ascend",
    tags="whole, symbolic, device, portable, operators",
    name="NpuOperatorsV2",
    slack=1.1,
)
class NpuOperators(Prologue):
    """(d) torch_npu's operators as in cann-recipes and vllm-ascend; ``version`` of the cache's."""

    norm = NpuNorm

    def __init__(self, heads: int = 2, version: int = 2) -> None:
        super().__init__(heads)
        self.version = version

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        tokens = x.shape[0]
        q_nope, q_pe = self.query(x)
        latent = self.kv_a_proj_with_mqa(x).view(tokens, 1, 1, HCKV + DR)
        c, s = cos.view(tokens, 1, 1, DR), sin.view(tokens, 1, 1, DR)
        q_pe = torch.ops.npu.npu_interleave_rope(q_pe.view(tokens, self.heads, 1, DR), c, s).view(
            tokens, -1, DR
        )
        query = torch.ops.npu.npu_transpose_batchmatmul(
            q_nope, self.w_uk(), perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        gamma = self.kv_a_layernorm
        operands = latent, gamma.weight, c, s, slots, kr_cache, kv_cache
        kr, kv = kr_cache, kv_cache
        if self.version == 2:
            mode = {"epsilon": gamma.eps, "cache_mode": "PA_BNSD"}
            torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(*operands, **mode)
        else:
            mode = {"epsilon": gamma.eps, "cache_mode": "PA"}
            kr, kv, _, _ = torch.ops.npu.npu_kv_rmsnorm_rope_cache(*operands, **mode)
        return attend(query, q_pe, kv.view(-1, HCKV), kr.view(-1, DR))


@entry(IN_PLACE, source="SGLang", tags="whole, symbolic, device, portable", slack=1.1)
class FusedQkvA(PagedRotateHalf):
    """(e) one projection [q_a | kv_a], split afterwards."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.fused_qkv_a_proj = linear(HE, HCQ + HCKV + DR)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_c, kv = self.fused_qkv_a_proj(x).split([HCQ, HCKV + DR], -1)
        q = self.q_b_proj(self.q_a_layernorm(q_c)).view(-1, self.heads, D + DR)
        q_nope, q_pe = q[..., :D], q[..., D:]
        c_kv, k_pe = self.kv_a_layernorm(kv[..., :HCKV]), kv[..., HCKV:].unsqueeze(1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = hf_interleave(q_pe), hf_interleave(k_pe)
        q_pe = c * q_pe + s * rotate_half(q_pe)
        k_pe = c * k_pe + s * rotate_half(k_pe)
        query = self.absorb(q_nope)
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = k_pe.squeeze(1)
        return attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


@entry(
    IN_PLACE,
    source="DeepSeek's own code, V3.2",
    tags="whole, symbolic, device, portable, readers",
    slack=1.1,
)
class WithIndexer(PagedRotateHalf):
    """(g) a second reader of c_q, as DeepSeek-V3.2's indexer."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.wq_b = linear(HCQ, 64)

    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.c_q = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_pe = self.q_b_proj(self.c_q).view(-1, self.heads, D + DR).split([D, DR], -1)
        return q_nope, q_pe

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(*args)
        return scores, self.wq_b(self.c_q)


class Layers(nn.Module):
    """(f) several layers in one graph, each with its own caches."""

    def __init__(self, layer: type[PagedRotateHalf] = PagedRotateHalf, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.out = nn.ModuleList(linear(BLOCKS * BLOCK_SIZE, HE) for _ in range(count))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *caches: Tensor
    ) -> Tensor:
        for index, (layer, out) in enumerate(zip(self.layers, self.out, strict=True)):
            scores = layer(
                F.rms_norm(x, (HE,)), cos, sin, caches[2 * index], caches[2 * index + 1], slots
            )
            x = x + out(scores.view(x.shape[0], layer.heads, -1).mean(1).to(x.dtype))
        return x


def layers_args(tokens: int = 8, count: int = 3) -> tuple[Tensor, ...]:
    x, cos, sin, _, _, slots = paged_args(tokens)
    return (x, cos, sin, slots, *(cache for _ in range(count) for cache in paged_caches()))


class FlatCaches(PagedRotateHalf):
    """Caches [BlockNum, BlockSize, width] or [rows, width], written by flat slots."""


def flat_cache_args(rank: int, tokens: int = 8) -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args(tokens)
    lead = (BLOCKS, BLOCK_SIZE) if rank == 3 else (BLOCKS * BLOCK_SIZE,)
    return x, cos, sin, kv_cache.view(*lead, HCKV), kr_cache.view(*lead, DR), slots


entry(
    IN_PLACE,
    source="cann-recipes and vllm-ascend",
    tags="whole, symbolic, device, portable, operators",
    name="NpuOperatorsV1",
    slack=1.1,
)(lambda: NpuOperators(version=1))
entry(IN_PLACE, source=OURS, tags="device, layout", name="OneToken", args=one_token)(
    PagedRotateHalf
)
