"""``MlaPagedCache``: a cache of ``transformers`` that keeps latents in the kernel's pages.

Each layer holds ``kv_cache [BlockNum, BlockSize, 1, R]`` and ``kr_cache [BlockNum, BlockSize, 1, Dr]``; one block
table serves all layers. Every sequence has blocks of its own, its *home*, and new tokens are always written there.
A beam that continues another one shares that one's full blocks through its table and copies only the last, partial
block. As long as nothing is shared, the pages of a sequence lie side by side and are read as a view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from mla_fusion.compat import mark_static_address
from mla_fusion.models.cache.page_table import BLOCK_SIZE, PageTable
from mla_fusion.models.features import EXPANDS_AFTER_CACHE
from mla_fusion.models.refusal import OptimizeError


class PagedLatentLayer(CacheLayerMixin):
    """The pages of one attention. ``keys`` and ``values`` are the pools, as kv_cache and kr_cache."""

    is_sliding = False
    is_croppable = True

    def __init__(self, index: int, table: PageTable, widths: tuple[int, int], last: bool) -> None:
        super().__init__()
        self.index = index
        self.widths = widths
        self.table = table
        self.last = last
        self.length = 0  # of this layer alone; not kept where the size is fixed

    def __repr__(self) -> str:
        kind = f"max {self.table.max_len}" if self.table.static else "growing"
        return f"{type(self).__name__}({kind}, blocks of {self.table.block_size})"

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

    max_batch_size = batch_size  # its older name

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Take pools for latents ``[B, 1, *, R]`` and rotated keys ``[B, 1, *, Dr]``; ahead of time, older releases
        give one tensor for both."""
        value_states = key_states if value_states is None else value_states
        if key_states.shape[1] != 1 or value_states.shape[1] != 1:
            raise OptimizeError(
                "cache.kind",
                f"layer {self.index} caches {key_states.shape[1]} heads; pages hold one latent a token."
                " `hf.optimize` the model, or use one that caches latents as it is:"
                f" {EXPANDS_AFTER_CACHE.install}",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        table = self.table
        if table.tables is None:
            table.allot(key_states.shape[0], self.device)
        if key_states.shape[0] != table.batch:
            raise OptimizeError("cache.kind", f"the cache holds {table.batch} sequences, got {key_states.shape[0]}")
        widths = key_states.shape[-1], value_states.shape[-1]
        if key_states.shape[-2] == 0:  # initialised ahead, by states of one width for both
            widths = self.widths
        self.keys, self.values = (
            key_states.new_zeros(table.batch * table.blocks, table.block_size, 1, width) for width in widths
        )
        if table.static and not torch.compiler.is_compiling():
            mark_static_address(self.keys)
            mark_static_address(self.values)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[B, 1, S, R]`` and ``[B, 1, S, Dr]`` into the pages; all tokens of this layer, in the same form."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        tokens = key_states.shape[-2]
        if key_states.shape[0] != self.table.batch:
            raise OptimizeError(
                "cache.kind", f"the cache holds {self.table.batch} sequences, got {key_states.shape[0]}"
            )
        if not self.table.static:
            self._grow(self.length + tokens)
        slots = self.table.advance(self.index, tokens, self.length)
        for pool, states in ((self.keys, key_states), (self.values, value_states)):
            width = pool.shape[-1]
            pool.view(-1, width)[slots] = states.reshape(-1, width)
        if self.last:
            self.table.step_slots = None
        if not self.table.static:
            self.length += tokens
        return self.read(self.keys), self.read(self.values)

    def read(self, pool: Tensor) -> Tensor:
        """``[B, 1, L, width]``: a view where no block is shared."""
        table = self.table
        assert table.tables is not None
        length = table.max_len if table.max_len is not None else self.length
        if table.shared:
            used = -(-length // table.block_size)
            pool = pool[table.tables[:, :used]]
        rows = pool.view(table.batch, -1, pool.shape[-1])
        return rows[:, :length].unsqueeze(1)

    def _grow(self, tokens: int) -> None:
        """Room for ``tokens`` tokens in the table and in this layer's pools."""
        table = self.table
        blocks = table.needs(tokens)
        if blocks != table.blocks:
            table.widen(blocks)
        assert self.keys is not None and self.values is not None
        held = self.keys.shape[0] // table.batch
        if held != table.blocks:
            self.keys, self.values = (self._stretched(pool, held) for pool in (self.keys, self.values))

    def _stretched(self, pool: Tensor, held: int) -> Tensor:
        grown = pool.new_zeros(self.table.batch, self.table.blocks, *pool.shape[1:])
        grown[:, :held] = pool.view(self.table.batch, held, *pool.shape[1:])
        return grown.flatten(0, 1)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The tokens held, ``[B, 1, length, R]`` and ``[B, 1, length, Dr]``, as copies."""
        assert self.keys is not None and self.values is not None
        held = self.held()
        return self.read(self.keys)[:, :, :held].clone(), self.read(self.values)[:, :, :held].clone()

    def held(self) -> int:
        """Tokens of a sequence, as a number."""
        return int(self.table.length) if self.table.static else self.length

    def refill(self, key_rows: Tensor, value_rows: Tensor) -> None:
        """Replace all tokens; the table must already be that of the new batch and unshared."""
        assert self.keys is not None and self.values is not None
        table = self.table
        for name, rows in (("keys", key_rows), ("values", value_rows)):
            pool = getattr(self, name)
            shape = (table.batch * table.blocks, *pool.shape[1:])
            fresh = pool.zero_() if pool.shape == shape else pool.new_zeros(shape)
            fresh.view(table.batch, -1, shape[-1])[:, : rows.shape[2]] = rows.squeeze(1)
            if fresh is not pool:
                setattr(self, name, fresh)
        self.length = key_rows.shape[2]

    def copy_partial_block(self, beam_idx: Tensor) -> None:
        """The last block, still being written, of each chosen sequence into the home of the one that takes over."""
        block, rest = divmod(self.held(), self.table.block_size)
        if rest == 0 or self.keys is None or self.values is None:
            return
        for pool in (self.keys, self.values):
            homes = pool.view(self.table.batch, -1, *pool.shape[1:])
            homes[:, block] = homes[beam_idx, block]

    def get_seq_length(self) -> Any:
        if not self.is_initialized:
            return 0
        return self.table.length if self.table.static else self.length

    def get_max_length(self) -> int:
        return -1 if self.table.max_len is None else self.table.max_len

    get_max_cache_shape = get_max_length  # its older name

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """``query`` is the number of new tokens, or in older releases their positions."""
        if self.table.max_len is not None:
            return self.table.max_len, 0
        return self.length + (query.shape[0] if isinstance(query, Tensor) else query), 0

    def reset(self) -> None:
        """Zeros where the size is fixed, otherwise no pages; the table is the cache's to rewind."""
        if self.table.static and self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()
        else:
            self.keys = self.values = None
            self.is_initialized = False
        self.length = 0


def _cropped(held: int, tokens: int) -> int:
    """How many tokens the installed release leaves of ``held``: asked of its own layer, for what a positive number
    and zero mean has changed. Raises its ValueError for a number that it does not take."""
    layer: Any = DynamicLayer()
    layer.keys = layer.values = torch.empty(1, 1, held, 1)
    layer.is_initialized = True
    layer.crop(tokens)
    return int(layer.keys.shape[-2])


class MlaPagedCache(Cache):
    """Latents of every MLA layer in pages ``[BlockNum, BlockSize, 1, 512]`` and ``[BlockNum, BlockSize, 1, 64]``.

    config         the model's config, or the model
    max_cache_len  tokens a sequence: pages are taken once, shapes stay the same, ``torch.compile`` sees one graph,
                   and one token more raises. None: pages are added as tokens come.
    block_size     tokens a page, a multiple of 16 up to 1024

    Works with any MLA model of ``transformers`` that caches latents, optimised or not. Layers of other kinds
    (sliding, linear, with an indexer) keep the layer that ``transformers`` gives them. Raises OptimizeError
    ``cache.kind`` for a model without latents.
    """

    def __init__(self, config: Any, *, max_cache_len: int | None = None, block_size: int = BLOCK_SIZE) -> None:
        config = getattr(config, "config", config)
        text = config.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None) is None:
            raise OptimizeError("cache.kind", f"{type(text).__name__} has no kv_lora_rank: no latents to cache")
        self.table = PageTable(block_size, max_cache_len)
        usual: Cache
        if max_cache_len is None:
            usual = DynamicCache(config=text)
        else:
            usual = StaticCache(config=text, max_cache_len=max_cache_len)
        paged = [index for index, layer in enumerate(usual.layers) if type(layer) in (DynamicLayer, StaticLayer)]
        widths = text.kv_lora_rank, text.qk_rope_head_dim
        for index in paged:
            usual.layers[index] = PagedLatentLayer(index, self.table, widths, last=index == paged[-1])
        super().__init__(layers=usual.layers)

    @property
    def paged_layers(self) -> list[PagedLatentLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLatentLayer)]

    @property
    def block_tables(self) -> Tensor | None:
        """``[B, blocks]`` int64, None before the first token."""
        return self.table.tables

    @property
    def block_size(self) -> int:
        return self.table.block_size

    @property
    def max_cache_len(self) -> int:
        """As of a StaticCache; -1 where the cache grows."""
        return -1 if self.table.max_len is None else self.table.max_len

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        """As ``max_cache_len``; the name that newer releases have for it, in all of them."""
        return self.max_cache_len

    @property
    def batch_size(self) -> int:
        """Sequences held, -1 before the first token; likewise in all releases."""
        return self.paged_layers[0].batch_size

    @property
    def bytes_per_token(self) -> int:
        """Of one sequence over all paged layers; 0 before the first token."""
        pools = [pool for layer in self.paged_layers for pool in (layer.keys, layer.values) if pool is not None]
        return sum(pool.shape[-1] * pool.element_size() for pool in pools)

    def tensors(self) -> list[Tensor]:
        """Everything that a step reads or writes: table, slots, length and pools."""
        table = [self.table.tables, self.table.slots, self.table.length]
        pools = [pool for layer in self.paged_layers for pool in (layer.keys, layer.values)]
        return [item for item in (*table, *pools) if isinstance(item, Tensor)]

    def reset(self) -> None:
        self.table.rewind()
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i goes on as sequence ``beam_idx[i]`` was: full blocks are shared, the last one is copied."""
        started = [layer for layer in self.paged_layers if layer.is_initialized]
        if started:
            tables = self.table.tables
            assert tables is not None
            chosen = beam_idx.to(tables.device)
            full = started[0].held() // self.table.block_size
            if full > 0:
                tables[:, :full] = tables[chosen, :full]
                self.table.shared = True
            for layer in started:
                layer.copy_partial_block(chosen)
        for layer in self._others():
            layer.reorder_cache(beam_idx)

    def crop(self, tokens: int) -> None:
        """Remove the newest tokens: ``-tokens`` of them or, where the installed ``transformers`` takes positive
        numbers, all but the first ``tokens``."""
        held = next((layer.held() for layer in self.paged_layers if layer.is_initialized), 0)
        left = _cropped(held, tokens)
        if left < held:
            self._rebuild(None, keep=left - held)
        for layer in self._others():
            layer.crop(tokens)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rebuild(torch.arange(self.table.batch).repeat_interleave(repeats))
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._rebuild(indices)
        for layer in self._others():
            layer.batch_select_indices(indices)

    def _others(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PagedLatentLayer)]

    def _rebuild(self, chosen: Tensor | None, keep: int | None = None) -> None:
        """The chosen sequences (None: all) less the last ``-keep`` tokens, each in its home again."""
        started = [layer for layer in self.paged_layers if layer.is_initialized]
        if not started:
            return
        table = self.table
        assert table.tables is not None
        left = max(started[0].held() + (keep or 0), 0)
        if chosen is None and not table.shared:  # nothing moves: what was behind the end is overwritten
            self._set_length(left)
            return
        device = table.tables.device
        saved = [tuple(rows[:, :, :left] for rows in layer.rows()) for layer in started]
        if chosen is not None:
            saved = [tuple(rows[chosen.to(rows.device)] for rows in pair) for pair in saved]
            if len(chosen) != table.batch:
                table.batch = len(chosen)
                table._lay_out(device)
        assert table.tables is not None
        table.tables.copy_(table._home_tables(device))
        table.shared = False
        self._set_length(left)
        for layer, (key_rows, value_rows) in zip(started, saved, strict=True):
            layer.refill(key_rows, value_rows)

    def _set_length(self, length: int) -> None:
        if self.table.static:
            self.table.length.fill_(length)
        for layer in self.paged_layers:
            layer.length = length if layer.is_initialized else 0

    def state_dict(self) -> dict[str, Any]:
        """Everything held, compact: ``layers`` are pairs ``[B, 1, length, R]`` and ``[B, 1, length, Dr]``.

        Raises OptimizeError ``cache.kind`` where a layer is not paged.
        """
        if self._others():
            raise OptimizeError("cache.kind", "only a cache of paged layers can be saved")
        return {
            "block_size": self.table.block_size,
            "max_cache_len": self.table.max_len,
            "layers": [layer.rows() if layer.is_initialized else None for layer in self.paged_layers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another cache held; block size and limit stay this cache's own.

        Raises OptimizeError ``cache.state`` for another number of layers, ``cache.full`` where there is no room.
        """
        layers = state["layers"]
        if len(layers) != len(self.layers) or self._others():
            raise OptimizeError("cache.state", f"the state has {len(layers)} layers, the cache {len(self.layers)}")
        held = {tuple(rows[0].shape[::2]) for rows in layers if rows is not None}
        if len(held) > 1:
            raise OptimizeError("cache.state", f"the layers of the state differ in batch or length: {sorted(held)}")
        tokens = next(iter(held))[1] if held else 0
        if self.table.max_len is not None and tokens > self.table.max_len:
            raise OptimizeError("cache.full", f"the state holds {tokens} tokens, the cache {self.table.max_len}")
        self.table.forget()
        for layer, rows in zip(self.paged_layers, layers, strict=True):
            layer.keys = layer.values = None
            layer.is_initialized, layer.length = False, 0
            if rows is not None:
                layer.update(*rows)
