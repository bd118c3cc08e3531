"""CPU kernel of npu_sparse_flash_attention, in the form that absorbed MLA with an indexer calls."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.reference.numerics import working_dtype


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    **others: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns attention of ``query [B, S, N, 512]`` over the rows of ``key [B, L, 1, 512]`` that
    ``sparse_indices [B, S, 1, k]`` names up to the first -1, and two empty tensors.

    Raises ValueError for any other form.
    """
    form = (layout_query, layout_kv, sparse_block_size, sparse_mode, attention_mode)
    extras = [name for name, argument in others.items() if isinstance(argument, Tensor)]
    is_known = form == ("BSND", "BSND", 1, 0, 2) and not extras
    if not is_known or query_rope is None or key_rope is None or value is None:
        raise ValueError(
            "npu_sparse_flash_attention: the CPU kernel has no form "
            f"{form} with {', '.join(extras)}"
        )
    work = working_dtype(query.dtype)
    picks = sparse_indices[:, :, 0].long()
    seen = (picks >= 0).cumprod(-1).bool()
    place = picks.clamp_min(0).flatten(1).unsqueeze(-1)

    def rows(cache: Tensor) -> Tensor:
        """Returns the picked rows of a cache, [B, S, k, width]."""
        picked = cache[:, :, 0].gather(1, place.expand(-1, -1, cache.shape[-1]))
        return picked.unflatten(1, picks.shape[1:]).to(work)

    scores = query.to(work) @ rows(key).mT + query_rope.to(work) @ rows(key_rope).mT
    scores = (scores * scale_value).masked_fill(~seen.unsqueeze(2), float("-inf"))
    out = (torch.softmax(scores, -1).nan_to_num() @ rows(value)).to(query.dtype)
    nothing = query.new_empty(0, dtype=torch.float32)
    return out, nothing, nothing.clone()
