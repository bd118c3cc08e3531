"""A decode step as one module: what ``torch.compile`` and ``mla_fusion.lower`` take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.features import COUNTS_POSITIONS


class DecodeStep(nn.Module):
    """``model`` over ``cache``: ids ``[B, S]`` in, logits ``[B, S, vocabulary]`` out; the cache
    advances.

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
