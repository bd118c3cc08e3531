"""Arithmetic of all steps: where the kernel rounds, and in which precision it computes.

The Ascend kernel accumulates in float32 and rounds to bfloat16 after every matmul, norm and
rotation (`service_matmul_arch22.h`, `rms_norm.h`, `service_rope_arch22.h`). ``activation`` below is
the dtype those roundings go to: bfloat16 as on the device. Called with float32 or float64 tensors
the same steps run without any bfloat16 rounding, which is what verifying a fusion needs; the NPU
itself takes bfloat16 only.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

FLT_EPS = 1.1920928955078125e-07

# OpenBLAS, with which builds of torch for other processors multiply bfloat16, rounds the sum of
# every 512 products.
_ROUNDS_PARTIAL_SUMS = platform.machine() not in ("x86_64", "AMD64")


def working_dtype(activation: torch.dtype) -> torch.dtype:
    """Returns the dtype of vector arithmetic: float32, or float64 if the activations are."""
    return torch.float64 if activation == torch.float64 else torch.float32


def rows_of_nz(storage: Tensor) -> Tensor:
    """Returns rows ``[.., rows, W]`` from FRACTAL_NZ storage ``[.., W/C0, rows, C0]``."""
    return storage.transpose(-3, -2).flatten(-2)


def nz_weight_to_nd(weight: Tensor) -> Tensor:
    """Returns ``[k, n]`` from FRACTAL_NZ storage ``[n/C0, k/16, 16, C0]``, or a 2-D weight as it
    is.

    `CheckShape` in `mla_prolog_tiling_check.cpp` accepts both for weight_dq, weight_uq_qr and
    weight_dkv_kr.
    """
    return weight if weight.dim() == 2 else rows_of_nz(weight.flatten(1, 2))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a @ b``, accumulated wide and rounded once (fixpipe F322BF16)."""
    if _ROUNDS_PARTIAL_SUMS and a.dtype in (torch.bfloat16, torch.float16):
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    return torch.matmul(a, b)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, scale: float = 1.0) -> Tensor:
    """Returns ``x / sqrt(sum(x^2) * (1/n) + eps) * gamma [* scale]`` in the working dtype,
    unrounded.

    `rms_norm.h`: a true division by the root, 1/n as a constant, and the scale multiplied last and
    only when ``abs(scale - 1) >= FLT_EPSILON``. The caller casts or quantises the result.
    """
    work = working_dtype(gamma.dtype)
    x = x.to(work)
    mean_square = x.square().sum(-1, keepdim=True) * (1.0 / x.shape[-1])
    normed = (x / (mean_square + epsilon).sqrt()) * gamma.to(work)
    return normed * scale if abs(scale - 1.0) >= FLT_EPS else normed


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor, activation: torch.dtype) -> Tensor:
    """Returns x rotated, from interleaved pairs to halves. The halves of cos and sin may differ.

    ``y[:h] = x[0::2]*cos[:h] - x[1::2]*sin[:h]``, ``y[h:] = x[1::2]*cos[h:] + x[0::2]*sin[h:]``
    (`service_rope_arch22.h`), in the working dtype, rounded once to ``activation``.
    """
    work = working_dtype(activation)
    even, odd = x[..., 0::2].to(work), x[..., 1::2].to(work)
    cos_first, cos_second = cos.to(work).chunk(2, -1)
    sin_first, sin_second = sin.to(work).chunk(2, -1)
    first = even * cos_first - odd * sin_first
    second = odd * cos_second + even * sin_second
    return torch.cat((first, second), -1).to(activation)
