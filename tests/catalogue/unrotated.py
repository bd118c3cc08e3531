"""Prologues without RoPE (Kimi-K3): the kernel's rotation by cos = 1, sin = 0 changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import int8
from .base import DR, HCKV, HCQ, HE, Base, D, attend, linear
from .entry import IN_PLACE, OURS, STAGED, entry, miss


@entry(IN_PLACE, source=OURS, tags="rope, device, symbolic")
class NoRope(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


@entry(IN_PLACE, source=OURS, tags="rope, device, symbolic")
class NoRopeKeyApart(NoRope):
    """W_kr is a layer of its own."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.kv_a_proj_with_mqa = linear(HE, HCKV)
        self.k_proj = linear(HE, DR)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kv_a_layernorm(self.kv_a_proj_with_mqa(x)), self.k_proj(x)


@entry(IN_PLACE, source=OURS, tags="rope, device")
class NoRopeQueryApart(NoRope):
    """W_uq and W_qr are layers of their own."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]
        self.q_nope_proj = linear(HCQ, heads * D)
        self.q_rope_proj = linear(HCQ, heads * DR)

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_nope_proj(q).view(-1, self.heads, D), self.q_rope_proj(q).view(
            -1, self.heads, DR
        )


@entry(IN_PLACE, source=OURS, tags="rope, device")
class NoRopeScaledQuery(NoRope):
    """The softmax scale on the whole query."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(q * 0.07)


@entry(IN_PLACE, source=OURS, tags="rope, device")
class NoRopeFirst(NoRope):
    """Heads laid out [Dr | D]."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_pe, q_nope = q.view(*q.shape[:-1], self.heads, D + DR).split([DR, D], -1)
        return q_nope, q_pe


@entry(IN_PLACE, source=OURS, tags="rope, device, symbolic")
class NoRopeJoined(NoRope):
    """Query and key as one row of 576, as attention over latents reads them."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        kv_cache.view(-1, HCKV)[slots], kr_cache.view(-1, DR)[slots] = c_kv, k_pe
        rows = torch.cat([kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)], -1)
        return torch.cat([self.absorb(q_nope), q_pe], -1).float() @ rows.float().T


@entry(IN_PLACE, source=OURS, tags="rope, int8, device", weight_quant_mode=2)
class NoRopeInt8(int8.Full):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


@entry(STAGED, source=OURS, tags="rope, device, symbolic")
class NoRopePrefill(NoRope):
    """The new rows are read beside their caches."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        return attend(self.absorb(q_nope), q_pe, c_kv, k_pe)


@miss("rope.absent", tags="rope", of="NoRope")
class OnlyQueryRotated(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return k_pe


@miss("rope.absent", tags="rope", of="NoRope")
class OnlyKeyRotated(Base):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return q_pe


@miss(IN_PLACE, tags="rope, run", of="NoRope")
class OnlyRopeScaled(NoRope):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return q_pe * 0.5


@miss("scale.unequal", tags="rope", of="NoRope")
class OnlyNopeScaled(NoRope):
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = super().split(q)
        return q_nope * 0.5, q_pe


@miss("linear.bias", tags="rope", of="NoRope")
class NoRopeBiased(NoRope):
    """A bias for each column is no rotation, and no product either."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DR).bfloat16())

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x + self.bias


@miss("step.choice", tags="rope", of="NoRope")
class NoRopeClamped(NoRope):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x.clamp(-1, 1)


@miss(STAGED, tags="rope, run", of="NoRope")
class NoRopeShifted(NoRope):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return k_pe.roll(1, 0)
