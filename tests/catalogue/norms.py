"""The norms in other words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, Base, HfNorm, npu, paged_args, wide
from .entry import IN_PLACE, OURS, Entry, add, based, entry, miss, step, words


class NpuAddRmsNorm(HfNorm):
    """omni-infer: add_rms_norm with a residual of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return npu.npu_add_rms_norm(x, torch.zeros_like(x), self.weight, self.eps)[0]


@entry(IN_PLACE, source="omni-infer", tags="norm, operators, device, symbolic")
class ZeroResidual(Base):
    norm = NpuAddRmsNorm


class PowerNorm(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        return (
            self.weight * (wide * (torch.mean(wide.square(), -1, True) + self.eps).pow(-0.5))
        ).to(x.dtype)


@entry(IN_PLACE, source=OURS, tags="norm, device")
class Power(Base):
    norm = PowerNorm


class NormByVector(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * torch.rsqrt(size * size / x.shape[-1] + self.eps)).to(x.dtype) * self.weight


@entry(IN_PLACE, source=OURS, tags="norm, device")
class VectorNorm(Base):
    norm = NormByVector


class OnePlusGammaNorm(HfNorm):
    """GemmaRMSNorm: the parameter is gamma - 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight + 1, self.eps)


@entry(IN_PLACE, source="Gemma", tags="norm, device")
class OnePlusGamma(Base):
    norm = OnePlusGammaNorm


# -- forward(x) of HfNorm


def norm(body: Callable[[Any, Tensor], Tensor], eps: float = 1e-6) -> type[HfNorm]:
    def __init__(self: Any, width: int) -> None:
        HfNorm.__init__(self, width, eps)

    return type("Norm", (HfNorm,), {"forward": body, "__init__": __init__})


def by_scale(scale: Callable[[Any, Tensor], Tensor], eps: float = 1e-6) -> type[HfNorm]:
    """x * scale(x) * gamma."""
    return norm(lambda self, x: (wide(x) * scale(self, wide(x))).to(x.dtype) * self.weight, eps)


def zero_rows() -> tuple[Tensor, ...]:
    x, *rest = paged_args(8)
    x[3:5] = 0
    return x, *rest


NORMS = {
    "NormByDots": by_scale(
        lambda n, x: torch.rsqrt(torch.einsum("td,td->t", x, x)[:, None] / x.shape[1] + n.eps)
    ),
    "NormWithoutKeepdim": by_scale(
        lambda n, x: torch.rsqrt(x.pow(2).mean(-1) + n.eps).unsqueeze(-1)
    ),
    "NormByOnes": by_scale(
        lambda n, x: torch.rsqrt(x**2 @ x.new_full((x.shape[1], 1), 1 / x.shape[1]) + n.eps)
    ),
    "NormByVariance": by_scale(
        lambda n, x: torch.rsqrt(
            x.var(-1, unbiased=False, keepdim=True) + x.mean(-1, True) ** 2 + n.eps
        )
    ),
    "NormOfLargeEps": by_scale(lambda n, x: torch.rsqrt(x.pow(2).mean(-1, True) + n.eps), 0.5),
    "EpsOfTensor": by_scale(
        lambda n, x: torch.rsqrt(x.pow(2).mean(-1, True) + torch.tensor(n.eps)), 1e-5
    ),
    "NormOverRootOfSize": by_scale(
        lambda n, x: torch.rsqrt(
            (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5).square() + n.eps
        )
    ),
    "NormsOfChunks": by_scale(
        lambda n, x: torch.rsqrt(
            torch.stack([part.norm(dim=-1) for part in x.chunk(4, -1)], -1).square().sum(-1, True)
            / x.shape[-1]
            + n.eps
        )
    ),
    "NormByEinsum": by_scale(
        lambda n, x: torch.rsqrt(
            torch.einsum("...c,...c->...", x, x).unsqueeze(-1) / x.shape[-1] + n.eps
        )
    ),
    "NormOfTensorSize": by_scale(
        lambda n, x: (
            torch.tensor(float(x.shape[-1])).sqrt()
            * torch.rsqrt(x.square().sum(-1, True) + n.eps * x.shape[-1])
        )
    ),
    "NormOfAMillion": by_scale(lambda n, x: 1e3 * torch.rsqrt(1e6 * x.pow(2).mean(-1, True) + 1)),
    "MeanTimesRoot": by_scale(
        lambda n, x: (lambda mean: 1 / (mean * torch.rsqrt(mean)))(x.pow(2).mean(-1, True) + n.eps)
    ),
    "RootOfSpreadMean": by_scale(
        lambda n, x: torch.rsqrt((x.pow(2).mean(-1, True) + n.eps).expand_as(x))
    ),
    "NormOfThousandths": norm(lambda n, x: HfNorm.forward(n, x * 1e-3)),  # an epsilon of 1
    "Normalize": norm(
        lambda n, x: (F.normalize(wide(x), dim=-1) * math.sqrt(x.shape[-1])).to(x.dtype) * n.weight
    ),
}


for name, kind in NORMS.items():
    tags = words("norm, device, symbolic" if name == "NormByDots" else "norm")
    model = based(name, norm=kind)
    add(Entry(name=name, model=model, args=zero_rows, outcome=(IN_PLACE,), source=OURS, tags=tags))


@step("down", IN_PLACE, tags="norm")
def columns_flipped(self: Base, x: Tensor) -> Tensor:
    return Base.down(self, x).flip(-1)


@step("down", IN_PLACE, tags="norm")
def columns_rolled(self: Base, x: Tensor) -> Tensor:
    return Base.down(self, x).roll(3, -1)


@step("down", IN_PLACE, tags="norm")
def columns_joined(self: Base, x: Tensor) -> Tensor:
    c_q = Base.down(self, x)
    return torch.cat([c_q[..., 700:], c_q[..., :700]], -1)


@step("down", IN_PLACE, tags="norm")
def columns_indexed(self: Base, x: Tensor) -> Tensor:
    return Base.down(self, x)[..., torch.arange(1535, -1, -1)]


@entry(IN_PLACE, source=OURS, tags="norm")
class NormWeightsOfOneVector(Base):
    """The weights of both norms lie in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.q_a_layernorm.weight, self.kv_a_layernorm.weight
        self.gammas = nn.Parameter((1 + 0.1 * torch.randn(HCQ + HCKV)).bfloat16())

    def parts(self) -> tuple[Tensor, Tensor]:
        of_q, of_kv = self.gammas.split([HCQ, HCKV])
        return of_q, of_kv

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.q_a_layernorm.weight, self.kv_a_layernorm.weight = self.parts()
        result = super().forward(*args)
        del self.q_a_layernorm.weight, self.kv_a_layernorm.weight
        return result


@entry(IN_PLACE, source=OURS, tags="norm")
class OverlappingNormWeights(NormWeightsOfOneVector):
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.gammas[:HCQ], self.gammas[7 : 7 + HCKV]


@entry(IN_PLACE, source=OURS, tags="norm")
class EveryThirdNormWeight(NormWeightsOfOneVector):
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.gammas[:HCQ], self.gammas[:HCQ:3]


@miss("norm.gamma_absent", tags="norm", of="NormWeightsOfOneVector")
class OneNormWeightForAll(NormWeightsOfOneVector):
    """Near miss: one number of the part weighs the whole row."""

    def parts(self) -> tuple[Tensor, Tensor]:
        return self.gammas[:HCQ], self.gammas[HCQ : HCQ + 1]


# -- a root of a square has either sign


class RootCancelled(Base):
    """The latent, times a root of its row and through it."""

    def of(self, c_kv: Tensor) -> Tensor:
        root = torch.sqrt(c_kv[..., :1].square() + 1)
        return c_kv * root / root

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        return self.kv_a_layernorm(self.of(wide(c_kv)).to(c_kv.dtype)), k_pe


entry(IN_PLACE, source=OURS, tags="norm")(RootCancelled)


@miss("kv_latent.absent", tags="norm")
class RowsTurnedOver(RootCancelled):
    """The latent, turned over in some rows."""

    def of(self, c_kv: Tensor) -> Tensor:
        one = c_kv[..., :1]
        return c_kv * torch.sqrt(one.square()) / one
