"""A paged cache between its two memory layouts. Its declared shape is ``[BlockNum, BlockSize, 1,
W]`` in both.

In FRACTAL_NZ the memory of a block is ``[W/C0, BlockSize, C0]``, C0 being 32 bytes
(`service_scatter_cache_arch22.h`): 16 elements of bfloat16, 32 of int8.
"""

from __future__ import annotations

from torch import Tensor

from mla_fusion.paging.ragged import refuse

_FRACTAL_BYTES = 32


def nd_to_nz(cache: Tensor) -> Tensor:
    """A copy of a PA_BSND cache as the PA_NZ cache of the same rows."""
    block_num, block_size, c1, c0 = _fractal(cache)
    return _turned(cache, block_num, block_size, c1, c0)


def nz_to_nd(cache: Tensor) -> Tensor:
    """A copy of a PA_NZ cache as the PA_BSND cache of the same rows."""
    block_num, block_size, c1, c0 = _fractal(cache)
    return _turned(cache, block_num, c1, block_size, c0)


def _turned(cache: Tensor, *sizes: int) -> Tensor:
    return cache.reshape(sizes).transpose(1, 2).reshape(cache.shape).contiguous()


def _fractal(cache: Tensor) -> tuple[int, int, int, int]:
    if cache.dim() != 4 or cache.shape[2] != 1:
        refuse("cache", "[BlockNum, BlockSize, 1, W]", list(cache.shape))
    block_num, block_size, _, width = cache.shape
    c0 = _FRACTAL_BYTES // cache.element_size()
    if width % c0:
        refuse("cache", f"a width that is a multiple of {c0} ({cache.dtype})", width)
    return block_num, block_size, width // c0, c0
