"""How an optimised model generates: over an ``MlaPagedCache``, and a decode step of it as one
module.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.features import COUNTS_POSITIONS
from mla_fusion.models.refusal import OptimizeError

PAGED = (None, "dynamic", "static")


def use_paged_cache(model: Any, block_size: int) -> None:
    """Shadow the method by which ``generate()`` prepares its cache, where it would make a dynamic
    or a static one; ``revert`` takes the shadow away.
    """
    from mla_fusion.models.hf.paged_cache import MlaPagedCache

    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        max_length = kwargs["max_cache_length"] if "max_cache_length" in kwargs else args[-1]
        given = model_kwargs.get("past_key_values")
        if isinstance(given, MlaPagedCache) and 0 <= given.max_cache_len < max_length:
            raise OptimizeError(
                "cache.full",
                f"generation may reach {max_length} tokens, the cache holds {given.max_cache_len}",
            )
        wanted = generation_config.cache_implementation
        if given is not None or generation_config.use_cache is False or wanted not in PAGED:
            return type(self)._prepare_cache_for_generation(
                self, generation_config, model_kwargs, *args, **kwargs
            )
        limit = None
        if wanted == "static":
            # As long as the longest so far: a compiled step then meets the same shapes again.
            asked = getattr(generation_config, "max_cache_len", None) or 0
            longest = max(max_length, asked, getattr(self, "_mla_fusion_longest", 0))
            limit = self._mla_fusion_longest = longest
        model_kwargs["past_key_values"] = MlaPagedCache(
            self, max_cache_len=limit, block_size=block_size
        )
        return None

    model._prepare_cache_for_generation = MethodType(prepare, model)


class DecodeStep(nn.Module):
    """``model`` over ``cache``, as ``torch.compile`` and ``mla_fusion.lower`` take it: ids ``[B,
    S]`` in, logits ``[B, S, vocabulary]`` out; the cache advances.

    The cache must have a fixed size and hold a first token, so that its pages are there to be
    written. Releases whose models would read the length of the cache as a number, which ends a
    graph, are told the positions.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        # also by themselves: lowering moves the tensors it finds in modules
        self._pages = cache.tensors()
        self._counts = COUNTS_POSITIONS.has(type(model).forward)

    def forward(self, input_ids: Tensor) -> Tensor:
        told: dict[str, Tensor] = {}
        if not self._counts:
            new = torch.arange(input_ids.shape[1], device=input_ids.device)
            told["cache_position"] = self.cache.get_seq_length() + new
        logits: Tensor = self.model(
            input_ids=input_ids, past_key_values=self.cache, use_cache=True, **told
        ).logits
        return logits
