"""Knows which pages a batch of sequences occupies. Makes the ``cache_index`` of new tokens.

A page of FlashInfer, a block of vLLM and a block of the Ascend cache are the same: BlockSize rows.
A slot is ``block * BlockSize + offset``. The table covers the new tokens of a sequence too, which
are its last tokens (FlashInfer's append and vLLM's scheduler allocate before they write).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fusion.paging.ragged import (
    ceil_div,
    integers,
    offsets,
    padded,
    positions,
    positive_size,
    prefix_sums,
    refuse,
    require,
    same_length,
    starts_of,
)


@dataclass(frozen=True)
class BlockIndex:
    """Arguments of the PA_BLK_* cache modes: ``cache_index`` int64 [blocks], ``actual_seq_len``
    int32 [B].

    actual_seq_len holds inclusive prefix sums of the new tokens per sequence. For a 3-D token_x [B,
    S, He] with equal lengths pass ``cache_index.view(B, -1)`` and no actual_seq_len.
    """

    cache_index: Tensor
    actual_seq_len: Tensor


@dataclass(frozen=True)
class PageTable:
    """Pages of B sequences: sequence b has ``pages[starts[b]:starts[b + 1]]`` and ``lengths[b]``
    tokens.

    ``starts`` int64 [B+1], ``pages`` int64 [P], ``lengths`` int64 [B]. Build it with
    ``from_flashinfer``, ``from_block_table`` or ``from_token_table``; they check their arguments.
    """

    starts: Tensor
    pages: Tensor
    lengths: Tensor
    block_size: int

    # -- FlashInfer

    @classmethod
    def from_flashinfer(
        cls,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        page_size: int,
        *,
        check: bool = True,
    ) -> PageTable:
        """Returns the table of FlashInfer's CSR triple.

        Sequence i has ``page_size * (pages_i - 1) + last_page_len[i]`` tokens. Without pages it has
        0 tokens, whatever its last_page_len.

        indptr         kv_indptr [B+1]
        indices        kv_indices, at least indptr[-1] of them
        last_page_len  kv_last_page_len [B], from 1 to page_size
        """
        positive_size("page_size", page_size)
        starts, pages = offsets("indptr", indptr), integers("indices", indices)
        last = integers("last_page_len", last_page_len)
        same_length("last_page_len", last, len(starts) - 1, "one a sequence")
        counts = starts.diff()
        if check:
            used = int(starts[-1])
            prefix_sums("indptr", starts, used)
            if used > len(pages):
                refuse("indices", f"at least indptr[-1] = {used} entries", len(pages))
            pages = pages[:used]  # a preallocated buffer may be longer
            require("indices", pages >= 0, "pages of at least 0", pages)
            within = ((last >= 1) & (last <= page_size)) | (counts == 0)
            require("last_page_len", within, f"1..{page_size}", last)
        lengths = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
        return cls(starts, pages, lengths, page_size)

    def to_flashinfer(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``(indptr, indices, last_page_len)``, int32.

        Pages behind a sequence's end are left out. A sequence of length 0 has no page and
        last_page_len 0.
        """
        counts, pages = self._used()
        last = self.lengths - (counts - 1).clamp(min=0) * self.block_size
        return starts_of(counts).int(), pages.int(), last.int()

    # -- vLLM

    @classmethod
    def from_block_table(
        cls, block_table: Tensor, seq_lens: Tensor, block_size: int, *, check: bool = True
    ) -> PageTable:
        """Returns the table of vLLM's ``block_table`` [B, max_blocks] and ``seq_lens`` [B].

        The lengths count the new tokens too. Entries behind a sequence's last block are not read:
        vLLM leaves anything there.
        """
        positive_size("block_size", block_size)
        table, lengths = integers("block_table", block_table, 2), integers("seq_lens", seq_lens)
        same_length("seq_lens", lengths, len(table), "one a row of block_table")
        counts = ceil_div(lengths, block_size)
        if check:
            room = table.shape[1] * block_size
            expected = f"0..{room}, what {table.shape[1]} blocks of {block_size} hold"
            require("seq_lens", (lengths >= 0) & (lengths <= room), expected, lengths)
        sequence, position = positions(counts)
        pages = table[sequence, position]
        if check:
            require("block_table", pages >= 0, "blocks of at least 0", pages)
        return cls(starts_of(counts), pages, lengths, block_size)

    def to_block_table(self, max_blocks: int | None = None, fill: int = 0) -> tuple[Tensor, Tensor]:
        """Returns ``(block_table [B, max_blocks], seq_lens [B])``, int32; unused entries are
        ``fill``.
        """
        counts, pages = self._used()
        widest = int(counts.max()) if len(counts) else 0
        width = widest if max_blocks is None else max_blocks
        if width < widest:
            refuse("max_blocks", f"at least {widest}", width)
        table = pages.new_full((len(counts), width), fill)
        table[positions(counts)] = pages
        return table.int(), self.lengths.int()

    # -- slots of every token

    @classmethod
    def from_token_table(cls, slots: Tensor, kvstarts: Tensor, block_size: int) -> PageTable:
        """Returns the table of the slots of every token (PPL's table mode). Those of sequence b are
        ``slots[kvstarts[b]:kvstarts[b + 1]]``.

        Raises ContractError ``paging.slots`` unless token p of each sequence lies at offset p %
        block_size of a block for each block_size tokens: other placements have no page table.
        """
        positive_size("block_size", block_size)
        slots, starts = integers("slots", slots), offsets("kvstarts", kvstarts)
        prefix_sums("kvstarts", starts, len(slots))
        lengths = starts.diff()
        sequence, position = positions(lengths)
        offset = position % block_size
        first = slots[starts[sequence] + position - offset]
        aligned = (slots == first + offset) & (first % block_size == 0) & (slots >= 0)
        require("slots", aligned, f"blocks of {block_size} rows, filled from their start", slots)
        pages = slots[offset == 0] // block_size
        return cls(starts_of(ceil_div(lengths, block_size)), pages, lengths, block_size)

    def token_table(self) -> tuple[Tensor, Tensor]:
        """Returns ``(slots, kvstarts)`` of every token of every sequence, int64.

        PPL's table mode takes the slots as its cachestarts.
        """
        return self._slots(*positions(self.lengths)), starts_of(self.lengths)

    # -- the new tokens

    def slots(self, new_tokens: Tensor, *, pad_to: int | None = None, check: bool = True) -> Tensor:
        """Returns the token-wise ``cache_index`` [T] int64 of the last ``new_tokens[b]`` tokens of
        each sequence, for PA_BSND and PA_NZ.

        T is the sum of new_tokens, or ``pad_to``: the kernel skips the -1 behind the sum.
        """
        new, start = self._new(new_tokens, check)
        sequence, position = positions(new)
        return padded(self._slots(sequence, start[sequence] + position), pad_to)

    def blocks(self, new_tokens: Tensor, *, check: bool = True) -> BlockIndex:
        """Returns the block-wise index of the new tokens, for PA_BLK_BSND and PA_BLK_NZ.

        The kernel writes a sequence's first new token at offset 0 of its first listed block. Raises
        ContractError ``paging.new_tokens`` if new tokens start inside a block (``slots`` takes any
        start).
        """
        new, start = self._new(new_tokens, check)
        if check:
            aligned = (start % self.block_size == 0) | (new == 0)
            expected = f"new tokens that start at a multiple of {self.block_size}"
            require("new_tokens", aligned, expected, start)
        sequence, block = positions(ceil_div(new, self.block_size))
        pages = self._pages_of(sequence, (start // self.block_size)[sequence] + block)
        return BlockIndex(pages, new.cumsum(0).int())

    def _new(self, new_tokens: Tensor, check: bool) -> tuple[Tensor, Tensor]:
        """Returns the number of new tokens, and the position of the first, of each sequence."""
        new = integers("new_tokens", new_tokens)
        same_length("new_tokens", new, len(self.lengths), "one a sequence")
        if check:
            within = (new >= 0) & (new <= self.lengths)
            require("new_tokens", within, "between 0 and the sequence length", new)
        return new, self.lengths - new

    def _pages_of(self, sequence: Tensor, block: Tensor) -> Tensor:
        """Returns the pages of blocks that are counted from the start of their sequence."""
        return self.pages[self.starts[sequence] + block]

    def _slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        page = self._pages_of(sequence, position // self.block_size)
        return page * self.block_size + position % self.block_size

    def _used(self) -> tuple[Tensor, Tensor]:
        """Returns how many pages each sequence uses, and these pages."""
        counts = ceil_div(self.lengths, self.block_size)
        return counts, self._pages_of(*positions(counts))
