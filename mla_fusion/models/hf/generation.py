"""``generate()`` of an optimised model makes an ``MlaPagedCache`` where it would make a dynamic or
a static cache.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from mla_fusion.models.cache.paged_cache import MlaPagedCache
from mla_fusion.models.refusal import OptimizeError

PAGED = (None, "dynamic", "static")


def use_paged_cache(model: Any, block_size: int) -> None:
    """Shadow the method by which ``generate()`` prepares its cache; ``revert`` takes the shadow
    away.
    """

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
