"""The prologue of Hugging Face's DeepSeek-V3 attention, absorbed and over pages, as serving stacks
decode with it: a reference for calls that are written by hand.

Hugging Face expands every cached latent to keys and values of all heads. Decoding keeps the latent:
``(q W_uk) . c_kv`` equals ``q . (W_uk c_kv)``, so W_uk moves to the query. The module below differs
from Hugging Face's own only in this. It shares the parameters, and calls the same norms and rotary
function. Tokens are rows, ``[T, hidden]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class AbsorbedAttention(nn.Module):
    """``DeepseekV3Attention`` over latent caches ``[BlockNum, BlockSize, 1, 512]`` and ``[.., 1,
    64]``, up to the product with the latents.

    rotate  the rotary function of Hugging Face; heads are axis 1

    Raises ValueError for an attention without a query LoRA, which has no such form.
    """

    def __init__(self, attention: Any, rotate: Rotate) -> None:
        super().__init__()
        if getattr(attention, "q_a_proj", None) is None:
            raise ValueError("this attention has no query LoRA (q_lora_rank is None)")
        self.attention: Any = attention
        self.rotate = rotate

    def prologue(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Writes the new rows. Returns query ``[T, N, 512]`` and query_rope ``[T, N, 64]``."""
        hf = self.attention
        widths = [hf.qk_nope_head_dim, hf.qk_rope_head_dim]
        q = hf.q_b_proj(hf.q_a_layernorm(hf.q_a_proj(hidden)))
        q_nope, q_pe = q.view(-1, hf.num_heads, hf.qk_head_dim).split(widths, dim=-1)
        latent = hf.kv_a_proj_with_mqa(hidden)
        c_kv, k_pe = latent.split([hf.kv_lora_rank, hf.qk_rope_head_dim], dim=-1)
        c_kv = hf.kv_a_layernorm(c_kv)
        # sequences of one token each, [T, heads, 1, Dr]: some releases take only four dimensions
        query_rope, k_pe = self.rotate(
            q_pe.unsqueeze(2), k_pe[:, None, None], cos.unsqueeze(1), sin.unsqueeze(1)
        )
        query_rope, k_pe = query_rope.squeeze(2), k_pe.squeeze(2)
        per_head = hf.kv_b_proj.weight.view(hf.num_heads, -1, hf.kv_lora_rank)
        w_uk = per_head[:, : hf.qk_nope_head_dim]
        query = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        kv_cache.view(-1, hf.kv_lora_rank)[slot_mapping] = c_kv
        kr_cache.view(-1, hf.qk_rope_head_dim)[slot_mapping] = k_pe.squeeze(1)
        return query, query_rope
