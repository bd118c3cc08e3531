"""Near misses of the key's half: one thing is wrong with what npu_kv_rmsnorm_rope_cache would
do.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .base import DR, HCKV, HE, HfNorm, linear, npu, paged_args
from .entry import IN_PLACE, STAGED
from .entry import miss as any_miss
from .keys import AssembledKey, Lite
from .prologues import NpuOperators

miss = partial(any_miss, of="Lite", targets=("key",))


@miss("target.unlisted", tags="key, operators", of="NpuOperators")
class OperatorAlready(NpuOperators):
    """The key half is the operator; what is left to fuse is the whole, which Config.targets leaves
    out.
    """


class DoubledNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (
            wide * (2 * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)) * self.weight
        ).to(x.dtype)


@miss("norm.scaled", tags="key, norm")
class Doubled(Lite):
    norm = DoubledNorm


class WideWeightNorm(HfNorm):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)
        self.weight = nn.Parameter(self.weight.detach().float() * 1.001)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


@miss("norm.gamma_dtype", tags="key, norm")
class WideWeight(Lite):
    norm = WideWeightNorm


@miss("dtype.region", tags="key, weights")
class WideProduct(Lite):
    """The product leaves in float32: the operator would round it."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = (x.float() @ self.kv_a_proj_with_mqa.weight.float().t()).split([HCKV, DR], -1)
        wide = c_kv * torch.rsqrt(c_kv.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.kv_a_layernorm.weight).bfloat16(), k_pe

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate_k(k_pe, c, s).bfloat16()


@miss("step.choice", tags="key, norm")
class ClampedLatent(Lite):
    """Nothing of the key can be read; what is left is a query that is absorbed and rotated beside a
    cache write.
    """

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv.clamp(-1, 1)), k_pe


@miss("q_lora.absent", tags="key, norm", targets=("v3",))
class ClampedLatentOfWhole(ClampedLatent):
    """No step is to blame where the whole is asked for."""


@miss("q_lora.absent", tags="key, norm")
class AddedLatent(Lite):
    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv + 1), k_pe


@miss("q_lora.absent", tags="key, weights")
class AdapterBesideKey(Lite):
    """A LoRA beside W_dkv_kr."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = linear(HE, 16), linear(16, HCKV + DR)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = self.kv_a_proj_with_mqa(x) + self.lora_b(self.lora_a(x))
        return self.kv_a_layernorm(both[..., :HCKV]), both[..., HCKV:]


@miss("q_lora.absent", tags="key, rope")
class KeyTimesCos(Lite):
    """Nothing is rotated, and the key is multiplied by a table."""

    def rotate_q(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x

    def rotate_k(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c


class NarrowLatent(Lite):
    """A latent of 256 columns; the caches hold it and as many zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(HE, 256 + DR), self.norm(256)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([256, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        super().write(
            kv_cache, kr_cache, slots, torch.cat([c_kv, torch.zeros_like(c_kv)], -1), k_pe
        )


# -- fused as what they mean


@miss(STAGED, tags="key, run, layout", of="AssembledKey")
class KeyTooEarly(AssembledKey):
    """The rotated key lands eight columns too early in the join: both caches take columns of
    both.
    """

    def assemble(self, c_kv: Tensor, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        rows = torch.cat([c_kv, k_pe], -1)
        rows[..., HCKV - 8 : -8] = self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1)
        return rows


@miss(STAGED, tags="key, run, layout", of="AssembledKey")
class SomeKeysAssigned(AssembledKey):
    """The first token's key is cached as it was projected."""

    def assemble(self, c_kv: Tensor, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        rows = torch.cat([c_kv, k_pe], -1)
        rows[1:, HCKV:] = self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1)[1:]
        return rows


@miss(STAGED, tags="key, run, cache")
class SlotsDiffer(Lite):
    """The key goes one row further than the latent."""

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[(slots + 1) % 64] = k_pe


@miss(IN_PLACE, tags="key, run, cache")
class WrittenTwice(Lite):
    """The second pair of writes goes on from the caches that the operator has written, by the
    model's own steps.
    """

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, k_pe)
        super().write(kv_cache, kr_cache, 63 - slots, c_kv * 0.5, k_pe)


@miss(STAGED, tags="key, run, cache")
class KeyWrittenRaw(Lite):
    """The cache holds the key before its rotation; the rotated one is read."""

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        super().write(kv_cache, kr_cache, slots, c_kv, self.raw)
        self.rotated = k_pe

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        self.raw = k_pe.squeeze(1)
        return super().rotate_k(k_pe, c, s)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.rotated.float() * 2


@miss(IN_PLACE, tags="key, run, norm")
class SharedWeight(Lite):
    """One weight for the norm of the latent, and for that of half of the hidden state."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        self.other = self.kv_a_layernorm(x[..., :HCKV])
        return self.kv_a_layernorm(c_kv), k_pe

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.other


def one_padded_token() -> tuple[Tensor, ...]:
    """Of several with one slot, it is not defined which is written."""
    *given, slots = paged_args()
    return *given, torch.arange(len(slots)) * 3 + (torch.arange(len(slots)) != 5)


@miss(STAGED, tags="key, run, cache", args=one_padded_token)
class MaskedSlots(Lite):
    """Tokens that are padding have slot -1, which index_put counts from the end."""

    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return torch.where(slots % 3 == 0, torch.full_like(slots, -1), slots)


@miss(IN_PLACE, tags="key, run, operators, rope")
class TablesExchanged(Lite):
    """sin for cos: another rotation, and the same one for whoever reads it."""

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return npu.npu_interleave_rope(k_pe.unsqueeze(1), s.unsqueeze(1), c.unsqueeze(1)).squeeze(1)
