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


# -- mistakes


def without_gamma(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, eps)


def sum_not_mean(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def mean_over_tokens(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + eps)).to(x.dtype)


def mean_over_half(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    half = wide[..., : x.shape[-1] // 2]
    return gamma * (wide * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def mean_without_last_column(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide[..., :-1].pow(2).mean(-1, keepdim=True) + eps)).to(
        x.dtype
    )


def epsilon_outside_the_root(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps**0.5)).to(x.dtype)


def epsilon_added_after(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) + 0.05)).to(
        x.dtype
    )


def epsilon_as_floor(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).clamp(min=eps))).to(
        x.dtype
    )


def unit_length(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return F.normalize(x.float(), dim=-1, eps=eps).to(x.dtype) * gamma * x.shape[-1] ** 0.5


def layer_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), gamma, None, eps)


def mean_of_absolutes(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide / (wide.abs().mean(-1, keepdim=True) + eps)).to(x.dtype)


def root_missing(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return gamma * (wide / (wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gamma_squared(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps) * gamma


def gamma_reversed(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma.flip(0), eps)


def gamma_added(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return without_gamma(x, gamma, eps) + gamma


def gamma_before_the_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return without_gamma(x * gamma, gamma, eps)


def shifted(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps) + 0.1


def absolute(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps).abs()


def clamped(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps).clamp(-1, 1)


def tripled(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps) * 3


def negated(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return -cast_before_gamma(x, gamma, eps)


def other_epsilon(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_after_gamma(x, gamma, 100 * eps)


def no_epsilon(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_after_gamma(x, gamma, 0.0)


def twice(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(cast_before_gamma(x, gamma, eps), gamma, eps)


def scale_of_first_token(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gamma * (wide * root[:1]).to(x.dtype)


def rounded_to_float8(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps).to(torch.float8_e4m3fn).to(x.dtype)


def all_bfloat16(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def columns_rolled(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps).roll(1, -1)


def tokens_rolled(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return cast_before_gamma(x, gamma, eps).roll(1, 0)


def groups(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Normalised in two groups of columns."""
    wide = x.float().unflatten(-1, (2, -1))
    return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2).to(
        x.dtype
    )


WRONG_NORMS = {
    f.__name__: f
    for f in (
        without_gamma,
        sum_not_mean,
        mean_over_tokens,
        mean_over_half,
        mean_without_last_column,
        epsilon_outside_the_root,
        epsilon_added_after,
        epsilon_as_floor,
        unit_length,
        layer_norm,
        mean_of_absolutes,
        root_missing,
        gamma_squared,
        gamma_reversed,
        gamma_added,
        gamma_before_the_norm,
        shifted,
        absolute,
        clamped,
        tripled,
        negated,
        other_epsilon,
        no_epsilon,
        twice,
        scale_of_first_token,
        rounded_to_float8,
        all_bfloat16,
        columns_rolled,
        tokens_rolled,
        groups,
    )
}
