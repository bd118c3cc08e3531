"""Prologues as serving stacks lay them out in memory: rows assembled in place, heads first, tables made on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import spellings as s
from .near_misses import Base
from .spellings import DR, HCKV, HE, D, Prologue, hf_interleave, linear, rotate_half
from .variants import IN_PLACE, STAGED

Args = Callable[[], tuple[Tensor, ...]]
ROW = HCKV + DR


def rotated(x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    x = hf_interleave(x)
    return x * c + rotate_half(x) * sn


def pairs(x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    """Pairs stay where they are."""
    a, b, c, sn = x[..., ::2], x[..., 1::2], c[..., : DR // 2], sn[..., : DR // 2]
    return torch.stack((a * c - b * sn, b * c + a * sn), -1).flatten(-2)


def scores(query: Tensor, cache: Tensor) -> Tensor:
    return query.float().reshape(-1, ROW) @ cache.float().reshape(-1, ROW).T


class RowsInPlace(Base):
    """Latent and key are written over the projection they come from; so is the query, into an empty one."""

    def assemble(self, rows: Tensor, c: Tensor, sn: Tensor) -> None:
        rows[..., :HCKV] = self.kv_a_layernorm(rows[..., :HCKV].contiguous())
        rows[..., HCKV:] = self.rotate(rows[..., HCKV:], c, sn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        query = x.new_empty(x.shape[0], self.heads, ROW)
        q_nope, q_pe = self.query(x)
        query[..., :HCKV] = self.absorb(q_nope)
        query[..., HCKV:] = self.rotate_q(q_pe, c, sn)
        rows = self.kv_a_proj_with_mqa(x).unsqueeze(1)
        self.assemble(rows, c, sn)
        cache.view(-1, 1, ROW)[slots] = rows
        return scores(query, cache)


class PairsInPlace(RowsInPlace):
    def rotate(self, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        return pairs(x, c, sn)


class KeyFirst(RowsInPlace):
    def assemble(self, rows: Tensor, c: Tensor, sn: Tensor) -> None:
        rows[..., HCKV:].copy_(self.rotate(rows[..., HCKV:], c, sn))
        rows.narrow(-1, 0, HCKV).copy_(self.kv_a_layernorm(rows.narrow(-1, 0, HCKV)))


class NormsInPlace(RowsInPlace):
    """Both norms write over what they read."""

    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_q = self.q_a_proj(x)
        c_q.copy_(self.q_a_layernorm(c_q))
        return self.split(self.q_b_proj(c_q))


class CutAgain(RowsInPlace):
    """Assembled rows, cut for two caches: nothing is left of the assembly."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        q_nope, q_pe = self.query(x)
        rows = self.kv_a_proj_with_mqa(x).unsqueeze(1)
        self.assemble(rows, c, sn)
        self.write(kv_cache, kr_cache, slots, rows[:, 0, :HCKV], rows[:, 0, HCKV:])
        caches = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return s.attend(self.absorb(q_nope), self.rotate_q(q_pe, c, sn), *caches)


class WrittenBack(RowsInPlace):
    """The rotated part is written back into q, the latent into its row; keys and values are projected from it."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        c, sn = cos.unsqueeze(1), sin.unsqueeze(1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(-1, self.heads, D + DR)
        rows = self.kv_a_proj_with_mqa(x)
        c_kv = self.kv_a_layernorm(rows[:, :HCKV].contiguous())
        keys, values = self.kv_b_proj(c_kv).view(-1, self.heads, 2 * D).split([D, D], -1)
        rows = rows.unsqueeze(1)
        q_pe, k_pe = self.rotate(q[..., D:], c, sn), self.rotate(rows[:, :, HCKV:], c, sn)
        q[..., D:] = q_pe
        key = torch.empty_like(q)
        key[..., :D], key[..., D:] = keys, k_pe
        rows[:, :, :HCKV], rows[:, :, HCKV:] = c_kv.unsqueeze(1), k_pe
        cache.view(-1, 1, ROW)[slots] = rows
        return torch.einsum("qhd,khd->hqk", q.float(), key.float()) @ values.float().transpose(0, 1)


def row_args(tokens: int = 6) -> tuple[Tensor, ...]:
    x, cos, sin, _, _, slots = s.paged_args(tokens)
    return x, cos, sin, torch.randn(4, 16, 1, ROW).bfloat16(), slots


class HeadsFirst(Prologue):
    """[B, N, S, ..], the rotated query scaled before it meets the keys of its own sequence."""

    def rotate(self, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        return rotated(x, c, sn)

    def tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor) -> tuple[Tensor, ...]:
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = (part.unsqueeze(1) for part in self.latent(x))
        c, sn = self.tables(x, cos, sin)
        kv, kr = torch.cat([kv, c_kv], 2), torch.cat([kr, self.rotate(k_pe, c, sn)], 2)
        score = (q_nope @ self.w_uk()) @ kv.mT + (self.rotate(q_pe, c, sn) * 0.0625) @ kr.mT
        return score, kv, kr


class CountedPositions(HeadsFirst):
    """Angles from literals alone: positions counted, frequencies computed."""

    def tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.exp2(-torch.arange(DR // 2, device=x.device) / (DR // 2) * 13.287712379549449)
        angles = torch.arange(7, 7 + x.shape[1], device=x.device)[:, None] * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class CountedPairs(CountedPositions):
    def rotate(self, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        return pairs(x, c, sn)


class KeyOnePositionLater(CountedPositions):
    """Near miss: the key's positions are counted from another one."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor) -> tuple[Tensor, ...]:
        q_nope, q_pe = (part.transpose(1, 2) for part in self.query(x))
        c_kv, k_pe = (part.unsqueeze(1) for part in self.latent(x))
        c, sn = self.tables(x, cos, sin)
        later_c, later_sn = (t[1:] for t in self.tables(torch.cat([x, x[:, :1]], 1), cos, sin))
        kv, kr = torch.cat([kv, c_kv], 2), torch.cat([kr, self.rotate(k_pe, later_c, later_sn)], 2)
        return (q_nope @ self.w_uk()) @ kv.mT + self.rotate(q_pe, c, sn) @ kr.mT, kv, kr


def sequences() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = s.paged_args(6)
    past = torch.randn(2, 1, 7, HCKV).bfloat16(), torch.randn(2, 1, 7, DR).bfloat16()
    return x.view(2, 3, HE), cos[:3], sin[:3], *past


class RowsOfOperator(s.NpuOperators):
    """The cache operator gives the new rows out as well (``is_output_kv``), and the model reads them."""

    def rows(self, x: Tensor, c: Tensor, sn: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Any:
        latent, norm = self.kv_a_proj_with_mqa(x).view(-1, 1, 1, ROW), self.kv_a_layernorm
        given = latent, norm.weight, c, sn, slots, kr_cache, kv_cache
        if self.version == 2:
            mode = {"cache_mode": "PA_BNSD", "is_output_kv": True}
            return torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(*given, epsilon=norm.eps, **mode)
        return torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            *given, epsilon=norm.eps, cache_mode="PA", is_output_kv=self.is_output_kv
        )[2:]

    is_output_kv = True

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Any:
        c, sn = cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR)
        q_nope, q_pe = self.query(x)
        q_pe = torch.ops.npu.npu_interleave_rope(q_pe.unsqueeze(2), c, sn).squeeze(2)
        k_pe, c_kv = self.rows(x, c, sn, kv_cache, kr_cache, slots)
        return s.attend(self.absorb(q_nope), q_pe, c_kv.view(-1, HCKV), k_pe.view(-1, DR))


class PrefillOfOperator(RowsOfOperator):
    """Keys and values are made of the rows (vllm-ascend's prefill)."""

    def __init__(self) -> None:
        super().__init__(version=1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor) -> Any:
        c, sn = cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR)
        q_nope, q_pe = self.query(x)
        q_pe = torch.ops.npu.npu_interleave_rope(q_pe.unsqueeze(2), c, sn).squeeze(2)
        k_pe, c_kv = self.rows(x, c, sn, kv_cache, kr_cache, slots)
        k_nope, value = self.kv_b_proj(c_kv.view(-1, HCKV)).view(-1, self.heads, D + s.DV).split([D, s.DV], -1)
        by_head = torch.einsum("tnd,snd->nts", q_nope, k_nope) + torch.einsum("tnd,sd->nts", q_pe, k_pe.view(-1, DR))
        return by_head, value


class RowsNotGiven(PrefillOfOperator):
    """Without ``is_output_kv`` the operator leaves them unset."""

    is_output_kv = False


class FourSequences(Base):
    """Buffers for so many at most, of which a batch takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv_cache", torch.zeros(4, 16, HCKV, dtype=torch.bfloat16))
        self.register_buffer("kr_cache", torch.zeros(4, 16, DR, dtype=torch.bfloat16))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        batch, c, sn = len(x), cos.view(1, 1, 1, DR), sin.view(1, 1, 1, DR)
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        q_pe, k_pe = rotated(q_pe, c, sn), rotated(k_pe.unsqueeze(2), c, sn)
        self.kv_cache[:batch, 5:6], self.kr_cache[:batch, 5:6] = c_kv, k_pe.squeeze(2)
        query = torch.einsum("bsnd,ndc->bsnc", q_nope, self.w_uk())
        of_latent = torch.einsum("bsnc,btc->bsnt", query, self.kv_cache[:batch, :6])
        return of_latent + torch.einsum("bsnr,btr->bsnt", q_pe, self.kr_cache[:batch, :6])


def two_of_four() -> tuple[Tensor, ...]:
    x, cos, sin, *_ = s.paged_args(2)
    return x.view(2, 1, HE), cos[0], sin[0]


class ScaledByPosition(RowsInPlace):
    """The whole query, by a factor that grows with the position, before W_uk."""

    def growing(self, q: Tensor) -> Tensor:
        return q * (1 + 0.1 * torch.log1p(torch.arange(q.shape[0], device=q.device)))[:, None, None].to(q.dtype)

    def absorb(self, q_nope: Tensor) -> Tensor:
        return super().absorb(self.growing(q_nope))

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.growing(super().rotate_q(q_pe, c, s))


class AbsorbedFromX(Prologue):
    """No query latent and no rotation at all, yet absorbed: linear-attention hybrids."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HE, self.heads * (D + DR))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor) -> tuple[Tensor, ...]:
        q_nope, q_pe = self.q_proj(x).view(2, 3, self.heads, D + DR).transpose(1, 2).split([D, DR], -1)
        c_kv, k_pe = (part.unsqueeze(1) for part in self.latent(x))
        kv, kr = torch.cat([kv, c_kv], 2), torch.cat([kr, k_pe], 2)
        return (q_nope @ self.w_uk()) @ kv.mT + q_pe @ kr.mT, kv, kr


# -- one thing wrong with what is written where


def assembling(body: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    return type("Miss", (RowsInPlace,), {"assemble": body})


def normed(m: Any, rows: Tensor) -> Tensor:
    return m.kv_a_layernorm(rows[..., :HCKV].contiguous())


def shifted(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """The key lands eight columns too early: raw columns are left at the end."""
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV], rows[..., HCKV - 8 : -8] = latent, key


def half_written(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """Only the first of two steps: the key is cached as it was projected."""
    m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV] = normed(m, rows)


def every_other(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV], rows[..., HCKV::2] = latent, key[..., ::2]


def norm_of_written(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """The norm comes after columns of its own row were overwritten."""
    key = m.rotate(rows[..., HCKV:], c, sn)
    rows[..., HCKV - DR : HCKV] = key
    rows[..., :HCKV], rows[..., HCKV:] = normed(m, rows), key


def rotated_twice(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """The first rotation is the kernel's, the second stays the model's."""
    rows[..., :HCKV] = normed(m, rows)
    rows[..., HCKV:] = m.rotate(rows[..., HCKV:], c, sn)
    rows[..., HCKV:] = m.rotate(rows[..., HCKV:], c, sn)


def some_tokens(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV] = latent
    rows[1:, :, HCKV:] = key[1:]


def exchanged(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """Key first in the row: another cache than most, and all the same to a staged plan."""
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :DR], rows[..., DR:] = key, latent


STACKS: dict[str, tuple[Callable[[], nn.Module], Args, str]] = {
    **{model.__name__: (model, row_args, STAGED) for model in (RowsInPlace, PairsInPlace, KeyFirst, NormsInPlace)},
    **{model.__name__: (model, sequences, STAGED) for model in (HeadsFirst, CountedPositions, CountedPairs)},
    "CutAgain": (CutAgain, s.paged_args, IN_PLACE),
    "RowsOfOperator": (RowsOfOperator, s.paged_args, IN_PLACE),
    "FourSequences": (FourSequences, two_of_four, STAGED),
    "exchanged": (assembling(exchanged), row_args, STAGED),
}

MISSES: dict[str, tuple[Callable[[], nn.Module], Args, str]] = {
    **{
        body.__name__: (assembling(body), row_args, code)
        for body, code in (
            (shifted, "reader.latent"),
            (half_written, "kv_latent.absent"),
            (every_other, "reader.latent"),
            (norm_of_written, "kv_latent.absent"),
            (rotated_twice, STAGED),
            (some_tokens, "reader.latent"),
        )
    },
    "KeyOnePositionLater": (KeyOnePositionLater, sequences, "rope.tables_differ"),
    "ScaledByPosition": (ScaledByPosition, row_args, "scale.unequal"),
    "AbsorbedFromX": (AbsorbedFromX, sequences, "q_lora.absent"),
}
