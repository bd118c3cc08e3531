"""Says which pages hold which tokens, and holds the pages of one layer: latents and rotated keys,
and an indexer's keys if the attention has one (DSA).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from mla_fusion.compat import mark_static_address
from mla_fusion.models.features import EXPANDS_AFTER_CACHE
from mla_fusion.models.refusal import OptimizeError


class PageTable:
    """Says which block holds which tokens of which sequence. The layers of a cache share it.

    The blocks of a sequence lie side by side; ``slots`` ``[B, max_len]`` are its rows. The length
    is a number where the cache grows and a tensor where its size is fixed, so that a compiled step
    can advance it.
    """

    def __init__(self, block_size: int, max_len: int | None) -> None:
        if not isinstance(block_size, int) or block_size not in range(16, 1025, 16):
            raise ValueError(
                f"block_size must be a multiple of 16 from 16 to 1024, got {block_size!r}"
            )
        if max_len is not None and (not isinstance(max_len, int) or max_len < 1):
            raise ValueError(f"max_cache_len must be a positive integer, got {max_len!r}")
        self.block_size = block_size
        self.max_len = max_len
        self.clear()

    def clear(self) -> None:
        """Drops all tokens."""
        self.batch = 0
        self.blocks = 0
        self.slots: Tensor | None = None
        self.length: Any = 0
        self.leader = -1
        self.step_slots: Tensor | None = None

    def rewind(self) -> None:
        """Sets the length to zero. If the size is fixed, the tensors that a compiled graph knows
        stay.
        """
        if self.is_static and self.slots is not None:
            self.length.zero_()
        else:
            self.clear()

    @property
    def tables(self) -> Tensor | None:
        """``[B, blocks]`` int64, None before the first token."""
        if self.slots is None:
            return None
        blocks = torch.arange(self.batch * self.blocks, device=self.slots.device)
        return blocks.view(self.batch, self.blocks)

    @property
    def is_static(self) -> bool:
        return self.max_len is not None

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence; -1 if the cache grows."""
        return self.max_len or -1

    def allot(self, batch: int, device: torch.device) -> None:
        """Gives ``batch`` sequences their blocks: all of a fixed size, or a first block."""
        blocks = -(-(self.max_len or 1) // self.block_size)
        if self.is_static:
            self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.lay_out(batch, blocks, device)

    def grow(self, tokens: int) -> None:
        """Adds blocks for ``tokens`` tokens a sequence, half as many again at least. Pools must
        follow.
        """
        assert self.slots is not None
        wanted = -(-tokens // self.block_size)
        if wanted > self.blocks:
            blocks = max(wanted, self.blocks + self.blocks // 2)
            self.lay_out(self.batch, blocks, self.slots.device)

    def lay_out(self, batch: int, blocks: int, device: torch.device) -> None:
        """Numbers the slots of ``batch`` sequences with ``blocks`` blocks each."""
        self.batch, self.blocks = batch, blocks
        row = blocks * self.block_size
        slots = torch.arange(batch * row, device=device).view(batch, row)
        # One column a token and no more: a compiled step that runs over the end fails on the index.
        self.slots = slots[:, : self.max_len].contiguous()
        if self.is_static and not torch.compiler.is_compiling():
            for tensor in (self.slots, self.length):
                mark_static_address(tensor)

    def advance(self, layer: int, tokens: int, start: int) -> Tensor:
        """Slots ``[B * tokens]`` of the new tokens of one layer, sequence by sequence."""
        assert self.slots is not None
        if not self.is_static:
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
        count = int(self.length)
        if count + tokens > self.max_len:
            raise OptimizeError(
                "cache.full",
                f"the cache holds {count} of {self.max_len} tokens a sequence; "
                f"{tokens} more do not fit",
            )


class PagedLatentLayer(CacheLayerMixin):
    """The pages of one attention: ``keys`` are its kv_cache, ``[BlockNum, BlockSize, 1, R]``
    latents, ``values`` its kr_cache, ``[.., 1, Dr]`` rotated keys; None before the first token.
    """

    names: tuple[str, ...] = ("keys", "values")
    """The pools, by the names that ``transformers`` has for what they hold."""
    is_sliding = False
    is_croppable = True

    def __init__(self, index: int, table: PageTable, widths: tuple[int, int], last: bool) -> None:
        super().__init__()
        self.index = index
        self.widths = widths
        self.table = table
        self.last = last
        self.length = 0  # of this layer alone; not kept where the size is fixed

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return self.table.is_static

    @property
    def batch_size(self) -> int:
        return self.table.batch if self.is_initialized else -1

    max_batch_size = batch_size  # its older name

    def pools(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the pools that exist, with their names: ``[BlockNum, BlockSize, 1, width]``."""
        for name in self.names:
            pool = getattr(self, name)
            if pool is not None:
                yield name, pool

    def _pool(self, states: Tensor, width: int) -> Tensor:
        table = self.table
        pool = states.new_zeros(table.batch * table.blocks, table.block_size, 1, width)
        if table.is_static and not torch.compiler.is_compiling():
            mark_static_address(pool)
        return pool

    def _write(self, pool: Tensor, slots: Tensor, states: Tensor) -> None:
        rows, states = pool.view(-1, pool.shape[-1]), states.reshape(-1, pool.shape[-1])
        # torchair has no converter for index_put, and rows may stay unfused
        if pool.device.type == "npu":
            torch.ops.npu.npu_scatter_nd_update_(rows, slots.unsqueeze(1), states)
        else:
            rows[slots] = states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Makes pools for latents ``[B, 1, *, R]`` and rotated keys ``[B, 1, *, Dr]``; ahead of
        time, older releases give one tensor for both."""
        value_states = key_states if value_states is None else value_states
        if key_states.shape[1] != 1 or value_states.shape[1] != 1:
            raise OptimizeError(
                "cache.kind",
                f"layer {self.index} caches {key_states.shape[1]} heads; pages hold one latent a "
                "token."
                " `hf.optimize` the model, or use one that caches latents as it is:"
                f" {EXPANDS_AFTER_CACHE.install}",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        table = self.table
        if table.slots is None:
            table.allot(key_states.shape[0], self.device)
        self._check_batch(key_states)
        widths = key_states.shape[-1], value_states.shape[-1]
        if key_states.shape[-2] == 0:  # initialised ahead, by states of one width for both
            widths = self.widths
        self.keys, self.values = (self._pool(key_states, width) for width in widths)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes ``[B, 1, S, R]`` and ``[B, 1, S, Dr]`` into the pages. Returns all tokens of this
        layer, in the same form.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        tokens = key_states.shape[-2]
        self._check_batch(key_states)
        if not self.table.is_static:
            self._grow(self.length + tokens)
        slots = self._slots(tokens)
        self._write(self.keys, slots, key_states)
        self._write(self.values, slots, value_states)
        if self.last:
            self.table.step_slots = None
        if not self.table.is_static:
            self.length += tokens
        return self.read(self.keys), self.read(self.values)

    def _check_batch(self, states: Tensor) -> None:
        if states.shape[0] != self.table.batch:
            raise OptimizeError(
                "cache.kind",
                f"the cache holds {self.table.batch} sequences, and layer {self.index} is given "
                "states"
                f" {list(states.shape)} of {states.shape[0]}; each batch needs a cache of its own",
            )

    def _slots(self, tokens: int) -> Tensor:
        return self.table.advance(self.index, tokens, self.length)

    def read(self, pool: Tensor) -> Tensor:
        """Returns the tokens of a pool: ``[B, 1, L, width]``, a view."""
        rows = pool.view(self.table.batch, -1, pool.shape[-1])
        return rows[:, : self.table.max_len or self.length].unsqueeze(1)

    def _grow(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens in the table and in this layer's pools."""
        table = self.table
        table.grow(tokens)
        for name, pool in list(self.pools()):
            blocks_by_sequence = pool.view(table.batch, -1, *pool.shape[1:])
            new_count = table.blocks - blocks_by_sequence.shape[1]
            if new_count:
                new_blocks = pool.new_zeros(table.batch, new_count, *pool.shape[1:])
                joined = torch.cat((blocks_by_sequence, new_blocks), dim=1)
                setattr(self, name, joined.flatten(0, 1))

    def token_count(self) -> int:
        """Returns the number of tokens of a sequence as an int."""
        return int(self.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continues sequence ``beam_idx[i]`` as sequence i."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            batch = self.keys.shape[0] // self.table.blocks
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these sequences, by number or by a boolean for each. Pools stay in place if the
        number of sequences stays, for graphs that know them.
        """
        table = self.table
        for name, pool in list(self.pools()):
            blocks_by_sequence = pool.view(-1, table.blocks, *pool.shape[1:])
            used = -(-self.token_count() // table.block_size)
            chosen = blocks_by_sequence[indices.to(pool.device), :used]
            if len(chosen) == len(blocks_by_sequence):
                blocks_by_sequence[:, :used] = chosen
                continue
            table.lay_out(len(chosen), table.blocks, pool.device)
            new_pool = pool.new_zeros(len(chosen), *blocks_by_sequence.shape[1:])
            new_pool[:, :used] = chosen
            setattr(self, name, new_pool.flatten(0, 1))

    def get_seq_length(self) -> Any:
        if not self.is_initialized:
            return 0
        return self.table.length if self.table.is_static else self.length

    def get_max_length(self) -> int:
        return self.table.max_tokens

    get_max_cache_shape = get_max_length  # its older name
    max_cache_len = property(get_max_length)

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Returns the length and the offset of a mask.

        query  the number of new tokens; in older releases their positions
        """
        new_count = query.shape[0] if isinstance(query, Tensor) else query
        return self.table.max_len or self.length + new_count, 0

    def reset(self) -> None:
        """Sets pages of a fixed size to zero, and drops others. The cache rewinds the table."""
        if self.table.is_static:
            for _, pool in self.pools():
                pool.zero_()
            self.length = 0
        else:
            self.clear()

    def clear(self) -> None:
        """Drops all tokens."""
        for name in self.names:
            setattr(self, name, None)
        self.is_initialized, self.length = False, 0


class PagedIndexedLayer(PagedLatentLayer):
    """Also holds the keys by which an indexer picks tokens, in pages of their own: ``[BlockNum,
    BlockSize, 1, width]``.
    """

    names = ("keys", "values", "indexer_keys")
    indexer_keys: Tensor | None = None
    _step_slots: Tensor | None = (
        None  # slots of the step, between its latents and its indexer's keys
    )

    def _slots(self, tokens: int) -> Tensor:
        self._step_slots = super()._slots(tokens)
        return self._step_slots

    def update_indexer(self, states: Tensor) -> Tensor:
        """Writes ``[B, S, width]`` of the tokens whose latents came last. Returns all tokens of
        this layer, ``[B, L, width]``.
        """
        if self._step_slots is None:
            raise OptimizeError(
                "cache.kind", f"layer {self.index} is given an indexer's keys before their latents"
            )
        self._check_batch(states)
        if self.indexer_keys is None:
            self.indexer_keys = self._pool(states, states.shape[-1])
        self._write(self.indexer_keys, self._step_slots, states)
        self._step_slots = None
        return self.read(self.indexer_keys).squeeze(1)
