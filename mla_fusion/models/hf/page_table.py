"""Which pages of the pools hold which tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion.compat import mark_static_address
from mla_fusion.models.refusal import OptimizeError

BLOCK_SIZE = 128


class PageTable:
    """Which block holds which tokens of which sequence; shared by the layers of a cache.

    The blocks of a sequence lie side by side; ``slots`` ``[B, max_len]`` are its rows. The length
    is a number where the cache grows and a tensor where its size is fixed, so that a compiled step
    can advance it.
    """

    def __init__(self, block_size: int, max_len: int | None) -> None:
        if block_size < 16 or block_size > 1024 or block_size % 16:
            raise ValueError(
                f"block_size must be a multiple of 16 from 16 to 1024, got {block_size}"
            )
        if max_len is not None and max_len < 1:
            raise ValueError(f"max_cache_len must be positive, got {max_len}")
        self.block_size = block_size
        self.max_len = max_len
        self.forget()

    def forget(self) -> None:
        """As if no token had ever come."""
        self.batch = 0
        self.blocks = 0
        self.slots: Tensor | None = None
        self.length: Any = 0
        self.leader = -1
        self.step_slots: Tensor | None = None

    def rewind(self) -> None:
        """Length zero; where the size is fixed, the tensors that a compiled graph knows stay."""
        if self.static and self.slots is not None:
            self.length.zero_()
        else:
            self.forget()

    @property
    def tables(self) -> Tensor | None:
        """``[B, blocks]`` int64, None before the first token."""
        if self.slots is None:
            return None
        blocks = torch.arange(self.batch * self.blocks, device=self.slots.device)
        return blocks.view(self.batch, self.blocks)

    @property
    def static(self) -> bool:
        return self.max_len is not None

    @property
    def most(self) -> int:
        """Tokens that a sequence may have; -1 where the cache grows."""
        return -1 if self.max_len is None else self.max_len

    def allot(self, batch: int, device: torch.device) -> None:
        """Give ``batch`` sequences their blocks; a fixed size is taken at once, otherwise a first
        block.
        """
        blocks = 1 if self.max_len is None else -(-self.max_len // self.block_size)
        if self.static:
            self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.lay_out(batch, blocks, device)

    def grow(self, tokens: int) -> None:
        """Room for ``tokens`` tokens a sequence, by halves; pools must follow."""
        assert self.slots is not None
        wanted = -(-tokens // self.block_size)
        if wanted > self.blocks:
            blocks = max(wanted, self.blocks + self.blocks // 2)
            self.lay_out(self.batch, blocks, self.slots.device)

    def lay_out(self, batch: int, blocks: int, device: torch.device) -> None:
        self.batch, self.blocks = batch, blocks
        row = blocks * self.block_size
        slots = torch.arange(batch * row, device=device).view(batch, row)
        # One column a token and no more: a compiled step that runs over the end fails on the index.
        self.slots = slots[:, : self.max_len].contiguous() if self.max_len is not None else slots
        if self.static and not torch.compiler.is_compiling():
            for tensor in (self.slots, self.length):
                mark_static_address(tensor)

    def advance(self, layer: int, tokens: int, start: int) -> Tensor:
        """Slots ``[B * tokens]`` of the new tokens of one layer, sequence by sequence."""
        assert self.slots is not None
        if not self.static:
            return self.slots[:, start : start + tokens].reshape(-1)
        if self.leader < 0:
            self.leader = layer
        # A step's slots are computed once, by the layer that came first in the first step.
        if layer == self.leader or self.step_slots is None:
            self._check_room(tokens)
            positions = torch.arange(tokens, device=self.slots.device) + self.length
            self.step_slots = self.slots.index_select(1, positions).reshape(-1)
            self.length.add_(tokens)
        return self.step_slots

    def _check_room(self, tokens: int) -> None:
        if torch.compiler.is_compiling() or self.max_len is None:
            return
        held = int(self.length)
        if held + tokens > self.max_len:
            raise OptimizeError(
                "cache.full",
                f"the cache holds {held} of {self.max_len} tokens a sequence; "
                f"{tokens} more do not fit",
            )
