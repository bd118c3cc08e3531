"""Makes an optimised model generate over an ``MlaPagedCache``, and a decode step one module."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.features import COUNTS_POSITIONS
from mla_fusion.models.refusal import OptimizeError

_PAGED = (None, "dynamic", "static")  # implementations of caches that pages replace


def use_paged_cache(model: Any, block_size: int) -> None:
    """Shadows the method by which ``generate()`` prepares a dynamic or a static cache.

    ``revert`` removes the shadow.
    """
    from mla_fusion.models.hf.paged_cache import MlaPagedCache

    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        max_length = kwargs["max_cache_length"] if "max_cache_length" in kwargs else args[-1]
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, MlaPagedCache) and 0 <= cache.max_cache_len < max_length:
            raise OptimizeError(
                "cache.full",
                f"generation may reach {max_length} tokens, the cache holds {cache.max_cache_len}",
            )
        kind = generation_config.cache_implementation
        if cache is not None or generation_config.use_cache is False or kind not in _PAGED:
            return type(self)._prepare_cache_for_generation(
                self, generation_config, model_kwargs, *args, **kwargs
            )
        longest = None
        if kind == "static":
            # at least the longest so far: a compiled step then meets the same shapes again
            longest = self._mla_fusion_longest = max(
                max_length,
                getattr(generation_config, "max_cache_len", None) or 0,
                getattr(self, "_mla_fusion_longest", 0),
            )
        model_kwargs["past_key_values"] = MlaPagedCache(
            self, max_cache_len=longest, block_size=block_size
        )
        return None

    model._prepare_cache_for_generation = MethodType(prepare, model)


class DecodeStep(nn.Module):
    """``model`` over ``cache``, for ``torch.compile`` and ``mla_fusion.lower``: ids ``[B, S]`` in,
    logits ``[B, S, vocabulary]`` out; the cache advances.

    The cache must have a fixed size and hold a first token, so that its pages exist. Models of some
    releases would read the length of the cache as a number, which ends a graph. They get the
    positions as an argument.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        if not hasattr(cache, "tensors"):
            raise TypeError(f"cache: expected hf.MlaPagedCache, got {type(cache).__name__}")
        self.model = model
        self.cache = cache
        self._pages = cache.tensors()  # lowering moves the tensors that it finds in modules
        self._counts = COUNTS_POSITIONS.has(type(model).forward)

    def forward(self, input_ids: Tensor) -> Tensor:
        options: dict[str, Tensor] = {}
        if not self._counts:
            new = torch.arange(input_ids.shape[1], device=input_ids.device)
            options["cache_position"] = self.cache.get_seq_length() + new
        logits: Tensor = self.model(
            input_ids=input_ids, past_key_values=self.cache, use_cache=True, **options
        ).logits
        return logits
