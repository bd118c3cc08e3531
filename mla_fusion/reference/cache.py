"""Writes rows into a KV cache, at the places that each of the six cache modes names.

Source of the arithmetic: `service_scatter_cache_arch22.h`. Rows are ``[T, W]``; a paged cache is
declared ``[BlockNum, BlockSize, 1, W]`` in every mode, also where the memory behind it is
FRACTAL_NZ. A slot is a row number: ``block * BlockSize + offset``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.meta import ContractError
from mla_fusion.meta.layout import shares_memory, writable

_BEYOND = 1 << 31  # no cache has that many blocks, and no slot computed from it overflows


def block_slots(
    block_ids: Tensor, lead: torch.Size, actual_seq_len: Tensor | None, block_size: int
) -> Tensor:
    """Returns the slot of every token, for a cache_index that lists blocks.

    Each batch starts at offset 0 of its first block. A negative block gives negative slots.

    lead            ``[B, S]``, or ``[T]`` with ``actual_seq_len``
    actual_seq_len  the inclusive prefix sums of the lengths of the batches. Tokens behind the last
                    prefix belong to the last batch, as on the device
    """
    ids = block_ids.reshape(-1).clamp(-1, _BEYOND)
    if actual_seq_len is None:
        lengths = torch.full((lead[0],), lead[1])
    else:
        prefix_sums = actual_seq_len.long()
        lengths = prefix_sums.diff(prepend=prefix_sums.new_zeros(1))
    ends, token = lengths.cumsum(0), torch.arange(lead.numel())
    batch = torch.searchsorted(ends, token, right=True).clamp(max=max(len(ends) - 1, 0))
    blocks = (lengths + block_size - 1) // block_size
    first_block = (blocks.cumsum(0) - blocks)[batch]
    position = token - (ends - lengths)[batch]
    return ids[first_block + position // block_size] * block_size + position % block_size


def write(
    cache: Tensor,
    rows: Tensor,
    cache_mode: str,
    lead: torch.Size,
    cache_index: Tensor | None,
    actual_seq_len: Tensor | None,
    argument: str,
) -> None:
    """Writes the new rows of a cache, in place, unless the cache is empty (per-tile kr_cache,
    BlockNum 0).

    Without a cache_index the rows fill the cache. A negative slot skips its row. If several rows
    have the same slot, the last row wins. In an NZ mode the memory is ``[BlockNum, W/C0, BlockSize,
    C0]``, C0 being 32 bytes: element ``block*stride0 + (j/C0)*(BlockSize*C0) + offset*C0 + j%C0``.

    Raises ContractError ``values.cache_index.range`` for a slot past the cache, which the device
    writes unchecked.
    """
    if cache.numel() == 0 or rows.numel() == 0:
        return
    is_nz = cache_mode.endswith("NZ")
    _check_layout(cache, is_nz, argument)
    if cache_index is None:
        cache.copy_(rows.view(cache.shape))
        return
    block_num, block_size, _, width = cache.shape
    if "BLK" in cache_mode:
        slots = block_slots(cache_index, lead, actual_seq_len, block_size)
    else:
        slots = cache_index.reshape(-1)
    last_block = int(slots.max()) // block_size
    if last_block >= block_num:
        raise ContractError(
            "values.cache_index.range",
            "cache_index",
            f"blocks below BlockNum {block_num} ({argument} {list(cache.shape)})",
            f"block {last_block}",
            {"BlockNum": block_num, "BlockSize": block_size},
            "service_scatter_cache: the device does not check the slot",
        )
    ordered, position = torch.sort(slots, stable=True)
    is_written = ordered >= 0
    is_written[:-1] &= ordered[:-1] != ordered[1:]  # the last of equal slots
    slots, rows = ordered[is_written], rows[position[is_written]]
    block, offset = slots // block_size, slots % block_size
    if not is_nz:
        cache[block, offset, 0] = rows
        return
    c0 = 32 // cache.element_size()
    if width % c0:
        expected = f"a row width that is a multiple of {c0} (FRACTAL_NZ)"
        raise ContractError(f"shape.{argument}", argument, expected, str(width))
    fractal = cache.view(block_num, width // c0, block_size, c0)
    fractal[block, :, offset] = rows.unflatten(-1, (width // c0, c0))


def _check_layout(cache: Tensor, is_nz: bool, argument: str) -> None:
    """Raises ContractError for a cache that shares memory with itself, or whose blocks are no
    FRACTAL_NZ memory.
    """
    if is_nz and not writable(cache, first_axis_free=True, ones_free=True):
        expected = "contiguous axes, the first excepted"
    elif shares_memory(cache):
        expected = "memory of its own for every row"
    else:
        return
    found = f"{list(cache.shape)} with strides {list(cache.stride())}"
    raise ContractError(f"contiguous.{argument}", argument, expected, found)
