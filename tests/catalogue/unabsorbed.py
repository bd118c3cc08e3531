"""Prologues without a product with W_uk, under ``Config(targets=("v3", "identity"))``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, Base, D, linear
from .entry import IN_PLACE, OURS, entry, miss
from .int8 import Full


@entry(IN_PLACE, source=OURS, tags="absorb, unabsorbed")
class PaddedQuery(Base):
    """q_nope padded to the latent's width: the core reads it as the absorbed query."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


@entry(IN_PLACE, source=OURS, tags="absorb, unabsorbed", weight_quant_mode=2)
class PaddedInt8Query(Full):
    def absorb(self, q_nope: Tensor) -> Tensor:
        return F.pad(q_nope, (0, HCKV - D))


@entry(IN_PLACE, source=OURS, tags="absorb, unabsorbed")
class PaddedReadTwice(PaddedQuery):
    """Two slices of q, each with a reader of its own."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        self.again = q.view(-1, self.heads, D + DR)[..., :D]
        return super().split(q)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.again.float().sum(-1)


@entry(IN_PLACE, source=OURS, tags="absorb, unabsorbed")
class PaddedApart(PaddedQuery):
    """W_uq and W_qr apart."""

    def __init__(self) -> None:
        super().__init__()
        self.uq, self.qr = linear(HCQ, self.heads * D), linear(HCQ, self.heads * DR)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.uq(q).view(-1, self.heads, D), self.qr(q).view(-1, self.heads, DR)


@entry(IN_PLACE, source=OURS, tags="absorb, unabsorbed")
class PaddedRopeFirst(PaddedQuery):
    """Columns of a head: rope, then nope."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_pe, q_nope = q.view(-1, self.heads, DR + D).split([DR, D], -1)
        return q_nope, q_pe


@entry(IN_PLACE, source=OURS, tags="absorb, unabsorbed")
class PaddedUnrotated(PaddedQuery):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


@miss("rope.absent", tags="absorb, unabsorbed", of="PaddedUnrotated")
class PaddedQueryRotated(PaddedUnrotated):
    def rotate_q(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super(PaddedUnrotated, self).rotate(x, c, s)
