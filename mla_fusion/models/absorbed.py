"""Hugging Face's DeepSeek-V3 attention in the absorbed, paged form that serving stacks decode with.

Hugging Face expands every cached latent to keys and values of all heads. Decoding keeps the latent:
``(q W_uk) . c_kv`` equals ``q . (W_uk c_kv)``, so W_uk moves to the query and W_uv to the output.
The modules below differ from Hugging Face's own layers only in this. They share the parameters, and
call the same norms and rotary functions. Tokens are rows, ``[T, hidden]``; each has a row of the
block table and a length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.attention import mla_paged_attention

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class AbsorbedAttention(nn.Module):
    """``DeepseekV3Attention`` over latent caches ``[BlockNum, BlockSize, 1, 512]`` and ``[.., 1,
    64]``.

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
        w_uk, _ = self._up_projections()
        query = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        kv_cache.view(-1, hf.kv_lora_rank)[slot_mapping] = c_kv
        kr_cache.view(-1, hf.qk_rope_head_dim)[slot_mapping] = k_pe.squeeze(1)
        return query, query_rope

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
    ) -> Tensor:
        """Returns the attention of every token over the first ``seq_lens`` positions of its blocks,
        ``[T, hidden]``.
        """
        hf = self.attention
        query, query_rope = self.prologue(hidden, cos, sin, slot_mapping, kv_cache, kr_cache)
        cached = kv_cache, kr_cache, block_tables, seq_lens
        context: Any = mla_paged_attention(
            query, query_rope, *cached, scale=hf.scaling, out_layout="NTD"
        )
        _, w_uv = self._up_projections()
        output: Tensor = hf.o_proj(torch.bmm(context, w_uv.mT).transpose(0, 1).flatten(1))
        return output

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Returns W_uk ``[N, D, 512]`` and W_uv ``[N, Dv, 512]``, the parts of ``kv_b_proj``."""
        hf = self.attention
        per_head = hf.kv_b_proj.weight.view(hf.num_heads, -1, hf.kv_lora_rank)
        w_uk, w_uv = per_head.split([hf.qk_nope_head_dim, hf.v_head_dim], dim=1)
        return w_uk, w_uv


class AbsorbedDecoder(nn.Module):
    """``DeepseekV3DecoderLayer``s with absorbed attentions, over a pair of caches a layer.

    A step decodes a token of each sequence of a batch.
    """

    def __init__(self, layers: Sequence[Any], rotary_emb: nn.Module, rotate: Rotate) -> None:
        super().__init__()
        for layer in layers:
            layer.self_attn = AbsorbedAttention(layer.self_attn, rotate)
        self.layers: Any = nn.ModuleList(layers)
        self.rotary_emb = rotary_emb

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        kv_caches: Sequence[Tensor],
        kr_caches: Sequence[Tensor],
    ) -> Tensor:
        """Runs a decode step. Returns ``[T, hidden]``.

        hidden        [T, hidden] of the new tokens
        positions     [T] int64, their positions
        slot_mapping  [T] int64, rows of the caches seen as ``[BlockNum * BlockSize, width]``
        block_tables  [T, blocks] int64, seq_lens [T] int64 with the new token counted
        """
        cos, sin = (table.squeeze(0) for table in self.rotary_emb(hidden, positions.unsqueeze(0)))
        shared = cos, sin, slot_mapping, block_tables, seq_lens
        for layer, *caches in zip(self.layers, kv_caches, kr_caches, strict=True):
            hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), *shared, *caches)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden
