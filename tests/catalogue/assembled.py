"""Values assembled in place, and rows that an operator gives out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .base import DR, DV, HCKV, Base, D, attend, paged_args
from .entry import IN_PLACE, OURS, STAGED, entry, miss
from .prologues import NpuOperators
from .rotations import pairs

ROW = HCKV + DR


def scores(query: Tensor, cache: Tensor) -> Tensor:
    return query.float().reshape(-1, ROW) @ cache.float().reshape(-1, ROW).T


def row_args(tokens: int = 6) -> tuple[Tensor, ...]:
    x, cos, sin, _, _, slots = paged_args(tokens)
    return x, cos, sin, torch.randn(4, 16, 1, ROW).bfloat16(), slots


@entry(STAGED, source=OURS, tags="layout, device, symbolic, export", args=row_args)
class RowsInPlace(Base):
    """Latent and key are written over their projection; so is the query, into an empty one."""

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


@entry(STAGED, source=OURS, tags="layout, rope", args=row_args)
class PairsInPlace(RowsInPlace):
    def rotate(self, x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
        return pairs(x, c, sn)


@entry(STAGED, source=OURS, tags="layout", args=row_args)
class KeyFirst(RowsInPlace):
    def assemble(self, rows: Tensor, c: Tensor, sn: Tensor) -> None:
        rows[..., HCKV:].copy_(self.rotate(rows[..., HCKV:], c, sn))
        rows.narrow(-1, 0, HCKV).copy_(self.kv_a_layernorm(rows.narrow(-1, 0, HCKV)))


@entry(STAGED, source=OURS, tags="layout, norm", args=row_args)
class NormsInPlace(RowsInPlace):
    """Both norms write over what they read."""

    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_q = self.q_a_proj(x)
        c_q.copy_(self.q_a_layernorm(c_q))
        return self.split(self.q_b_proj(c_q))


@entry(IN_PLACE, source=OURS, tags="layout, cache")
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
        return attend(self.absorb(q_nope), self.rotate_q(q_pe, c, sn), *caches)


@entry(IN_PLACE, source=OURS, tags="readers, operators, device, symbolic")
class RowsOfOperator(NpuOperators):
    """The cache operator gives out the new rows (``is_output_kv``), and the model reads them."""

    def rows(
        self, x: Tensor, c: Tensor, sn: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        latent, norm = self.kv_a_proj_with_mqa(x).view(-1, 1, 1, ROW), self.kv_a_layernorm
        given = latent, norm.weight, c, sn, slots, kr_cache, kv_cache
        if self.version == 2:
            mode = {"cache_mode": "PA_BNSD", "is_output_kv": True}
            return torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(*given, epsilon=norm.eps, **mode)
        return torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            *given, epsilon=norm.eps, cache_mode="PA", is_output_kv=self.is_output_kv
        )[2:]

    is_output_kv = True

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *caches_and_slots: Tensor) -> Any:
        c, sn = cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR)
        q_nope, q_pe = self.query(x)
        q_pe = torch.ops.npu.npu_interleave_rope(q_pe.unsqueeze(2), c, sn).squeeze(2)
        k_pe, c_kv = self.rows(x, c, sn, *caches_and_slots)
        return self.attend(q_nope, q_pe, c_kv, k_pe)

    def attend(self, q_nope: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor) -> Any:
        return attend(self.absorb(q_nope), q_pe, c_kv.view(-1, HCKV), k_pe.view(-1, DR))


@entry(IN_PLACE, source="vllm-ascend", tags="readers, operators, unabsorbed")
class PrefillOfOperator(RowsOfOperator):
    """Keys and values are made of the rows (vllm-ascend's prefill)."""

    def __init__(self) -> None:
        super().__init__(version=1)

    def attend(self, q_nope: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor) -> Any:
        k_nope, value = (
            self.kv_b_proj(c_kv.view(-1, HCKV)).view(-1, self.heads, D + DV).split([D, DV], -1)
        )
        by_head = torch.einsum("tnd,snd->nts", q_nope, k_nope) + torch.einsum(
            "tnd,sd->nts", q_pe, k_pe.view(-1, DR)
        )
        return by_head, value


@miss("reader.latent", tags="readers, operators, unabsorbed", of="PrefillOfOperator")
class RowsNotGiven(PrefillOfOperator):
    """Without ``is_output_kv`` the operator leaves them unset."""

    is_output_kv = False


# -- assemble(rows, cos, sin) of RowsInPlace


def normed(m: Any, rows: Tensor) -> Tensor:
    return m.kv_a_layernorm(rows[..., :HCKV].contiguous())


def assembling(body: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    return type("Miss", (RowsInPlace,), {"assemble": body})


def assembled(outcome: str, *, tags: str, source: str) -> Callable[[Any], Any]:
    """Puts RowsInPlace with another ``assemble`` into the catalogue."""

    def register(body: Any) -> Any:
        entry(outcome, source=source, tags=tags, args=row_args, name=body.__name__)(
            assembling(body)
        )
        return body

    return register


MISS, OF_ROWS = "near miss, layout, run", f"{OURS}: a near miss of RowsInPlace"


@assembled(STAGED, source=OURS, tags="layout")
def exchanged(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """Key first in the row: another cache than most, and all the same to a staged plan."""
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :DR], rows[..., DR:] = key, latent


@assembled("reader.latent", source=OF_ROWS, tags=MISS)
def shifted(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """The key lands eight columns too early: raw columns are left at the end."""
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV], rows[..., HCKV - 8 : -8] = latent, key


@assembled("rope.absent", source=OF_ROWS, tags=MISS)
def half_written(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """Only the first of two steps: the key is cached as it was projected."""
    m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV] = normed(m, rows)


@assembled("reader.latent", source=OF_ROWS, tags=MISS)
def every_other(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV], rows[..., HCKV::2] = latent, key[..., ::2]


@assembled("kv_latent.absent", source=OF_ROWS, tags=MISS)
def norm_of_written(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """The norm comes after columns of its own row were overwritten."""
    key = m.rotate(rows[..., HCKV:], c, sn)
    rows[..., HCKV - DR : HCKV] = key
    rows[..., :HCKV], rows[..., HCKV:] = normed(m, rows), key


@assembled(STAGED, source=OF_ROWS, tags=MISS)
def rotated_twice(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    """The first rotation is the kernel's, the second stays the model's."""
    rows[..., :HCKV] = normed(m, rows)
    rows[..., HCKV:] = m.rotate(rows[..., HCKV:], c, sn)
    rows[..., HCKV:] = m.rotate(rows[..., HCKV:], c, sn)


@assembled("reader.latent", source=OF_ROWS, tags=MISS)
def some_tokens(m: Any, rows: Tensor, c: Tensor, sn: Tensor) -> None:
    latent, key = normed(m, rows), m.rotate(rows[..., HCKV:], c, sn)
    rows[..., :HCKV] = latent
    rows[1:, :, HCKV:] = key[1:]
