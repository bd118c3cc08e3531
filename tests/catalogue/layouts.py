"""Axes and whole layers as other stacks and ports lay them out."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import (
    DR,
    HCKV,
    HCQ,
    HE,
    Base,
    D,
    H,
    attend,
    hf_interleave,
    paged_args,
    rotate_half,
    rotated,
    tables,
)
from .entry import IN_PLACE, OURS, STAGED, entry, miss
from .prologues import PagedRotateHalf


def sequence_args(batch: int = 2, length: int = 3) -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args(batch * length)
    lead = (batch, length)
    return (
        x.view(*lead, HE),
        cos.view(*lead, DR),
        sin.view(*lead, DR),
        kv_cache,
        kr_cache,
        slots.view(lead),
    )


def many_args(tokens: int, lead: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """In caches of 64 blocks."""
    x, cos, sin = (value.view(*lead or (tokens,), -1) for value in of_tokens(tokens))
    caches = (torch.randn(64, 16, 1, width).bfloat16() for width in (HCKV, DR))
    return x, cos, sin, *caches, torch.randperm(1024)[:tokens].view(lead or (tokens,))


def of_tokens(tokens: int) -> tuple[Tensor, ...]:
    return torch.randn(tokens, HE).bfloat16(), *tables(tokens)


def shared_table_args() -> tuple[Tensor, ...]:
    """One row of the table per position, for all sequences."""
    x, cos, sin, *rest = sequence_args()
    return (x, cos[:1], sin[:1], *rest)


@entry(IN_PLACE, source="transformers", tags="layout, device, symbolic", args=sequence_args)
class Sequences(PagedRotateHalf):
    """[B, S, He] with heads moved forward, as Hugging Face lays them out."""

    def latent_rows(self, rows: Tensor) -> Tensor:
        return rows

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        batch, length, _ = x.shape
        q = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            .view(batch, length, self.heads, D + DR)
            .transpose(1, 2)
        )
        q_nope, q_pe = q.split([D, DR], -1)
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        c_kv, k_pe = self.latent_rows(self.kv_a_layernorm(c_kv)), k_pe.view(batch, 1, length, DR)
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = hf_interleave(q_pe), hf_interleave(k_pe)
        q_pe, k_pe = q_pe * c + rotate_half(q_pe) * sn, k_pe * c + rotate_half(k_pe) * sn
        query = torch.matmul(q_nope, self.w_uk().unsqueeze(0))
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = k_pe.squeeze(1)
        return attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


def as_many_as_long(tables_of: int = 3) -> tuple[Tensor, ...]:
    """Three sequences of three tokens, whose sizes are one symbol where they are symbolic."""
    x, cos, sin, *rest = sequence_args(3, 3)
    return (x, cos[:tables_of], sin[:tables_of], *rest)


for name, tables_of in (("AsManyAsLong", 3), ("AsManyAsLongSharedRows", 1)):
    entry(
        IN_PLACE,
        source=OURS,
        tags="layout, tables, symbolic",
        name=name,
        args=partial(as_many_as_long, tables_of),
    )(Sequences)


@miss(STAGED, tags="layout, run", of="AsManyAsLong", args=as_many_as_long)
class SequencesAndTokensSwapped(Sequences):
    """Row b of sequence s is stored for row s of sequence b."""

    def latent_rows(self, rows: Tensor) -> Tensor:
        return rows.transpose(0, 1)


def sequence_first() -> tuple[Tensor, ...]:
    x, _, _, *rest = paged_args(8)
    angles = torch.rand(4, 1, 1, H) * 6
    return x.view(4, 2, HE), torch.cat([angles, angles], -1), *rest


@entry(IN_PLACE, source=OURS, tags="layout", args=sequence_args)
class SequencesMergedFirst(Base):
    """Nothing but what comes in has two axes of tokens."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = (value.reshape(-1, value.shape[-1]) for value in (x, cos, sin))
        scores, more = super().forward(*rows, kv_cache, kr_cache, slots.view(-1))
        return scores.view(*x.shape[:2], *scores.shape[1:]), more


@entry(IN_PLACE, source="Megatron", tags="layout", args=sequence_first)
class Megatron(Base):
    """Sequence first, [S, B, He]; freqs [S, 1, 1, Dr] are rotated in the layer."""

    def forward(
        self, x: Tensor, freqs: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:  # type: ignore[override]
        length, batch, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(
            length, batch, self.heads, D + DR
        )
        q_nope, q_pe = torch.split(q, [D, DR], dim=-1)
        c_kv, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [HCKV, DR], dim=-1)
        cos, sin = torch.cos(freqs).to(x.dtype), torch.sin(freqs).to(x.dtype)
        q_pe, k_pe = rotated(q_pe, cos, sin), rotated(k_pe.unsqueeze(2), cos, sin)
        kv_cache.view(-1, HCKV)[slots] = self.kv_a_layernorm(c_kv).reshape(-1, HCKV)
        kr_cache.view(-1, DR)[slots] = k_pe.reshape(-1, DR)
        query = torch.einsum("sbhd,hdc->sbhc", q_nope, self.w_uk())
        return attend(
            query.transpose(0, 1),
            q_pe.transpose(0, 1),
            kv_cache.view(-1, HCKV),
            kr_cache.view(-1, DR),
        )


def batches() -> tuple[Tensor, ...]:
    x, _, _, kv_cache, kr_cache, slots = paged_args(6)
    return x.view(2, 3, HE), torch.arange(6).view(2, 3) * 5, kv_cache, kr_cache, slots.view(2, 3)


@entry(IN_PLACE, source="ports to JAX", tags="layout, weights, tables, symbolic", args=batches)
class Functional(nn.Module):
    """A JAX port: a dict of weights [in, .., out], one einsum a step, RoPE from positions."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        shapes = dict(
            dq=(HE, HCQ), uq=(HCQ, heads, D + DR), dkv=(HE, HCKV), kr=(HE, DR), uk=(heads, D, HCKV)
        )
        params = {name: torch.randn(*shape) / 32 for name, shape in shapes.items()}
        params |= {"q_norm": 1 + 0.1 * torch.randn(HCQ), "kv_norm": 1 + 0.1 * torch.randn(HCKV)}
        self.p = nn.ParameterDict(
            {name: nn.Parameter(value.bfloat16()) for name, value in params.items()}
        )

    def forward(
        self, x: Tensor, positions: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        p = self.p
        c_q = F.rms_norm(torch.einsum("bth,hr->btr", x, p.dq), (HCQ,), p.q_norm, 1e-6)
        q_nope, q_pe = torch.einsum("btr,rhd->bhtd", c_q, p.uq).tensor_split([D], -1)
        angles = positions[..., None] * 1e4 ** (-torch.arange(0, DR, 2) / DR)
        cos, sin = (table.to(x.dtype)[:, None] for table in (angles.cos(), angles.sin()))

        def rotate(x: Tensor) -> Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        kv_cache.view(-1, HCKV)[slots.view(-1)] = F.rms_norm(
            x @ p.dkv, (HCKV,), p.kv_norm, 1e-6
        ).flatten(0, 1)
        kr_cache.view(-1, DR)[slots.view(-1)] = rotate((x @ p.kr)[:, None])[:, 0].flatten(0, 1)
        scores = torch.einsum(
            "bhtc,sc->bhts", torch.einsum("bhtd,hdc->bhtc", q_nope, p.uk), kv_cache.view(-1, HCKV)
        )
        return scores + torch.einsum("bhtr,sr->bhts", rotate(q_pe), kr_cache.view(-1, DR))


@entry(IN_PLACE, source="ports to ggml", tags="layout, weights")
class TokensLast(Base):
    """A ggml port: weights on the left, [width, tokens], RoPE over the axis before the last."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        now, c, sn = x.t(), cos.t()[:H], sin.t()[:H]

        def rotate(x: Tensor) -> Tensor:
            a, b = x[..., 0::2, :], x[..., 1::2, :]
            return torch.cat([a * c - b * sn, b * c + a * sn], -2)

        c_q = self.q_a_layernorm((self.q_a_proj.weight @ now).t()).t()
        q_nope, q_pe = (self.q_b_proj.weight @ c_q).view(self.heads, D + DR, -1).split([D, DR], 1)
        c_kv, k_pe = (self.kv_a_proj_with_mqa.weight @ now).split([HCKV, DR])
        kv_cache.view(-1, HCKV)[slots] = self.kv_a_layernorm(c_kv.t())
        kr_cache.view(-1, DR)[slots] = rotate(k_pe).t()
        query = torch.bmm(self.w_uk().transpose(1, 2), q_nope)
        return torch.matmul(kv_cache.view(-1, HCKV), query) + torch.matmul(
            kr_cache.view(-1, DR), rotate(q_pe)
        )


def buffer_args() -> tuple[Tensor, ...]:
    x, _, _, kv_cache, kr_cache, slots = paged_args(8)
    angles = torch.rand(64, H) * 6
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    return (
        x,
        torch.arange(8) * 3,
        table,
        kv_cache.view(-1, 1, HCKV),
        kr_cache.view(-1, 1, DR),
        slots,
    )


@entry(IN_PLACE, source="SGLang", tags="layout, cache, tables", args=buffer_args, alone=(STAGED,))
class SglangBuffers(Base):
    """Buffers [slots, 1, width], neox RoPE from one [cos | sin] cache."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_buffer: Tensor,
        kr_buffer: Tensor,
        loc: Tensor,
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        cos, sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in cos_sin[positions].chunk(2, -1))
        q_pe = q_pe * cos + rotate_half(q_pe) * sin
        k_pe = k_pe.unsqueeze(1) * cos + rotate_half(k_pe.unsqueeze(1)) * sin
        kv_buffer[loc], kr_buffer[loc] = c_kv.unsqueeze(1), k_pe
        scores = torch.einsum("thc,sc->ths", self.absorb(q_nope), kv_buffer.squeeze(1))
        return scores + torch.einsum("thr,sr->ths", q_pe, kr_buffer.squeeze(1))


def two_of_four() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = paged_args(2)
    return x.view(2, 1, HE), cos[0], sin[0]


@entry(
    IN_PLACE, source="DeepSeek's own code", tags="layout, cache", args=two_of_four, alone=(STAGED,)
)
class FourSequences(Base):
    """Buffers for four, of which a batch takes the first; a symbolic one is staged."""

    of_key = slice(5, 6)
    sequences = slice(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv_cache", torch.zeros(4, 16, HCKV, dtype=torch.bfloat16))
        self.register_buffer("kr_cache", torch.zeros(4, 16, DR, dtype=torch.bfloat16))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        batch, c, sn = len(x), cos.view(1, 1, 1, DR), sin.view(1, 1, 1, DR)
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        q_pe, k_pe = rotated(q_pe, c, sn), rotated(k_pe.unsqueeze(2), c, sn)
        self.kv_cache[:batch, 5:6] = c_kv
        self.kr_cache[self.sequences if self.sequences.start else slice(batch), self.of_key] = (
            k_pe.squeeze(2)
        )
        query = torch.einsum("bsnd,ndc->bsnc", q_nope, self.w_uk())
        of_latent = torch.einsum("bsnc,btc->bsnt", query, self.kv_cache[:batch, :6])
        return of_latent + torch.einsum("bsnr,btr->bsnt", q_pe, self.kr_cache[:batch, :6])


@entry(STAGED, source=OURS, tags="layout, cache", args=two_of_four)
class OtherRowsOfTheKey(FourSequences):
    """The key's rows stand one further on."""

    of_key = slice(6, 7)


@entry(STAGED, source=OURS, tags="layout, cache", args=two_of_four)
class OtherSequencesOfTheKey(FourSequences):
    sequences = slice(1, 3)


@entry(STAGED, source=OURS, tags="layout, cache, readers", args=two_of_four)
class ReadsBuffersBefore(FourSequences):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        # buffers keep what the last call has written
        before = 0 * self.kv_cache[:2, 5:6].float().sum()
        return super().forward(x, cos, sin) + before


def grown_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = paged_args(2)
    past = torch.randn(2, 1, 7, HCKV).bfloat16(), torch.randn(2, 1, 7, DR).bfloat16()
    return x.view(2, 1, HE), cos.view(2, 1, DR), sin.view(2, 1, DR), *past


@entry(STAGED, source="transformers", tags="layout, cache", args=grown_args)
class Grown(Base):
    """Hugging Face's DynamicCache: the cache is concatenated, not written."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_past: Tensor, kr_past: Tensor
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = self.latent(x)
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        rows = torch.cat([kv_past, c_kv.unsqueeze(1)], 2)
        rope = torch.cat([kr_past, rotated(k_pe.unsqueeze(1), c, sn)], 2)
        return (
            torch.matmul(q_nope, self.w_uk()) @ rows.mT + rotated(q_pe, c, sn) @ rope.mT,
            rows,
            rope,
        )


@entry(STAGED, source="Kimi-K3", tags="layout, cache, symbolic", args=grown_args)
class GrownUnrotated(Base):
    """Nothing rotated, over a cache that is concatenated; attention scales both of its sides."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_past: Tensor, kr_past: Tensor
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = self.latent(x)
        rows, rope = (
            torch.cat([kv_past, c_kv.unsqueeze(1)], 2),
            torch.cat([kr_past, k_pe.unsqueeze(1)], 2),
        )
        query, key = (
            torch.cat([torch.matmul(q_nope, self.w_uk()), q_pe], -1),
            torch.cat([rows, rope], -1),
        )
        spread = (value.expand(-1, self.heads, -1, -1) for value in (key, rows))
        return F.scaled_dot_product_attention(query, *spread), rows, rope


entry(
    IN_PLACE,
    source=OURS,
    tags="layout, tables, device",
    name="SequencesShareRows",
    args=shared_table_args,
)(Sequences)


# -- static graphs of many tokens, whose facts are read on few

for tokens in (128, 512):  # as many as D, and as the latent is wide
    entry(
        IN_PLACE,
        source=OURS,
        tags="layout, device",
        name=f"PagedRotateHalf of {tokens} tokens",
        args=partial(many_args, tokens),
    )(PagedRotateHalf)
for batch, length in ((4, 32), (64, 2), (16, 16)):
    entry(
        IN_PLACE,
        source=OURS,
        tags="layout, device",
        name=f"{batch} sequences of {length}",
        args=partial(many_args, batch * length, (batch, length)),
    )(Sequences)
