"""RMSNorm with its weight, as models write it: ``norm(x, gamma, eps)``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

npu = torch.ops.npu


def cast_before_gamma(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def cast_after_gamma(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(torch.mean(wide * wide, -1, True) + eps) * gamma).to(x.dtype)


def functional(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), gamma, eps)


def functional_wide(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), gamma.float(), eps).to(x.dtype)


def functional_then_gamma(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, eps) * gamma


def root_and_division(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (gamma.float() * (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps))).to(
        x.dtype
    )


def sum_over_width(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide / ((wide**2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()).to(x.dtype) * gamma


def reciprocal_root(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    root = torch.add(torch.mean(torch.square(wide), dim=-1), eps).sqrt().reciprocal()
    return (wide * root.unsqueeze(-1)).to(x.dtype) * gamma


def power(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (gamma * (wide * (wide.square().mean(-1, True) + eps).pow(-0.5))).to(x.dtype)


def vector_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide * torch.rsqrt(size * size / x.shape[-1] + eps)).to(x.dtype) * gamma


def norm_over_root_of_width(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    rms = wide.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
    return (wide * torch.rsqrt(rms.pow(2) + eps) * gamma.float()).to(x.dtype)


def variance_and_mean(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    variance, mean = torch.var_mean(wide, -1, unbiased=False, keepdim=True)
    return (wide * torch.rsqrt(variance + mean * mean + eps) * gamma).to(x.dtype)


def gamma_into_the_root(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (gamma.float() * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(
        x.dtype
    )


def scaled_first(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Divided by the root of the width before squaring, and the width taken into the epsilon."""
    wide = x.float()
    n = x.shape[-1]
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + n * eps) * n**0.5).to(
        x.dtype
    ) * gamma


def add_in_one(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    square = torch.addcmul(wide.new_zeros(1), wide, wide)
    return torch.mul(wide.div(square.mean(-1, keepdim=True).add(eps).sqrt()).type_as(x), gamma)


def npu_rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return npu.npu_rms_norm(x, gamma, eps)[0]


def npu_add_rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return npu.npu_add_rms_norm(x, torch.zeros_like(x), gamma, eps)[0]


def through_rows(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x.reshape(-1, x.shape[-1]), gamma, eps).view(x.shape)


NORMS = {
    f.__name__: f
    for f in (
        cast_before_gamma,
        cast_after_gamma,
        functional,
        functional_wide,
        functional_then_gamma,
        root_and_division,
        sum_over_width,
        reciprocal_root,
        power,
        vector_norm,
        norm_over_root_of_width,
        variance_and_mean,
        gamma_into_the_root,
        scaled_first,
        add_in_one,
        npu_rms_norm,
        npu_add_rms_norm,
        through_rows,
    )
}
