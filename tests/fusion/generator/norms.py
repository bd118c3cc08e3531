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


def root_and_division(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (gamma.float() * (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps))).to(
        x.dtype
    )


def power(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (gamma * (wide * (wide.square().mean(-1, True) + eps).pow(-0.5))).to(x.dtype)


def vector_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide * torch.rsqrt(size * size / x.shape[-1] + eps)).to(x.dtype) * gamma


def variance_and_mean(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    variance, mean = torch.var_mean(wide, -1, unbiased=False, keepdim=True)
    return (wide * torch.rsqrt(variance + mean * mean + eps) * gamma).to(x.dtype)


def scaled_first(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Divided by the root of the width before squaring, and the width taken into the epsilon."""
    wide = x.float()
    n = x.shape[-1]
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + n * eps) * n**0.5).to(
        x.dtype
    ) * gamma


def npu_rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return npu.npu_rms_norm(x, gamma, eps)[0]


NORMS = {
    f.__name__: f
    for f in (
        cast_before_gamma,
        cast_after_gamma,
        functional,
        root_and_division,
        power,
        vector_norm,
        variance_and_mean,
        scaled_first,
        npu_rms_norm,
    )
}
