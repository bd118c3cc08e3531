"""Absorbed prologues as public serving and training stacks write them, in our own words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import (
    BLOCK_SIZE,
    DR,
    HCKV,
    HE,
    Base,
    D,
    H,
    HfNorm,
    Parts,
    attend,
    npu,
    paged_args,
    rotated,
    wide,
)
from .entry import IN_PLACE, STAGED, entry
from .prologues import COMPLEX, NpuOperators

ROW = HCKV + DR


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """GPT-J's rotation, pairs in and out; tables of half the width."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def sequence_first() -> tuple[Tensor, ...]:
    angles = torch.rand(4, 1, 1, H) * 6
    return torch.randn(4, 2, HE).bfloat16(), torch.cat([angles, angles], -1)


@entry(
    STAGED,
    source="Megatron-core and MindSpeed-LLM",
    tags="whole, rope, device",
    args=sequence_first,
)
class AbsorbedTraining(Base):
    """The rotation passes on what is wider than its tables: nothing. Attention gets rows as is."""

    def turned(self, x: Tensor, freqs: Tensor) -> Tensor:
        width = freqs.shape[-1]
        x, rest = x[..., :width], x[..., width:]
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        first, second = x.chunk(2, -1)
        cos, sin = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
        return torch.cat((x * cos + torch.cat((-second, first), -1) * sin, rest), -1)

    def forward(self, x: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        length, batch, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(
            length, batch, self.heads, D + DR
        )
        q_nope, q_pe = q.split([D, DR], -1)
        c_kv, k_pe = self.latent(x)
        query = torch.einsum("sbhd,hdc->sbhc", q_nope, self.w_uk())
        key = torch.cat([c_kv.unsqueeze(2), self.turned(k_pe.unsqueeze(2), freqs)], -1)
        return torch.cat([query, self.turned(q_pe, freqs)], -1), key


@entry(STAGED, source="MindSpeed-LLM", tags="whole, rope", args=sequence_first, slack=COMPLEX)
class ComplexTraining(AbsorbedTraining):
    def turned(self, x: Tensor, freqs: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(freqs[..., :H]), freqs[..., :H])
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


@entry(IN_PLACE, source="ShallowMLA", tags="whole, layout, device, symbolic")
class RotatedInTheJoin(Base):
    """Query and key are joined first, and RoPE is assigned into the join."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        q, kv = torch.cat([self.absorb(q_nope), q_pe], -1), torch.cat([c_kv, k_pe], -1)
        q[..., HCKV:] = rotated(q[..., HCKV:], cos.unsqueeze(1), sin.unsqueeze(1))
        kv[..., HCKV:] = rotated(kv[..., HCKV:], cos, sin)
        kv_cache.view(-1, HCKV)[slots], kr_cache.view(-1, DR)[slots] = (
            kv[..., :HCKV],
            kv[..., HCKV:],
        )
        return (
            q.float().flatten(0, 1)
            @ torch.cat([kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)], -1).float().T
        )


class Float32Norm(HfNorm):
    """A weight in float32, as in DeepSeek-V3.2's code; checkpoints hold bfloat16 numbers."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)
        self.weight = torch.nn.Parameter(self.weight.float())

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x)
        return (self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps))).to(
            x.dtype
        )


@entry(
    IN_PLACE, source="DeepSeek's own code, V3.2", tags="norm, symbolic", alone=("norm.gamma_dtype",)
)
class Float32Norms(Base):
    norm = Float32Norm


class Decode(Base):
    """A decode step over rows of 576 in one buffer, for its rotation to be spelled."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return pairs(x, cos, sin)

    def forward(
        self, x: Tensor, table: Tensor, positions: Tensor, rows: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        cos, sin = (part.unsqueeze(1) for part in table[positions].chunk(2, -1))
        q_nope, q_pe = self.query(x)
        latent = self.kv_a_proj_with_mqa(x).unsqueeze(1)
        query = q_nope.new_empty(len(x), self.heads, ROW)
        query[..., :HCKV] = self.absorb(q_nope)
        query[..., HCKV:] = self.turn(q_pe, cos, sin)
        c_kv = self.kv_a_layernorm(latent[..., :HCKV].contiguous())
        latent[..., HCKV:] = self.turn(latent[..., HCKV:], cos, sin)
        latent[..., :HCKV] = c_kv
        rows[slots] = latent
        return torch.einsum("thc,sc->ths", query.float(), rows.squeeze(1).float())


def rows_args(tokens: int = 8) -> tuple[Tensor, ...]:
    angles = torch.rand(64, H) * 6
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    x, rows = torch.randn(tokens, HE).bfloat16(), torch.randn(64, 1, ROW).bfloat16()
    return x, table, torch.arange(tokens) * 3, rows, torch.randperm(64)[:tokens]


entry(
    STAGED,
    source="SGLang 0.4",
    tags="whole, layout, cache, device",
    name="SglangDecode",
    args=rows_args,
)(Decode)


@entry(STAGED, source="SGLang 0.5", tags="whole, layout, cache", args=rows_args)
class SglangNeoxDecode(Decode):
    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return halves(x, cos, sin)


@entry(STAGED, source="SGLang 0.5", tags="whole, layout, cache", args=rows_args)
class SglangFloatDecode(Decode):
    """Rotated in float32."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return pairs(wide(x), wide(cos), wide(sin)).to(x.dtype)


@entry(STAGED, source="mini-sglang", tags="whole, layout, cache", args=rows_args)
class MiniSglang(Decode):
    """Rows are joined, not assembled."""

    def forward(
        self, x: Tensor, table: Tensor, positions: Tensor, rows: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        rows[slots] = torch.cat((c_kv.unsqueeze(1), self.turn(k_pe.unsqueeze(1), cos, sin)), -1)
        query = torch.cat((self.absorb(q_nope), self.turn(q_pe, cos, sin)), -1)
        return torch.einsum("thc,sc->ths", query.float(), rows.squeeze(1).float())


@entry(STAGED, source="lmdeploy", tags="whole, layout, cache", args=rows_args)
class Lmdeploy(Decode):
    """W_uk's product is written head by head into the query's buffer; tables in pairs."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, s = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return x * c + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * s

    def absorb(self, q_nope: Tensor) -> Tensor:
        out = q_nope.new_empty(q_nope.shape[1], q_nope.shape[0], HCKV)
        torch.bmm(q_nope.transpose(0, 1), self.w_uk(), out=out)
        return out.transpose(0, 1)


@entry(STAGED, source="chitu", tags="whole, absorb, cache", args=rows_args)
class Chitu(MiniSglang):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("shd,hdc->shc", q_nope, self.w_uk())


@entry(IN_PLACE, source="aws-neuron", tags="whole, absorb, device")
class Neuron(Base):
    """Heads before tokens, W_uk on the left of its product."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        first, second = x[..., :H], x[..., H:]
        return torch.cat(
            (first * c[..., :H] - second * s[..., :H], first * s[..., H:] + second * c[..., H:]), -1
        )

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("hdc,bhqd->bhqc", self.w_uk(), q_nope.transpose(0, 1)[None])[
            0
        ].transpose(0, 1)


def sequences() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = paged_args(6)
    past = torch.randn(2, 7, HCKV).bfloat16(), torch.randn(2, 7, DR).bfloat16()
    return x.view(2, 3, HE), cos.view(2, 3, DR), sin.view(2, 3, DR), *past


class Compressed(Base):
    """Latents before and after the new tokens are joined (madsys' profile of DeepSeek-V2)."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor, past_rope: Tensor
    ) -> Tensor:  # type: ignore[override]
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = rotated(q_pe, c, s), rotated(k_pe.unsqueeze(1), c, s)
        rows, rope = torch.cat([past, c_kv], 1), torch.cat([past_rope, k_pe.squeeze(1)], 1)
        return self.scores(q_nope, q_pe, rows, rope)

    def scores(self, q_nope: Tensor, q_pe: Tensor, rows: Tensor, rope: Tensor) -> Tensor:
        query = torch.einsum("hdc,bhid->bhic", self.w_uk(), q_nope)
        return torch.matmul(
            torch.cat([query, q_pe], -1), torch.cat([rows, rope], -1).unsqueeze(1).mT
        )


entry(STAGED, source="madsys", tags="whole, absorb, cache", name="MadsysAbsorbed", args=sequences)(
    Compressed
)


@entry(STAGED, source="madsys", tags="whole, absorb, cache", args=sequences)
class MadsysMoveElision(Compressed):
    def scores(self, q_nope: Tensor, q_pe: Tensor, rows: Tensor, rope: Tensor) -> Tensor:
        query = torch.einsum("hdc,bhid->bhic", self.w_uk(), q_nope)
        return torch.matmul(q_pe, rope.unsqueeze(1).mT) + torch.einsum(
            "bhqc,blc->bhql", query, rows
        )


@entry(STAGED, source="madsys", tags="whole, absorb, cache", args=sequences)
class MadsysMatmul(Compressed):
    def scores(self, q_nope: Tensor, q_pe: Tensor, rows: Tensor, rope: Tensor) -> Tensor:
        return (
            torch.matmul(torch.matmul(q_nope, self.w_uk()), rows.unsqueeze(1).mT)
            + q_pe @ rope.unsqueeze(1).mT
        )


@entry(STAGED, source="KTransformers", tags="whole, cache, device", args=rows_args)
class KTransformers(Decode):
    """Pages of 576 columns, two parts written by (page, offset)."""

    def forward(
        self, x: Tensor, table: Tensor, positions: Tensor, rows: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        cos, sin = (torch.cat((t, t), -1).unsqueeze(1) for t in table[positions].chunk(2, -1))
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        pages, place = rows.view(-1, BLOCK_SIZE, 1, ROW), (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
        pages[..., :HCKV].index_put_(place, c_kv.unsqueeze(1))
        pages[..., HCKV:].index_put_(place, rotated(k_pe.unsqueeze(1), cos, sin))
        query = torch.matmul(q_nope.unsqueeze(2), self.w_uk()).squeeze(2)
        of_rope = torch.einsum("thr,sr->ths", rotated(q_pe, cos, sin), rows.squeeze(1)[:, HCKV:])
        return torch.einsum("thc,sc->ths", query, rows.squeeze(1)[:, :HCKV]) + of_rope


@entry(IN_PLACE, source="Kimi-K3", tags="whole, symbolic, device")
class NothingRotated(Base):
    """No RoPE at all, and twelve heads."""

    def __init__(self) -> None:
        super().__init__(12)

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


@entry(IN_PLACE, source="msmodelslim", tags="whole, norm, device")
class Slim(Base):
    """The norm's weight is multiplied in float32; W_uk is a view of kv_b taken in the forward."""

    class norm(HfNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = wide(x)
            return (
                wide(self.weight) * (y / (y * y).mean(-1, keepdim=True).add(self.eps).sqrt())
            ).to(x.dtype)

    def absorb(self, q_nope: Tensor) -> Tensor:
        w_uk, _ = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split([D, D], 1)
        return torch.matmul(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


@entry(IN_PLACE, source="vllm-ascend", tags="whole, operators, device, symbolic")
class OperatorsNz(NpuOperators):
    """The fused cache operator over FRACTAL_NZ pages."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        tokens = len(x)
        q_nope, q_pe = self.query(x)
        c, s = cos.view(tokens, 1, 1, DR), sin.view(tokens, 1, 1, DR)
        q_pe = npu.npu_interleave_rope(q_pe.view(tokens, self.heads, 1, DR), c, s).view(
            tokens, -1, DR
        )
        latent, gamma = self.kv_a_proj_with_mqa(x).view(tokens, 1, 1, ROW), self.kv_a_layernorm
        operands = latent, gamma.weight, c, s, slots, kr_cache, kv_cache
        mode = {"epsilon": gamma.eps, "cache_mode": "PA_NZ"}
        npu.npu_kv_rmsnorm_rope_cache_v2(*operands, **mode)
        return self.absorb(q_nope), q_pe


def padded_args() -> tuple[Tensor, ...]:
    return paged_args(64)


@entry(IN_PLACE, source="vllm-ascend", tags="whole, readers, device", args=padded_args)
class PaddedBatch(Parts):
    """A captured batch of 64 tokens, of which attention reads the first."""

    real = 61

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        query = self.absorb(q_nope)[: self.real]
        return attend(query, q_pe[: self.real], kv_rows, kr_rows)


@entry(STAGED, source="vllm-ascend", tags="whole, readers, cache", args=padded_args)
class PaddedRowsNotWritten(PaddedBatch):
    """The rows of the padding are not written."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        super().write(kv_cache, kr_cache, slots[: self.real], c_kv[: self.real], k_pe[: self.real])


@entry(IN_PLACE, source="vLLM", tags="readers, symbolic")
class HalvesOfTheQuery(Base):
    """Two parts of the query's tokens, joined again for attention."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        query, half = super().absorb(q_nope), q_nope.shape[0] // 2
        return torch.cat([query[:half], query[half:]], 0)
