"""Prologues as other hands write them: one step each, and whole layers in the manner of other stacks.

Written by imagining a stack (Megatron, SGLang, TensorRT-LLM, JAX and ggml ports, tinygrad, einops, vmap) before looking
at what the pass makes of it; kept are those that it once did not fuse, or that no other test resembles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import spellings as s
from .mixtures import Parts
from .near_misses import Base
from .spellings import BLOCK_SIZE, DR, HCKV, HCQ, HE, D, HfNorm, hf_interleave, rotate_half
from .variants import IN_PLACE, STAGED

H = DR // 2
Make = Callable[[], nn.Module]
Args = Callable[[], tuple[Tensor, ...]]


def based(name: str, heads: int = 2, **methods: Any) -> Make:
    """The base model with other methods."""
    cls = type(name, (Base,), methods)

    def make() -> nn.Module:
        model = cls.__new__(cls)
        s.Prologue.__init__(model, heads)
        return model

    return make


def half(table: Tensor) -> Tensor:
    return table[..., :H]


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rotated(x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    x = hf_interleave(x)
    return x * c + rotate_half(x) * sn


# -- RoPE: rotate(x, cos, sin), x [T, heads, Dr], tables [T, 1, Dr]


def matrices(c: Tensor, sn: Tensor) -> Tensor:
    """[.., Dr/2, 2, 2]"""
    c, sn = half(c), half(sn)
    return torch.stack([torch.stack([c, -sn], -1), torch.stack([sn, c], -1)], -2)


def by_einsum(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    pairs = torch.einsum("...rij,...rj->...ri", matrices(c, sn), x.unflatten(-1, (H, 2)))
    return pairs.transpose(-1, -2).flatten(-2)


def by_matmul(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    return (matrices(c, sn) @ x.unflatten(-1, (H, 2)).unsqueeze(-1)).squeeze(-1).flatten(-2)


def by_row_vectors(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    pairs = torch.matmul(x.view(*x.shape[:-1], H, 1, 2), matrices(c, sn).mT)
    return pairs.view(*x.shape[:-1], H, 2).mT.reshape(x.shape)


def by_sums(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    c, sn = half(c), half(sn)
    rows = torch.stack([torch.stack([c, -sn], -2), torch.stack([sn, c], -2)], -3)
    return (rows * x.unflatten(-1, (2, H)).unsqueeze(-3)).sum(-2).flatten(-2)


def stacked_first(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    both, tables = torch.stack([hf_interleave(x), rotate_half(hf_interleave(x))]), torch.stack([c, sn])
    return (both * tables).sum(0)


def dot_of_two(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    x = hf_interleave(x)
    both = torch.stack([x, rotate_half(x)], -1)
    return torch.einsum("tndk,tndk->tnd", both, torch.stack([c, sn], -1).expand(*both.shape))


def by_literal_matrix(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """GPT-J's ancestors: x @ P, with P written down."""
    x = hf_interleave(x)
    one, none = torch.eye(H, dtype=x.dtype, device=x.device), x.new_zeros(H, H)
    return x * c + (x @ torch.cat([torch.cat([none, one], 1), torch.cat([-one, none], 1)])) * sn


def flipped_pairs(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    pairs, signs = x.unflatten(-1, (H, 2)), torch.tensor([-1.0, 1.0], dtype=x.dtype)
    turned = pairs * half(c).unsqueeze(-1) + pairs.flip(-1) * signs * half(sn).unsqueeze(-1)
    return turned.transpose(-1, -2).flatten(-2)


def by_where(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """Every two, by a mask: pairs stay where they are."""
    c, sn = half(c).repeat_interleave(2, -1), half(sn).repeat_interleave(2, -1)
    return x * c + torch.where(torch.arange(DR) % 2 == 0, -x.roll(-1, -1), x.roll(1, -1)) * sn


def by_vmap(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    def one(head: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        head = head.view(-1, H, 2).transpose(1, 2).reshape(-1, DR)
        return head * c + rotate_half(head) * sn

    return torch.func.vmap(one, in_dims=(1, None, None), out_dims=1)(x, c.squeeze(1), sn.squeeze(1))


def scaled_shear(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """No rotation, but tables can say it, the halves of one from tensors of unequal rank."""
    c, sn = half(c), half(sn)
    rows = torch.stack([torch.stack([c, -sn], -1), torch.stack([0 * sn, c], -1)], -2)
    return torch.einsum("...rij,...rj->...ri", rows, x.unflatten(-1, (H, 2))).transpose(-1, -2).flatten(-2)


def rolled_pairs(self: Any, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """Pairs in no regular order, so the weights' columns are taken by index."""
    pairs = x.unflatten(-1, (2, H)).transpose(-1, -2).roll(1, -2)
    return torch.einsum("...rij,...rj->...ri", matrices(c, sn), pairs).transpose(-1, -2).flatten(-2)


# -- norms: forward(x) of HfNorm


def norm(body: Callable[[Any, Tensor], Tensor], eps: float = 1e-6) -> type[HfNorm]:
    def __init__(self: Any, width: int) -> None:
        HfNorm.__init__(self, width, eps)

    return type("Norm", (HfNorm,), {"forward": body, "__init__": __init__})


def by_scale(scale: Callable[[Any, Tensor], Tensor], eps: float = 1e-6) -> type[HfNorm]:
    """x * scale(x) * gamma."""
    return norm(lambda self, x: (wide(x) * scale(self, wide(x))).to(x.dtype) * self.weight, eps)


NORMS = {
    "NormByDots": by_scale(lambda n, x: torch.rsqrt(torch.einsum("td,td->t", x, x)[:, None] / x.shape[1] + n.eps)),
    "NormByGram": by_scale(lambda n, x: torch.rsqrt((x @ x.T).diagonal()[:, None] / x.shape[1] + n.eps)),
    "NormByOnes": by_scale(lambda n, x: torch.rsqrt(x**2 @ x.new_full((x.shape[1], 1), 1 / x.shape[1]) + n.eps)),
    "NormByVariance": by_scale(
        lambda n, x: torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + x.mean(-1, True) ** 2 + n.eps)
    ),
    "NormOfLargeEps": by_scale(lambda n, x: torch.rsqrt(x.pow(2).mean(-1, True) + n.eps), 0.5),
    "EpsOfTensor": by_scale(lambda n, x: torch.rsqrt(x.pow(2).mean(-1, True) + torch.tensor(n.eps)), 1e-5),
    "Normalize": norm(lambda n, x: (F.normalize(wide(x), dim=-1) * math.sqrt(x.shape[-1])).to(x.dtype) * n.weight),
}


# -- absorbed products: absorb(q_nope), q_nope [T, N, D]


def loop(self: Any, q: Tensor) -> Tensor:
    return torch.stack([q[:, head] @ self.w_uk()[head] for head in range(self.heads)], 1)


def loop_of_linears(self: Any, q: Tensor) -> Tensor:
    """Heads beside each other in the last axis."""
    parts = [F.linear(q[:, head], self.w_uk()[head].t()) for head in range(self.heads)]
    return torch.cat(parts, -1).view(-1, self.heads, HCKV)


def loop_into_buffer(self: Any, q: Tensor) -> Tensor:
    out = q.new_empty(q.shape[0], self.heads, HCKV)
    for head, (part, weight) in enumerate(zip(q.unbind(1), self.w_uk().unbind(0), strict=True)):
        out[:, head] = part @ weight
    return out


def two_groups(self: Any, q: Tensor) -> Tensor:
    parts = (torch.einsum("tnd,ndc->tnc", q[:, part], self.w_uk()[part]) for part in (slice(0, 2), slice(2, 4)))
    return torch.cat(list(parts), 1)


def onto_zeros(self: Any, q: Tensor) -> Tensor:
    return torch.baddbmm(q.new_zeros(1, 1, 1), q.transpose(0, 1), self.w_uk()).transpose(0, 1)


# -- whole layers


class Megatron(Base):
    """Sequence first, [S, B, He]; freqs [S, 1, 1, Dr] are rotated in the layer."""

    def forward(self, x: Tensor, freqs: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        length, batch, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(length, batch, self.heads, D + DR)
        q_nope, q_pe = torch.split(q, [D, DR], dim=-1)
        c_kv, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [HCKV, DR], dim=-1)
        cos, sin = torch.cos(freqs).to(x.dtype), torch.sin(freqs).to(x.dtype)
        q_pe, k_pe = rotated(q_pe, cos, sin), rotated(k_pe.unsqueeze(2), cos, sin)
        kv_cache.view(-1, HCKV)[slots] = self.kv_a_layernorm(c_kv).reshape(-1, HCKV)
        kr_cache.view(-1, DR)[slots] = k_pe.reshape(-1, DR)
        query = torch.einsum("sbhd,hdc->sbhc", q_nope, self.w_uk())
        return s.attend(query.transpose(0, 1), q_pe.transpose(0, 1), kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


def sequence_first() -> tuple[Tensor, ...]:
    x, _, _, *rest = s.paged_args(8)
    angles = torch.rand(4, 1, 1, H) * 6
    return x.view(4, 2, HE), torch.cat([angles, angles], -1), *rest


class Functional(nn.Module):
    """A JAX port: a dict of weights [in, .., out], one einsum a step, RoPE from positions."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        shapes = dict(dq=(HE, HCQ), uq=(HCQ, heads, D + DR), dkv=(HE, HCKV), kr=(HE, DR), uk=(heads, D, HCKV))
        params = {name: torch.randn(*shape) / 32 for name, shape in shapes.items()}
        params |= {"q_norm": 1 + 0.1 * torch.randn(HCQ), "kv_norm": 1 + 0.1 * torch.randn(HCKV)}
        self.p = nn.ParameterDict({name: nn.Parameter(value.bfloat16()) for name, value in params.items()})

    def forward(self, x: Tensor, positions: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Tensor:
        p = self.p
        c_q = F.rms_norm(torch.einsum("bth,hr->btr", x, p.dq), (HCQ,), p.q_norm, 1e-6)
        q_nope, q_pe = torch.einsum("btr,rhd->bhtd", c_q, p.uq).tensor_split([D], -1)
        angles = positions[..., None] * 1e4 ** (-torch.arange(0, DR, 2) / DR)
        cos, sin = (table.to(x.dtype)[:, None] for table in (angles.cos(), angles.sin()))

        def rotate(x: Tensor) -> Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        kv_cache.view(-1, HCKV)[slots.view(-1)] = F.rms_norm(x @ p.dkv, (HCKV,), p.kv_norm, 1e-6).flatten(0, 1)
        kr_cache.view(-1, DR)[slots.view(-1)] = rotate((x @ p.kr)[:, None])[:, 0].flatten(0, 1)
        scores = torch.einsum("bhtc,sc->bhts", torch.einsum("bhtd,hdc->bhtc", q_nope, p.uk), kv_cache.view(-1, HCKV))
        return scores + torch.einsum("bhtr,sr->bhts", rotate(q_pe), kr_cache.view(-1, DR))


def batches() -> tuple[Tensor, ...]:
    x, _, _, kv_cache, kr_cache, slots = s.paged_args(6)
    return x.view(2, 3, HE), torch.arange(6).view(2, 3) * 5, kv_cache, kr_cache, slots.view(2, 3)


class TokensLast(Base):
    """A ggml port: weights on the left, activations [width, tokens], RoPE over the axis before the last."""

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
        return torch.matmul(kv_cache.view(-1, HCKV), query) + torch.matmul(kr_cache.view(-1, DR), rotate(q_pe))


class MatrixPerHead(Base):
    """W_uk is a parameter for every head."""

    def __init__(self) -> None:
        super().__init__()
        del self.kv_b_proj
        self.w_uks = nn.ParameterList((torch.randn(D, HCKV) / D**0.5).bfloat16() for _ in range(self.heads))

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.stack([q_nope[:, head] @ weight for head, weight in enumerate(self.w_uks)], 1)


class LinearPerHead(Base):
    """W_uk is a layer for every head, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        del self.kv_b_proj
        self.ups = nn.ModuleList(s.linear(D, HCKV) for _ in range(self.heads))

    def absorb(self, q_nope: Tensor) -> Tensor:
        out = q_nope.new_empty(*q_nope.shape[:2], HCKV)
        for head, up in reversed(list(enumerate(self.ups))):
            out[:, head] = up(q_nope[:, head])
        return out


class GroupsApart(Base):
    """W_uk is held for two groups of two heads."""

    def __init__(self) -> None:
        s.Prologue.__init__(self, 4)
        del self.kv_b_proj
        self.groups = nn.ParameterList((torch.randn(2, D, HCKV) / D**0.5).bfloat16() for _ in range(2))

    def absorb(self, q_nope: Tensor) -> Tensor:
        parts = zip(q_nope.chunk(2, 1), self.groups, strict=True)
        return torch.cat([torch.einsum("tnd,ndc->tnc", q, weight) for q, weight in parts], 1)


class WholeHeads(Parts):
    """Heads of 192 columns meet tables that begin with ones and zeros."""

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, ones = torch.cat([q_nope, hf_interleave(q_pe)], -1), torch.ones(c.shape[0], 1, D, dtype=c.dtype)
        turned = torch.cat([q_nope, rotate_half(heads[..., D:])], -1)
        heads = heads * torch.cat([ones, c], -1) + turned * torch.cat([0 * ones, sn], -1)
        return heads[..., :D], heads[..., D:], rotated(k_pe, c, sn)


class SglangBuffers(Base):
    """Buffers [slots, 1, width], neox RoPE from one [cos | sin] cache."""

    def forward(  # type: ignore[override]
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, kv_buffer: Tensor, kr_buffer: Tensor, loc: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        cos, sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in cos_sin[positions].chunk(2, -1))
        q_pe = q_pe * cos + rotate_half(q_pe) * sin
        k_pe = k_pe.unsqueeze(1) * cos + rotate_half(k_pe.unsqueeze(1)) * sin
        kv_buffer[loc], kr_buffer[loc] = c_kv.unsqueeze(1), k_pe
        scores = torch.einsum("thc,sc->ths", self.absorb(q_nope), kv_buffer.squeeze(1))
        return scores + torch.einsum("thr,sr->ths", q_pe, kr_buffer.squeeze(1))


def buffer_args() -> tuple[Tensor, ...]:
    x, _, _, kv_cache, kr_cache, slots = s.paged_args(8)
    angles = torch.rand(64, H) * 6
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    return x, torch.arange(8) * 3, table, kv_cache.view(-1, 1, HCKV), kr_cache.view(-1, 1, DR), slots


class Grown(Base):
    """Hugging Face's DynamicCache: the cache is concatenated, not written."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_past: Tensor, kr_past: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = self.latent(x)
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        rows = torch.cat([kv_past, c_kv.unsqueeze(1)], 2)
        rope = torch.cat([kr_past, rotated(k_pe.unsqueeze(1), c, sn)], 2)
        return torch.matmul(q_nope, self.w_uk()) @ rows.mT + rotated(q_pe, c, sn) @ rope.mT, rows, rope


def grown_args() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = s.paged_args(2)
    past = torch.randn(2, 1, 7, HCKV).bfloat16(), torch.randn(2, 1, 7, DR).bfloat16()
    return x.view(2, 1, HE), cos.view(2, 1, DR), sin.view(2, 1, DR), *past


def zero_rows() -> tuple[Tensor, ...]:
    x, *rest = s.paged_args(8)
    x[3:5] = 0
    return x, *rest


def three_indices(self: Any, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """The one head is indexed too."""
    place = slots // BLOCK_SIZE, slots % BLOCK_SIZE, torch.zeros_like(slots)
    kv_cache.index_put_(place, c_kv)
    kr_cache.index_put_(place, k_pe)


class WideLinear(nn.Linear):
    """Weights held in bfloat16, sums in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class WideProducts(Base):
    def __init__(self) -> None:
        super().__init__()
        for layer in (self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa):
            layer.__class__ = WideLinear

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.einsum("tnd,ndc->tnc", q_nope.float(), self.w_uk().float()).bfloat16()


FOREIGN: dict[str, tuple[Make, Args, str]] = {
    **{
        body.__name__: (based(body.__name__, rotate=body), s.paged_args, IN_PLACE)
        for body in (
            by_einsum,
            by_row_vectors,
            by_sums,
            stacked_first,
            dot_of_two,
            by_literal_matrix,
            flipped_pairs,
            by_vmap,
            scaled_shear,
            rolled_pairs,
        )
    },
    **{body.__name__: (based(body.__name__, rotate=body), s.paged_args, STAGED) for body in (by_matmul, by_where)},
    **{name: (based(name, norm=kind), zero_rows, IN_PLACE) for name, kind in NORMS.items()},
    **{
        body.__name__: (based(body.__name__, heads, absorb=body), s.paged_args, IN_PLACE)
        for body, heads in (
            (loop, 8),
            (loop_of_linears, 2),
            (loop_into_buffer, 2),
            (two_groups, 4),
            (onto_zeros, 2),
        )
    },
    "three_indices": (based("three_indices", write=three_indices), s.paged_args, IN_PLACE),
    **{
        model.__name__: (model, s.paged_args, IN_PLACE)
        for model in (TokensLast, WholeHeads, MatrixPerHead, LinearPerHead, GroupsApart, WideProducts)
    },
    "Megatron": (Megatron, sequence_first, IN_PLACE),
    "Functional": (Functional, batches, IN_PLACE),
    "SglangBuffers": (SglangBuffers, buffer_args, IN_PLACE),
    "Grown": (Grown, grown_args, STAGED),
}
