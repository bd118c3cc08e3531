"""CPU kernel of npu_sparse_flash_attention, in the form that absorbed MLA with an indexer calls."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.reference.paged_attention import attend


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
    # each token is a sequence whose pages have one row each: the picked ones
    picks = sparse_indices[:, :, 0].long()
    seen = (picks >= 0).cumprod(-1).sum(-1)
    first_rows = torch.arange(len(key)).view(-1, 1, 1) * key.shape[1]
    tables = (picks + first_rows).flatten(0, 1)
    q, q_rope = (part.flatten(0, 1).unsqueeze(1) for part in (query, query_rope))
    pools = [cache.flatten(0, 1).unsqueeze(1) for cache in (key, value, key_rope)]
    out, _ = attend(q, q_rope, pools, tables, seen.view(-1, 1), scale_value)
    nothing = query.new_empty(0, dtype=torch.float32)
    return out.view(query.shape).to(query.dtype), nothing, nothing.clone()
