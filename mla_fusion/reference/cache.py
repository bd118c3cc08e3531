"""Where each token's row goes in the KV cache, for the six cache modes, and the write itself.

Source of the arithmetic: `service_scatter_cache_arch22.h`. Rows are ``[T, W]``; a paged cache is
declared ``[BlockNum, BlockSize, 1, W]`` in every mode, also where the memory behind it is
FRACTAL_NZ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.meta import ContractError
from mla_fusion.meta.layout import shares_memory, writable


def token_slots(index: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """``(block, offset)`` of every token from its slot; a negative slot gives a negative block."""
    slot = index.reshape(-1)
    return slot // block_size, slot % block_size


def block_slots(
    block_ids: Tensor, lead: torch.Size, actual_seq_len: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """``(block, offset)`` of every token where cache_index lists blocks; each batch starts at
    offset 0.

    ``lead`` is ``[B, S]``, or ``[T]`` with ``actual_seq_len`` the inclusive prefix sums of the
    sequence lengths. Tokens behind the last prefix belong to the last batch, as on the device.
    """
    ids = block_ids.reshape(-1)
    if len(lead) == 2:
        batch = torch.arange(lead[0]).repeat_interleave(lead[1])
        position = torch.arange(lead[1]).repeat(lead[0])
        first_block = batch * -(-lead[1] // block_size)
    else:
        assert actual_seq_len is not None
        ends = actual_seq_len.to(torch.int64)
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        token = torch.arange(lead[0])
        batch = torch.searchsorted(ends, token, right=True).clamp(max=max(len(ends) - 1, 0))
        blocks = (ends - starts + block_size - 1) // block_size
        position = token - starts[batch]
        first_block = (blocks.cumsum(0) - blocks)[batch]
    return ids[first_block + position // block_size], position % block_size


def write_paged(
    cache: Tensor, block: Tensor, offset: Tensor, rows: Tensor, *, nz: bool, argument: str
) -> None:
    """Put ``rows[t]`` at ``(block[t], offset[t])``; negative blocks are skipped, duplicates: the
    last wins.

    With ``nz`` the memory is ``[BlockNum, W/C0, BlockSize, C0]``, C0 being 32 bytes:
    element ``block*stride0 + (j/C0)*(BlockSize*C0) + offset*C0 + j%C0``.

    Raises ContractError ``values.cache_index.range`` for a slot past the cache, which the device
    writes unchecked.
    """
    block_num, block_size, _, width = cache.shape
    if block_num == 0 or block.numel() == 0:
        return
    _check_layout(cache, nz, argument)
    highest = int(block.max())
    if highest >= block_num:
        raise ContractError(
            "values.cache_index.range",
            "cache_index",
            f"blocks below BlockNum {block_num} ({argument} {list(cache.shape)})",
            f"block {highest}",
            {"BlockNum": block_num, "BlockSize": block_size},
            "service_scatter_cache: the device does not check the slot",
        )
    slot = torch.where(block < 0, block.new_full((), -1), block * block_size + offset)
    ordered, position = torch.sort(slot, stable=True)
    keep = ordered >= 0
    keep[:-1] &= ordered[:-1] != ordered[1:]  # of equal slots the last one
    block, offset, rows = (one[position[keep]] for one in (block, offset, rows))
    if nz:
        c0 = 32 // cache.element_size()
        if width % c0:
            raise ContractError(
                f"shape.{argument}",
                argument,
                f"a row width that is a multiple of {c0} (FRACTAL_NZ)",
                str(width),
            )
        fractal = cache.view(block_num, width // c0, block_size, c0)
        fractal[block, :, offset] = rows.unflatten(-1, (width // c0, c0))
    else:
        cache[block, offset, 0] = rows


def _check_layout(cache: Tensor, nz: bool, argument: str) -> None:
    """ContractError for a cache that shares memory with itself, or whose blocks are no FRACTAL_NZ
    memory.
    """
    if shares_memory(cache) or (nz and not writable(cache, first_axis_free=True, ones_free=True)):
        expected = (
            "contiguous axes, the first excepted" if nz else "memory of its own for every row"
        )
        found = f"{list(cache.shape)} with strides {list(cache.stride())}"
        raise ContractError(f"contiguous.{argument}", argument, expected, found)


def write(
    cache: Tensor,
    rows: Tensor,
    cache_mode: str,
    lead: torch.Size,
    cache_index: Tensor | None,
    actual_seq_len: Tensor | None,
    argument: str,
) -> None:
    """Write the new rows of one cache, in place; an empty cache (per-tile kr_cache, BlockNum 0) is
    left alone.
    """
    if cache.numel() == 0 or rows.numel() == 0:
        return
    if cache_mode in ("BSND", "TND"):
        _check_layout(cache, False, argument)
        cache.copy_(rows.view(cache.shape))
        return
    assert cache_index is not None
    if cache_mode in ("PA_BSND", "PA_NZ"):
        block, offset = token_slots(cache_index, cache.shape[1])
    else:
        block, offset = block_slots(cache_index, lead, actual_seq_len, cache.shape[1])
    write_paged(cache, block, offset, rows, nz=cache_mode.endswith("NZ"), argument=argument)
