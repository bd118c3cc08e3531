"""CPU kernels of the NPU norm and rotary operators of unfused MLA graphs.

They compute in float32 and cast once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.reference.numerics import interleave_rope, working_dtype


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Returns ``(input * rstd * gamma, rstd)`` over gamma's trailing axes. rstd is float32, and has
    these axes with size 1.
    """
    work = working_dtype(input.dtype)
    axes = tuple(range(input.dim() - gamma.dim(), input.dim()))
    x = input.to(work)
    rstd = torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)
    return (x * rstd * gamma.to(work)).to(input.dtype), rstd.float()


def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``(RMSNorm(x1 + x2), rstd, x1 + x2)``. The sum is rounded to the input dtype before
    the norm.
    """
    total = x1 + x2
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns ``x [B, N, S, D]`` rotated, from interleaved pairs to halves. ``cos`` and ``sin`` are
    ``[B, 1, S or 1, D]``.

    The result has x's strides, as torch_npu's Meta kernel says.
    """
    return torch.empty_like(x).copy_(interleave_rope(x, cos, sin, x.dtype))


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Returns ``input*r1 + rotated(input)*r2``. "half" rotates halves, "interleave" pairs;
    ``rotate`` is a matrix that rotates instead.
    """
    work = working_dtype(input.dtype)
    x = input.to(work)
    if rotate is not None:
        rotated = x @ rotate.to(work)
    elif rotary_mode == "half":
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    elif rotary_mode == "interleave":
        rotated = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        raise ValueError(
            f"npu_rotary_mul: rotary_mode is 'half' or 'interleave', not {rotary_mode!r}"
        )
    return (x * r1.to(work) + rotated * r2.to(work)).to(input.dtype)
