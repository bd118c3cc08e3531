"""What the models of the catalogue are made of: sizes, norms, the prologue whose every step is a
method, arguments.

Sizes are the smallest that the operator's host check takes: He 1024, Hcq 1536, Hckv 512, D 128, Dr
64.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HE, HCQ, HCKV, D, DR, DV = 1024, 1536, 512, 128, 64, 128


BLOCKS, BLOCK_SIZE = 4, 16


H = DR // 2


npu = torch.ops.npu


def linear(width_in: int, width_out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(width_in, width_out, bias=bias, dtype=torch.bfloat16)


class HfNorm(nn.Module):
    """Cast to the input's dtype before gamma, as transformers does."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter((1 + 0.1 * torch.randn(width)).bfloat16())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def hf_interleave(x: Tensor) -> Tensor:
    """HF's trick: pairs to halves by view and transpose."""
    *lead, width = x.shape
    return x.view(*lead, width // 2, 2).transpose(-1, -2).reshape(*lead, width)


def rotated(x: Tensor, c: Tensor, sn: Tensor) -> Tensor:
    x = hf_interleave(x)
    return x * c + rotate_half(x) * sn


def half(table: Tensor) -> Tensor:
    return table[..., :H]


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a narrow dtype and back."""
    return x.to(dtype).to(x.dtype)


class Prologue(nn.Module):
    """Weights, and the attention core that reads the results. Subclasses spell ``prologue``."""

    norm: type[HfNorm] = HfNorm

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q_a_proj = linear(HE, HCQ)
        self.q_a_layernorm = self.norm(HCQ)
        self.q_b_proj = linear(HCQ, heads * (D + DR))
        self.kv_a_proj_with_mqa = linear(HE, HCKV + DR)
        self.kv_a_layernorm = self.norm(HCKV)
        self.kv_b_proj = linear(HCKV, heads * (D + DV))

    def w_uk(self) -> Tensor:
        return self.kv_b_proj.weight.view(self.heads, D + DV, HCKV)[:, :D]

    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = q.view(*x.shape[:-1], self.heads, D + DR).split([D, DR], -1)
        return q_nope, q_pe

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.bmm(q_nope.transpose(0, 1), self.w_uk()).transpose(0, 1)


def attend(query: Tensor, query_rope: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
    """Scores of every token against every cache row: reads all that the prologue made."""
    scores = query.float().flatten(0, -3) @ kv_rows.float().T
    return scores + query_rope.float().flatten(0, -3) @ kr_rows.float().T


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
        rotated_q, rotated_k = (
            self.rotate_q(q_pe, c, s_),
            self.rotate_k(k_pe.unsqueeze(1), c, s_).squeeze(1),
        )
        query = self.absorb(q_nope)
        self.write(kv_cache, kr_cache, self.slots(slots, query), c_kv, rotated_k)
        scores = attend(query, rotated_q, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))
        return scores, self.extra(c_q_raw, c_q, k_pe)

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = q.view(-1, self.heads, D + DR).split([D, DR], -1)
        return q_nope, q_pe

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = k_pe


class Parts(Base):
    """The prologue with seams where its values meet."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c_kv, k_pe = self.latent(x)
        q_nope, q_pe, k_pe = self.rotated(
            q_nope, q_pe, k_pe.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1)
        )
        self.write(kv_cache, kr_cache, slots, c_kv, k_pe.squeeze(1))
        return self.scores(
            q_nope, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        ), torch.full_like(c_kv, 0.5)

    def rotated(
        self, q_nope: Tensor, q_pe: Tensor, k_pe: Tensor, c: Tensor, sn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q_nope, self.rotate(q_pe, c, sn), self.rotate(k_pe, c, sn)

    def scores(self, q_nope: Tensor, q_pe: Tensor, kv_rows: Tensor, kr_rows: Tensor) -> Tensor:
        return attend(self.absorb(q_nope), q_pe, kv_rows, kr_rows)


# -- arguments


def tables(tokens: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, DR // 2) * 6.28
    both = torch.cat([angles, angles], -1)
    return both.cos().bfloat16(), both.sin().bfloat16()


def paged_caches() -> tuple[Tensor, Tensor]:
    return (
        torch.randn(BLOCKS, BLOCK_SIZE, 1, HCKV).bfloat16(),
        torch.randn(BLOCKS, BLOCK_SIZE, 1, DR).bfloat16(),
    )


def paged_args(tokens: int = 8) -> tuple[Tensor, ...]:
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:tokens]
    return (torch.randn(tokens, HE).bfloat16(), *tables(tokens), *paged_caches(), slots)


def one_token() -> tuple[Tensor, ...]:
    return paged_args(1)
