"""``MlaPagedCache``: a cache of ``transformers`` that keeps latents in the kernel's pages.

Each layer holds ``kv_cache [BlockNum, BlockSize, 1, R]`` and ``kr_cache [BlockNum, BlockSize, 1,
Dr]``, and one with an indexer its keys in a third pool; one block table serves all layers. The
pages of a sequence lie side by side and are read as a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, StaticLayer

from mla_fusion.models.hf.latent_attention import BLOCK_SIZE
from mla_fusion.models.hf.paged_layer import PagedIndexedLayer, PagedLatentLayer, PageTable
from mla_fusion.models.refusal import OptimizeError

_KINDS: dict[type[Any], type[PagedLatentLayer]] = {
    DynamicLayer: PagedLatentLayer,
    StaticLayer: PagedLatentLayer,
}
for _name in ("DynamicIndexedLayer", "StaticIndexedLayer"):  # of newer releases
    if hasattr(cache_utils, _name):
        _KINDS[getattr(cache_utils, _name)] = PagedIndexedLayer


def _cropped(count: int, tokens: int) -> int:
    """Returns how many of ``count`` tokens the installed release leaves.

    Its own layer is asked, because the meaning of positive numbers and zero has changed. Raises its
    ValueError for a number that it does not take.
    """
    layer: Any = DynamicLayer()
    layer.keys = layer.values = torch.empty(1, 1, count, 1, dtype=torch.float32)
    layer.is_initialized = True
    layer.crop(tokens)
    return int(layer.keys.shape[-2])


class MlaPagedCache(Cache):
    """Latents of every MLA layer in pages ``[BlockNum, BlockSize, 1, 512]`` and ``[BlockNum,
    BlockSize, 1, 64]``.

    config         the model's config, or the model: of an optimised one, layers that ``optimize``
                   has left alone keep the layer that ``transformers`` gives them
    max_cache_len  tokens a sequence: pages are taken once, shapes stay the same, ``torch.compile``
                   sees one graph, and one token more raises. None: pages are added as tokens come.
    block_size     tokens a page, a multiple of 16 up to 1024

    Works with any MLA model of ``transformers`` that caches latents, optimised or not. Layers of
    other kinds (sliding, linear) keep the layer that ``transformers`` gives them. Raises
    OptimizeError ``cache.kind`` for a model without latents.
    """

    def __init__(
        self, config: Any, *, max_cache_len: int | None = None, block_size: int = BLOCK_SIZE
    ) -> None:
        summary = getattr(config, "_mla_fusion_summary", None)
        config = getattr(config, "config", config)
        has_text = hasattr(config, "get_text_config")
        text = config.get_text_config(decoder=True) if has_text else config
        if getattr(text, "kv_lora_rank", None) is None:
            raise OptimizeError(
                "cache.kind", f"{type(text).__name__} has no kv_lora_rank: no latents to cache"
            )
        self.table = PageTable(block_size, max_cache_len)
        base: Cache
        if max_cache_len is None:
            base = DynamicCache(config=text)
        else:
            base = StaticCache(config=text, max_cache_len=max_cache_len)
        paged = [
            index
            for index, layer in enumerate(base.layers)
            if type(layer) in _KINDS and (summary is None or summary.converts(index))
        ]
        widths = text.kv_lora_rank, text.qk_rope_head_dim
        for index in paged:
            kind = _KINDS[type(base.layers[index])]
            base.layers[index] = kind(index, self.table, widths, last=index == paged[-1])
        super().__init__(layers=base.layers)

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
        return self.table.max_tokens

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        """As ``max_cache_len``; the name that newer releases have for it, in all of them."""
        return self.max_cache_len

    @property
    def batch_size(self) -> int:
        """The number of sequences, -1 before the first token, in all releases."""
        return self.paged_layers[0].batch_size

    @property
    def bytes_per_token(self) -> int:
        """Of one sequence over all paged layers; 0 before the first token."""
        return sum(pool.shape[-1] * pool.element_size() for pool in self._pools())

    def _pools(self) -> Iterator[Tensor]:
        return (pool for layer in self.paged_layers for _, pool in layer.pools())

    def tensors(self) -> list[Tensor]:
        """Returns what a step reads or writes: slots, length and pools."""
        table = self.table.slots, self.table.length
        return [item for item in (*table, *self._pools()) if isinstance(item, Tensor)]

    def reset(self) -> None:
        self.table.rewind()
        super().reset()

    def crop(self, tokens: int) -> None:
        """Removes the newest tokens: ``-tokens`` of them. If the installed ``transformers`` takes
        positive numbers, those leave the first ``tokens``.
        """
        started = [layer for layer in self.paged_layers if layer.is_initialized]
        old_count = started[0].token_count() if started else 0
        new_count = _cropped(old_count, tokens)
        if self.table.is_static and new_count < old_count:
            self.table.length.fill_(new_count)
        for layer in started:
            layer.length = new_count
        others: list[Any] = [x for x in self.layers if not isinstance(x, PagedLatentLayer)]
        for layer in others:
            layer.crop(tokens)
