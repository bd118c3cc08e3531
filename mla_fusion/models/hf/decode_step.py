"""A decode step as one module: what ``torch.compile`` and ``mla_fusion.lower`` take."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class DecodeStep(nn.Module):
    """``model`` over ``cache``: ids ``[B, S]`` in, logits ``[B, S, vocabulary]`` out; the cache advances.

    The cache must have a fixed size and hold a first token, so that its pages are there to be written.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self._pages = cache.tensors()  # also by themselves: lowering moves the tensors it finds in modules

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True).logits
        return logits
