"""Converts a paged cache between its two memory layouts.

Its shape is ``[BlockNum, BlockSize, 1, W]`` in both. In FRACTAL_NZ the memory of a block is
``[W/C0, BlockSize, C0]``. C0 elements are 32 bytes (`service_scatter_cache_arch22.h`): 16 elements
of bfloat16, 32 of int8.
"""

from __future__ import annotations

from torch import Tensor

from mla_fusion.paging.ragged import refuse

_FRACTAL_BYTES = 32


def nd_to_nz(cache: Tensor) -> Tensor:
    """Returns a copy of a PA_BSND cache as the PA_NZ cache of the same rows."""
    return _swap_axes(cache, *_sizes(cache))


def nz_to_nd(cache: Tensor) -> Tensor:
    """Returns a copy of a PA_NZ cache as the PA_BSND cache of the same rows."""
    block_size, pieces, c0 = _sizes(cache)
    return _swap_axes(cache, pieces, block_size, c0)


def _swap_axes(cache: Tensor, *block_shape: int) -> Tensor:
    return cache.reshape(len(cache), *block_shape).transpose(1, 2).reshape(cache.shape).contiguous()


def _sizes(cache: Tensor) -> tuple[int, int, int]:
    """Returns the rows of a block, the pieces of a row and the elements of a piece."""
    if cache.dim() != 4 or cache.shape[2] != 1:
        refuse("cache", "[BlockNum, BlockSize, 1, W]", list(cache.shape))
    width = cache.shape[3]
    c0 = _FRACTAL_BYTES // cache.element_size()
    if width % c0:
        refuse("cache", f"a width that is a multiple of {c0} ({cache.dtype})", width)
    return cache.shape[1], width // c0, c0
