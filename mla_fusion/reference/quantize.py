"""Integer quantisation as the vector units do it: scales, casts and their rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# 128 * 128 * 1024 == 2**24: a float32 sum of at most 1024 int8 products is exact.
_EXACT_K = 1024


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``int8[m, k] @ int8[k, n]`` as int32, exact, by float32 products over short slices
    of k.
    """
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    for a_slice, b_slice in zip(a.split(_EXACT_K, 1), b.split(_EXACT_K, 0), strict=True):
        total += (a_slice.float() @ b_slice.float()).to(torch.int32)
    return total


def to_int8(x: Tensor) -> Tensor:
    """Returns fp32 -> int32 (half to even) -> half -> int8 with saturation; NaN (an all-zero row)
    becomes 0.

    A5 goes fp32 -> half (to odd) -> int8 (half to even) instead, which gives the same: half has
    four bits or more below the unit up to 128, and rounding to odd keeps in the last of them
    whether anything was lost.
    """
    return x.nan_to_num(nan=0.0).round().clamp(-128, 127).to(torch.int8)


def to_int8_through_half(x: Tensor) -> Tensor:
    """Returns fp32 -> half -> int8 (half away from zero): the query is rounded twice."""
    half = x.to(torch.float16).float().nan_to_num(nan=0.0)
    return (half.sign() * (half.abs() + 0.5).floor()).clamp(-128, 127).to(torch.int8)


def peak(x: Tensor) -> Tensor:
    """Returns ``max|x|`` over the last axis, which then has size 1."""
    return x.abs().amax(-1, keepdim=True)


def per_tile(x: Tensor, alpha: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Returns each tile clipped to ``alpha * max|tile|`` and quantised: ``(int8 [T, n], fp32 scale
    [T, n/tile])``.

    ``lim = m*alpha; scale = lim*(1/127); q = rint(clip(x, -lim, lim) * (1/scale))``
    (`mla_prolog_vector_comm_arch22.h`); the device has no floor under m, so an all-zero tile
    quantises to 0.
    """
    tiles = x.unflatten(-1, (-1, tile))
    limit = peak(tiles) * alpha.to(x.dtype).reshape(1)
    scale = limit * (1.0 / 127.0)
    quantised = to_int8(tiles.clamp(-limit, limit) * (1.0 / scale))
    return quantised.flatten(-2), scale.squeeze(-1).float()


def tile_row(ckv: Tensor, kr: Tensor, scale: Tensor) -> Tensor:
    """Returns a per-tile cache row as bytes: ``int8 ckv | rope half in its 16-bit form | fp32
    scales``.
    """
    # clone, not contiguous(): an empty tensor passes for contiguous whatever its last stride
    parts = (part.clone(memory_format=torch.contiguous_format) for part in (ckv, kr, scale))
    return torch.cat([part.view(torch.int8) for part in parts], -1)
