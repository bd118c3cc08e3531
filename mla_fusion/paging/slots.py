"""Makes ``cache_index`` from vLLM slot mappings and PPL cache starts, which name the row of every
token.
"""

from __future__ import annotations

from torch import Tensor

from mla_fusion.paging.ragged import (
    integers,
    padded,
    positions,
    positive_size,
    prefix_sums,
    refuse,
    require,
    same_length,
    starts_of,
)
from mla_fusion.paging.table import BlockIndex, PageTable


def slots_from_mapping(
    slot_mapping: Tensor, *, rows: int | None = None, pad_to: int | None = None, check: bool = True
) -> Tensor:
    """Returns vLLM's ``slot_mapping`` [T] as ``cache_index`` int64: the same numbers. Both skip -1.

    A slot other than -1 may occur once.

    rows  BlockNum*BlockSize: the device does not check a slot past it, and writes out of bounds
    """
    slots = integers("slot_mapping", slot_mapping)
    if check:
        require("slot_mapping", slots >= -1, "slots of at least -1", slots)
        written = slots[slots >= 0]
        if rows is not None:
            require("slot_mapping", written < rows, f"slots below {rows}", written)
        ordered = written.sort().values
        require("slot_mapping", ordered.diff() != 0, "every slot at most once", ordered[1:])
    return padded(slots, pad_to)


def slots_from_ppl(
    cachestarts: Tensor,
    start_pos: Tensor,
    seqstarts: Tensor,
    *,
    cache_mode: int,
    kvstarts: Tensor | None = None,
    pad_to: int | None = None,
    check: bool = True,
) -> Tensor:
    """Returns ``cache_index`` [T] int64 from PPL's MultiHeadCacheAttention indexing, T =
    seqstarts[B].

    Token j of batch b is at position ``start_pos[b] + j``. Offset mode (``cache_mode`` 0,
    cachestarts [B]): row ``cachestarts[b] + position``. Table mode (1, cachestarts [kvstarts[B]]):
    row ``cachestarts[kvstarts[b] + position]``. PPL's MaxT is the BlockNum*BlockSize of the Ascend
    cache.
    """
    base, past = integers("cachestarts", cachestarts), integers("start_pos", start_pos)
    starts = integers("seqstarts", seqstarts)
    if cache_mode not in (0, 1):
        refuse("cache_mode", "0 (offset) or 1 (table)", repr(cache_mode))
    same_length("seqstarts", starts, len(past) + 1, "one more than start_pos")
    if check:
        prefix_sums("seqstarts", starts, int(starts[-1]))
        require("start_pos", past >= 0, "at least 0", past)
    new = starts.diff()
    sequence, position = positions(new)
    position = position + past[sequence]
    if cache_mode == 0:
        same_length("cachestarts", base, len(past), "one a batch in offset mode")
        slots = base[sequence] + position
    else:
        if kvstarts is None:
            refuse("kvstarts", "a tensor in table mode", "nothing")
        kv = integers("kvstarts", kvstarts)
        same_length("kvstarts", kv, len(past) + 1, "one more than start_pos")
        if check:
            prefix_sums("kvstarts", kv, len(base))
            expected = "positions inside kvstarts[b + 1] - kvstarts[b]"
            require("start_pos", past + new <= kv.diff(), expected, past)
        slots = base[kv[sequence] + position]
    if check:
        require("cachestarts", slots >= 0, "rows of at least 0", slots)
    return padded(slots, pad_to)


def blocks_from_slots(slots: Tensor, new_tokens: Tensor, block_size: int) -> BlockIndex:
    """Returns the block-wise index that writes the same rows as token-wise ``slots`` [T].

    Raises ContractError ``paging.slots`` unless the tokens of each sequence fill blocks in order
    from offset 0.

    new_tokens  [B], the number of slots of each sequence
    """
    positive_size("block_size", block_size)
    slots, new = integers("slots", slots), integers("new_tokens", new_tokens)
    total = int(new.sum())
    if total != len(slots):
        refuse("new_tokens", f"lengths that sum to {len(slots)}, the number of slots", total)
    require("new_tokens", new >= 0, "at least 0", new)
    return PageTable.from_token_table(slots, starts_of(new), block_size).blocks(new)
