"""Absorbed prologue and attention over pages compute what Hugging Face's own attention does."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.models.absorbed import AbsorbedAttention
from mla_fusion.models.attention import mla_paged_attention
from mla_fusion.models.features import EXPANDS_AFTER_CACHE
from mla_fusion.models.hf import modeling
from mla_fusion.models.hf.latent_attention import LatentDims, expanded
from mla_fusion.tools.accuracy import distance

HIDDEN, BLOCK_SIZE, LENGTHS = 1024, 16, [5, 40, 33]


class Inputs(NamedTuple):
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    kv_cache: Tensor
    kr_cache: Tensor


def made(dtype: torch.dtype) -> tuple[AbsorbedAttention, Inputs, Tensor]:
    """An attention, a new token of each of three sequences, and the blocks of the sequences."""
    torch.manual_seed(0)
    source = modeling()
    config = source.DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64
    )
    config._attn_implementation = "eager"
    attention = source.DeepseekV3Attention(config, 0).eval().requires_grad_(False)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, weight.dim() == 1, weight.shape[-1] ** -0.5)
    positions = torch.tensor(LENGTHS) - 1
    tables = torch.randperm(12)[:9].view(3, 3)  # the other blocks are nobody's
    rows = tables.gather(1, positions.unsqueeze(1) // BLOCK_SIZE).squeeze(1)
    hidden = torch.randn(3, HIDDEN, dtype=dtype)
    rotary = source.DeepseekV3RotaryEmbedding(config)
    cos, sin = (table.squeeze(0) for table in rotary(hidden, positions.unsqueeze(0)))
    caches = (torch.randn(12, BLOCK_SIZE, 1, width, dtype=dtype) for width in (512, 64))
    inputs = Inputs(hidden, cos, sin, rows * BLOCK_SIZE + positions % BLOCK_SIZE, *caches)
    rotate = source.apply_rotary_pos_emb_interleave
    return AbsorbedAttention(attention.to(dtype), rotate), inputs, tables


def step(absorbed: AbsorbedAttention, inputs: Inputs, tables: Tensor) -> Tensor:
    hf, caches = absorbed.attention, inputs[-2:]
    queries = absorbed.prologue(*inputs)
    lengths, options = torch.tensor(LENGTHS), {"scale": hf.scaling, "out_layout": "NTD"}
    context = mla_paged_attention(*queries, *caches, tables, lengths, **options)
    w_uv = hf.kv_b_proj.weight.view(hf.num_heads, -1, hf.kv_lora_rank)[:, hf.qk_nope_head_dim :]
    return hf.o_proj(torch.bmm(context, w_uv.mT).transpose(0, 1).flatten(1))


def test_attention_equals_hugging_face_on_every_history() -> None:
    """HF's forward over a DynamicCache of the same latents, one sequence at a time, in float64."""
    from transformers import DynamicCache

    absorbed, inputs, tables = made(torch.float64)
    got, hf = step(absorbed, inputs, tables), absorbed.attention
    for index, length in enumerate(LENGTHS):
        blocks = (cache[tables[index]].flatten(0, 1) for cache in inputs[-2:])
        held = tuple(rows[: length - 1, 0][None, None] for rows in blocks)
        if not EXPANDS_AFTER_CACHE.has(type(hf)):
            dims = LatentDims(
                hf.kv_lora_rank, hf.qk_rope_head_dim, hf.qk_nope_head_dim, hf.v_head_dim
            )
            held = expanded(hf.kv_b_proj(held[0]), held[1], dims)
        past = DynamicCache()
        past.update(*held, 0)
        angles = inputs.cos[None, index : index + 1], inputs.sin[None, index : index + 1]
        want, _ = hf(inputs.hidden[index][None, None], angles, None, past)
        torch.testing.assert_close(got[index], want[0, 0], rtol=1e-5, atol=1e-6)


def test_attention_without_query_lora_is_refused() -> None:
    source = modeling()
    config = source.DeepseekV3Config(hidden_size=64, q_lora_rank=None, num_attention_heads=2)
    with torch.device("meta"):
        attention = source.DeepseekV3Attention(config, 0)
    with pytest.raises(ValueError, match="no query LoRA"):
        AbsorbedAttention(attention, source.apply_rotary_pos_emb)


def test_a_fused_step_is_near_the_unfused_one_and_only_the_slots_are_written() -> None:
    absorbed, inputs, tables = made(torch.bfloat16)
    unfused, fused = (
        Inputs(*inputs[:-2], *(cache.clone() for cache in inputs[-2:])) for _ in range(2)
    )
    with torch.no_grad():
        run = torch.compile(step, backend=mf.backend(), fullgraph=True)
        assert distance(run(absorbed, fused, tables), step(absorbed, unfused, tables)) < 2e-2
    assert len(mf.reports()[-1].fused) == 1
    for caches in zip(inputs[-2:], fused[-2:], unfused[-2:], strict=True):
        kept, ours, theirs = (cache.flatten(0, 2) for cache in caches)
        changed = (kept != ours).any(-1).nonzero().flatten()
        assert changed.tolist() == sorted(inputs.slots.tolist())
        assert torch.equal((kept != theirs).any(-1).nonzero().flatten(), changed)
        assert distance(ours[changed], theirs[changed]) < 2e-2
