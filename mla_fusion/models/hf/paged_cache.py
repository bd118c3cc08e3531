"""``MlaPagedCache``: a cache of ``transformers`` that keeps latents in the kernel's pages.

Each layer has ``kv_cache [BlockNum, BlockSize, 1, R]`` and ``kr_cache [BlockNum, BlockSize, 1,
Dr]``, and one with an indexer its keys in a third pool; one block table serves all layers. The
pages of a sequence lie side by side and are read as a view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from mla_fusion.models.hf.latent_attention import BLOCK_SIZE
from mla_fusion.models.hf.paged_layer import PagedIndexedLayer, PagedLatentLayer, SlotTable
from mla_fusion.models.refusal import OptimizeError

# by the name of the layer that it replaces; some releases have no indexed ones
_KINDS: dict[str, type[PagedLatentLayer]] = {
    "DynamicLayer": PagedLatentLayer,
    "StaticLayer": PagedLatentLayer,
    "DynamicIndexedLayer": PagedIndexedLayer,
    "StaticIndexedLayer": PagedIndexedLayer,
}


def _cropped(length: int, tokens: int) -> int:
    """Returns how many of ``length`` tokens a ``crop`` of the installed release leaves.

    Releases differ in what a positive number and zero mean, so a layer of the release is cropped.
    Raises its ValueError for a number that it does not take.
    """
    layer: Any = DynamicLayer()
    layer.keys = layer.values = torch.empty(1, 1, length, 1, dtype=torch.float32)
    layer.is_initialized = True
    layer.crop(tokens)
    return int(layer.keys.shape[-2])


class MlaPagedCache(Cache):
    """Latents of every MLA layer in pages ``[BlockNum, BlockSize, 1, 512]`` and ``[BlockNum,
    BlockSize, 1, 64]``.

    config         the model or its config. Attentions of an optimised model that are not converted
                   keep the cache layer of ``transformers``.
    max_cache_len  tokens a sequence: pages are taken once, shapes stay the same, ``torch.compile``
                   sees one graph, and one token more raises. None: pages are added as tokens come.
    block_size     tokens a page, a multiple of 16 up to 1024

    Works with any MLA model of ``transformers`` that caches latents, optimised or not. Layers of
    other kinds (sliding, linear) keep the cache layer of ``transformers``. Raises OptimizeError
    ``cache.kind`` for a model without latents.
    """

    def __init__(
        self, config: Any, *, max_cache_len: int | None = None, block_size: int = BLOCK_SIZE
    ) -> None:
        summary = getattr(config, "_mla_fusion_summary", None)
        config = getattr(config, "config", config)
        text = config.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None) is None:
            raise OptimizeError(
                "cache.kind", f"{type(text).__name__} has no kv_lora_rank: no latents to cache"
            )
        self.table = SlotTable(block_size, max_cache_len)
        usual: Cache = (
            DynamicCache(config=text)
            if max_cache_len is None
            else StaticCache(config=text, max_cache_len=max_cache_len)
        )
        paged = {
            index: _KINDS[type(layer).__name__]
            for index, layer in enumerate(usual.layers)
            if type(layer).__name__ in _KINDS and (summary is None or summary.converts(index))
        }
        widths = text.kv_lora_rank, text.qk_rope_head_dim
        for index, kind in paged.items():
            usual.layers[index] = kind(index, self.table, widths, last=index == max(paged))
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
        """The name of a StaticCache for it; -1 if the cache grows."""
        return self.table.max_len

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        """Returns ``max_cache_len``; the name in newer releases, here in all of them."""
        return self.max_cache_len

    @property
    def batch_size(self) -> int:
        """Number of sequences, -1 before the first token; in all releases."""
        return self.paged_layers[0].batch_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence in all paged layers; 0 before the first token."""
        return sum(pool.shape[-1] * pool.element_size() for pool in self._pools())

    def _pools(self) -> list[Tensor]:
        return [pool for layer in self.paged_layers for _, pool in layer.pools()]

    def tensors(self) -> list[Tensor]:
        """Returns all tensors that a step reads or writes: slots, length and pools."""
        tensors = self.table.slots, self.table.length, *self._pools()
        return [item for item in tensors if isinstance(item, Tensor)]

    def reset(self) -> None:
        self.table.rewind()
        super().reset()

    def crop(self, tokens: int) -> None:
        """Removes the newest tokens: ``-tokens`` of them or, if the installed ``transformers``
        takes positive numbers, all but the first ``tokens``.
        """
        length = int(self.table.length)
        remaining = _cropped(length, tokens)
        if remaining < length:
            self.table.truncate(remaining)
        layers: list[Any] = self.layers
        for layer in layers:
            if not isinstance(layer, PagedLatentLayer):
                layer.crop(tokens)
