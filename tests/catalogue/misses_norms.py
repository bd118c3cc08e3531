"""Near misses: one thing is wrong with a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, Base, HfNorm, wide
from .entry import Methods, miss, misses
from .norms import by_scale, norm
from .projections import WideProducts


@miss("kv_latent.absent", tags="norm")
class KeyNotNormed(Base):
    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return c_kv, k_pe


@miss("norm.gamma_absent", tags="norm")
class NoGamma(Base):
    def down(self, x: Tensor) -> Tensor:
        return F.rms_norm(self.q_a_proj(x), (HCQ,), None, 1e-6)

    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm = nn.Identity()  # type: ignore[assignment]


@miss("norm.gamma_dtype", tags="norm")
class Fp32Gamma(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + 0.1 * torch.randn(HCKV))

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return F.rms_norm(c_kv.float(), (HCKV,), self.gamma, 1e-6).bfloat16(), k_pe


class ScaledNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32) * 1.0038
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)


@miss("norm.gamma_dtype", tags="norm")
class FactorBesideGamma(Base):
    """The factor would be rounded with gamma to bfloat16, and be lost if gamma is 1."""

    norm = ScaledNorm


class Bf16Norm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@miss("norm.low_precision", tags="norm")
class LowPrecision(Base):
    norm = Bf16Norm


class Bf16Squares(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(2).float().mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(mean + self.eps)).to(x.dtype)


@miss("norm.low_precision", tags="norm")
class LowPrecisionSquares(Base):
    norm = Bf16Squares


class ClampedNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-4, 4)


@miss("q_lora.interrupted", tags="norm")
class LatentClamped(Base):
    """Between the norm and W_uq_qr."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm = ClampedNorm(HCQ)


class CenteredNorm(HfNorm):
    """LayerNorm without a bias, on both latents."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (x.shape[-1],), self.weight)


@miss("norm.absent", tags="norm")
class LayerNorms(Base):
    norm = CenteredNorm


@torch.library.custom_op("mla_fusion_test::norm", mutates_args=())
def own_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


@own_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


class OpaqueNorm(HfNorm):
    """An operator of the model's own, on both latents."""

    def forward(self, x: Tensor) -> Tensor:
        return own_norm(x, self.weight, self.eps)


@miss("norm.absent", tags="norm")
class OpaqueNorms(Base):
    norm = OpaqueNorm


@miss("step.choice", tags="norm")
class LatentOutliersCut(Base):
    """Values that a probe of magnitude 1 never has are cut off before the norm."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv.clamp(-50, 50)), k_pe


@miss("step.random", tags="norm")
class LatentDropout(Base):
    """In training."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(F.dropout(c_kv, 0.1)), k_pe


class NormOverHalf(HfNorm):
    """The mean is taken over the first half of the row."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        half = wide[..., : x.shape[-1] // 2]
        scale = torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


@miss("norm.absent", tags="norm")
class WrongMean(Base):
    norm = NormOverHalf


@miss("norm.absent", tags="norm")
class NoEpsilon(Base):
    """A row of zeros is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm.eps = 0.0


@miss("rope.normed_key", tags="norm, rope")
class NormedKey(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(F.rms_norm(k_pe, (DR,)), c, s)


class WideNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))


@miss("dtype.region", tags="norm, run", of="WideProducts")
class LatentKeptWide(WideProducts):
    """The normed latent is float32 when it meets W_uq_qr; the kernel rounds it first."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_layernorm.__class__ = WideNorm

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(q.bfloat16())


# -- compiled and run


def stat_of_576(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    joined = self.kv_a_proj_with_mqa(x)
    scale = torch.rsqrt(wide(joined).pow(2).mean(-1, True) + 1e-6).to(joined.dtype)
    c_kv, k_pe = joined.split([HCKV, DR], -1)
    return c_kv * scale * self.kv_a_layernorm.weight, k_pe


SCALES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "clamped_at_rms": lambda n, x: x.pow(2).mean(-1, True).clamp_min(1e-9).rsqrt(),
    "eps_outside": lambda n, x: 1 / (x.pow(2).mean(-1, True).sqrt() + 1e-2),
    "eps_a_row": lambda n, x: (x.pow(2).mean(-1, True) + torch.arange(1, 9)[:, None]).rsqrt(),
    "dots_of_another_token": lambda n, x: (
        torch.einsum("td,td->t", x, x).roll(1)[:, None] + 1e-6
    ).rsqrt(),
    "beside_the_gram": lambda n, x: (
        F.pad((x @ x.T).diagonal(1), (0, 1)).abs()[:, None] + 1e-6
    ).rsqrt(),
    "gram_rolled": lambda n, x: ((x @ x.T).roll(1, 0).diagonal().abs() + 1).rsqrt()[:, None],
    "centred": lambda n, x: (x.var(-1, keepdim=True) + 1e-6).rsqrt(),
}
MISSES: dict[str, tuple[Methods, str]] = {
    **{name: (dict(norm=by_scale(scale)), "norm.absent") for name, scale in SCALES.items()},
    "added_to_its_norm": (
        dict(
            norm=norm(lambda n, x: F.rms_norm(x, (x.shape[-1],), n.weight, 1e-6) + 0.01 * n.weight)
        ),
        "q_lora.interrupted",
    ),
    "stat_of_576": (dict(latent=stat_of_576), "kv_latent.absent"),
}
misses("norm", MISSES)


@miss("norm.absent", tags="norm")
class TokensFlippedBeforeNorm(Base):
    def down(self, x: Tensor) -> Tensor:
        return super().down(x).flip(0)


@miss("q_lora.interrupted", tags="norm")
class NormedTwice(Base):
    def down(self, x: Tensor) -> Tensor:
        return self.q_a_layernorm(self.q_a_proj(x))


@miss("step.random", tags="norm")
class NoiseOnTheLatent(Base):
    def down(self, x: Tensor) -> Tensor:
        rows = self.q_a_proj(x)
        return rows + torch.randn_like(rows) * 0.01
