"""Pages of latents: the table of their slots, and the pools of one layer.

The pools hold latents and rotated keys, and an indexer's keys if the attention has one (DSA).
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


class SlotTable:
    """The rows of the pools that belong to each token of each sequence; all layers share it.

    The blocks of a sequence are adjacent. ``slots`` ``[B, tokens]`` holds its rows. ``length`` is
    a number if the cache grows. If its size is fixed, it is a tensor, which a compiled step can
    advance.

    max_len  tokens a sequence; -1 if the cache grows
    """

    def __init__(self, block_size: int, max_len: int | None) -> None:
        if block_size < 16 or block_size > 1024 or block_size % 16:
            raise ValueError(
                f"block_size must be a multiple of 16 from 16 to 1024, got {block_size}"
            )
        if max_len is not None and max_len < 1:
            raise ValueError(f"max_cache_len must be positive, got {max_len}")
        self.block_size = block_size
        self.max_len = -1 if max_len is None else max_len
        self.static = max_len is not None
        self.forget()

    def forget(self) -> None:
        """Forgets all tokens, and the number of sequences."""
        self.batch = 0
        self.blocks = 0
        self.slots: Tensor | None = None
        self.length: Any = 0
        self.leader: int | None = None
        self.step_slots: Tensor | None = None

    def rewind(self) -> None:
        """Sets the length to zero. A fixed size keeps its tensors: a compiled graph knows them."""
        if self.static and self.slots is not None:
            self.truncate(0)
        else:
            self.forget()

    def truncate(self, tokens: int) -> None:
        """Keeps the first ``tokens`` tokens of each sequence."""
        if self.static:
            self.length.fill_(tokens)
        else:
            self.length = tokens

    @property
    def tables(self) -> Tensor | None:
        """``[B, blocks]`` int64, None before the first token."""
        if self.slots is None:
            return None
        blocks = torch.arange(self.batch * self.blocks, device=self.slots.device)
        return blocks.view(self.batch, self.blocks)

    def start(self, batch: int, device: torch.device) -> None:
        """Takes all blocks of a fixed size, or the first block of each sequence."""
        if self.static:
            self.length = torch.zeros((), dtype=torch.int64, device=device)
            self.keep_address(self.length)
        self.lay_out(batch, -(-max(self.max_len, 1) // self.block_size), device)

    def lay_out(self, batch: int, blocks: int, device: torch.device) -> None:
        """Numbers the rows of ``blocks`` blocks for each of ``batch`` sequences."""
        self.batch, self.blocks = batch, blocks
        row = blocks * self.block_size
        slots = torch.arange(batch * row, device=device).view(batch, row)
        if self.static:
            # No column past the last token: a compiled step that needs one fails on the index.
            slots = slots[:, : self.max_len].contiguous()
            self.keep_address(slots)
        self.slots = slots

    def keep_address(self, tensor: Tensor) -> None:
        """Promises compilers that a tensor of a cache of fixed size stays where it is."""
        if self.static and not torch.compiler.is_compiling():
            mark_static_address(tensor)

    def advance(self, layer: int, tokens: int) -> Tensor:
        """Returns the slots ``[B * tokens]`` of a step's tokens, sequence by sequence.

        The layer that came first in the first step computes them and advances the length.
        """
        if self.leader is None:
            self.leader = layer
        if layer == self.leader or self.step_slots is None:
            self._make_room(tokens)
            assert self.slots is not None
            positions = torch.arange(tokens, device=self.slots.device) + self.length
            self.step_slots = self.slots.index_select(1, positions).reshape(-1)
            if self.static:
                self.length.add_(tokens)
            else:
                self.length += tokens
        return self.step_slots

    def _make_room(self, tokens: int) -> None:
        """Adds blocks, at least half as many as there are. A fixed size has no more: OptimizeError
        ``cache.full``.
        """
        assert self.slots is not None
        if self.static:
            if torch.compiler.is_compiling():
                return
            length = int(self.length)
            if length + tokens > self.max_len:
                raise OptimizeError(
                    "cache.full",
                    f"the cache holds {length} of {self.max_len} tokens a sequence; "
                    f"{tokens} more do not fit",
                )
            return
        needed = -(-(self.length + tokens) // self.block_size)
        if needed > self.blocks:
            blocks = max(needed, self.blocks + self.blocks // 2)
            self.lay_out(self.batch, blocks, self.slots.device)


class PagedLatentLayer(CacheLayerMixin):
    """The pages of one attention. ``keys`` and ``values`` are the pools kv_cache and kr_cache.

    index   number of the layer in its model
    widths  R and Dr
    last    True for the last paged layer of the model
    """

    names: tuple[str, ...] = ("keys", "values")
    """Attributes that hold the pools; ``transformers`` chose the names."""
    is_sliding = False
    is_croppable = True

    def __init__(self, index: int, table: SlotTable, widths: tuple[int, int], last: bool) -> None:
        super().__init__()
        self.index = index
        self.widths = widths
        self.table = table
        self.last = last

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return self.table.static

    @property
    def kv_cache(self) -> Tensor | None:
        """``[BlockNum, BlockSize, 1, R]`` latents, None before the first token."""
        return self.keys

    @property
    def kr_cache(self) -> Tensor | None:
        """``[BlockNum, BlockSize, 1, Dr]`` rotated keys, None before the first token."""
        return self.values

    @property
    def max_cache_len(self) -> int:
        return self.get_max_length()

    @property
    def batch_size(self) -> int:
        return self.table.batch if self.is_initialized else -1

    max_batch_size = batch_size  # the name in older releases

    def pools(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each pool ``[BlockNum, BlockSize, 1, width]`` that exists, with its name."""
        for name in self.names:
            pool = getattr(self, name)
            if pool is not None:
                yield name, pool

    def _new_pool(self, states: Tensor, width: int) -> Tensor:
        table = self.table
        pool = states.new_zeros(table.batch * table.blocks, table.block_size, 1, width)
        table.keep_address(pool)
        return pool

    def _write(self, pool: Tensor, slots: Tensor, states: Tensor) -> None:
        rows, states = pool.view(-1, pool.shape[-1]), states.reshape(-1, pool.shape[-1])
        # torchair has no converter for index_put, and rows may stay unfused
        if pool.device.type == "npu":
            torch.ops.npu.npu_scatter_nd_update_(rows, slots.unsqueeze(1), states)
        else:
            rows[slots] = states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Makes pools for latents ``[B, 1, *, R]`` and rotated keys ``[B, 1, *, Dr]``.

        A call ahead of the first token has states without tokens, whose width is that of neither
        pool. Older releases pass one tensor for both then.
        """
        value_states = key_states if value_states is None else value_states
        if key_states.shape[1] != 1 or value_states.shape[1] != 1:
            raise OptimizeError(
                "cache.kind",
                f"layer {self.index} caches {key_states.shape[1]} heads; pages hold one latent a "
                "token. `hf.optimize` the model, or use one that caches latents as it is: "
                f"{EXPANDS_AFTER_CACHE.install}",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.table.slots is None:
            self.table.start(key_states.shape[0], self.device)
        self._check_batch(key_states)
        widths = key_states.shape[-1], value_states.shape[-1]
        if key_states.shape[-2] == 0:
            widths = self.widths
        self.keys, self.values = (self._new_pool(key_states, width) for width in widths)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes ``[B, 1, S, R]`` and ``[B, 1, S, Dr]`` into the pages. Returns all tokens of this
        layer, in the same form.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_batch(key_states)
        slots = self._advance(key_states.shape[-2])
        self._grow()
        assert self.keys is not None and self.values is not None
        self._write(self.keys, slots, key_states)
        self._write(self.values, slots, value_states)
        if self.last:
            self.table.step_slots = None
        return self.read(self.keys), self.read(self.values)

    def _check_batch(self, states: Tensor) -> None:
        if states.shape[0] != self.table.batch:
            raise OptimizeError(
                "cache.kind",
                f"the cache holds {self.table.batch} sequences, and layer {self.index} is given "
                f"states {list(states.shape)} of {states.shape[0]}; each batch needs a cache of "
                "its own",
            )

    def _advance(self, tokens: int) -> Tensor:
        """Returns the slots of the new tokens."""
        return self.table.advance(self.index, tokens)

    def read(self, pool: Tensor) -> Tensor:
        """Returns ``[B, 1, L, width]``, a view."""
        rows = pool.view(self.table.batch, -1, pool.shape[-1])
        length, _ = self.get_mask_sizes(0)
        return rows[:, :length].unsqueeze(1)

    def _grow(self) -> None:
        """Gives each pool as many blocks a sequence as the table has."""
        table = self.table
        for name, pool in list(self.pools()):
            by_sequence = pool.view(table.batch, -1, *pool.shape[1:])
            missing = table.blocks - by_sequence.shape[1]
            if missing:
                zeros = pool.new_zeros(table.batch, missing, *pool.shape[1:])
                setattr(self, name, torch.cat((by_sequence, zeros), dim=1).flatten(0, 1))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continues sequence ``beam_idx[i]`` as sequence i."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            batch = self.keys.shape[0] // self.table.blocks
            self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these sequences, by number or by a boolean for each.

        If their number stays, so do the pools: compiled graphs know them.
        """
        table = self.table
        for name, pool in list(self.pools()):
            by_sequence = pool.view(-1, table.blocks, *pool.shape[1:])
            used = -(-int(table.length) // table.block_size)
            chosen = by_sequence[indices.to(pool.device), :used]
            if len(chosen) == len(by_sequence):
                by_sequence[:, :used] = chosen
                continue
            table.lay_out(len(chosen), table.blocks, pool.device)
            selected = pool.new_zeros(len(chosen), *by_sequence.shape[1:])
            selected[:, :used] = chosen
            setattr(self, name, selected.flatten(0, 1))

    def get_seq_length(self) -> Any:
        return self.table.length

    def get_max_length(self) -> int:
        return self.table.max_len

    get_max_cache_shape = get_max_length  # the name in older releases

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Returns the number of tokens that attention reads, and 0, its offset.

        query  the number of new tokens; older releases pass their positions
        """
        if self.table.static:
            return self.table.max_len, 0
        return self.table.length + (query.shape[0] if isinstance(query, Tensor) else query), 0

    def reset(self) -> None:
        """Fills pools of a fixed size with zeros, and drops others. The cache rewinds the table."""
        for name, pool in list(self.pools()):
            if self.table.static:
                pool.zero_()
            else:
                setattr(self, name, None)
                self.is_initialized = False


class PagedIndexedLayer(PagedLatentLayer):
    """A layer that also keeps an indexer's keys, in pages ``[BlockNum, BlockSize, 1, width]``."""

    names = ("keys", "values", "indexer_keys")
    indexer_keys: Tensor | None = None
    _new_slots: Tensor | None = None  # from the latents of a step to its indexer's keys

    def _advance(self, tokens: int) -> Tensor:
        self._new_slots = super()._advance(tokens)
        return self._new_slots

    def update_indexer(self, states: Tensor) -> Tensor:
        """Writes ``[B, S, width]`` of the tokens whose latents came last. Returns all of this
        layer, ``[B, L, width]``.
        """
        if self._new_slots is None:
            raise OptimizeError(
                "cache.kind", f"layer {self.index} is given an indexer's keys before their latents"
            )
        self._check_batch(states)
        if self.indexer_keys is None:
            self.indexer_keys = self._new_pool(states, states.shape[-1])
        self._write(self.indexer_keys, self._new_slots, states)
        self._new_slots = None
        return self.read(self.indexer_keys).squeeze(1)
