"""The absorbed form computes what Hugging Face's own expanded attention computes."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.models.absorbed import AbsorbedAttention, AbsorbedDecoder
from mla_fusion.models.features import EXPANDS_AFTER_CACHE
from mla_fusion.models.hf import modeling, random_decoder
from mla_fusion.models.hf.latent_attention import LatentDims, expanded
from mla_fusion.tools import accuracy
from mla_fusion.tools.paged import BLOCK_SIZE, PagedBatch, random_batch

HIDDEN = 1024


@pytest.fixture(scope="module")
def decoder() -> AbsorbedDecoder:
    return random_decoder(layers=2, heads=2, hidden=HIDDEN, intermediate=64)


@pytest.fixture
def batch() -> PagedBatch:
    return random_batch(layers=2, batch=3, hidden=HIDDEN, history=200)


def test_attention_equals_hugging_face_on_every_history(decoder, batch):
    """HF's forward over a DynamicCache of the same latents, one sequence at a time, in float64."""
    from transformers import DynamicCache

    absorbed = decoder.layers[0].self_attn.double()
    hf = absorbed.attention
    step = batch.fresh(torch.float64)
    cos, sin = decoder.rotary_emb(step.hidden, step.positions.unsqueeze(0))
    try:
        with torch.no_grad():
            got = absorbed(
                step.hidden,
                cos[0],
                sin[0],
                step.slot_mapping,
                step.block_tables,
                step.seq_lens,
                step.kv_caches[0],
                step.kr_caches[0],
            )
            for index, length in enumerate(batch.seq_lens.tolist()):
                past = DynamicCache()
                caches = (
                    batch.kv_caches[0][batch.block_tables[index]],
                    batch.kr_caches[0][batch.block_tables[index]],
                )
                kv, kr = (cache.flatten(0, 1)[: length - 1, 0].double() for cache in caches)
                held = kv[None, None], kr[None, None]
                if not EXPANDS_AFTER_CACHE.has(type(hf)):
                    dims = LatentDims(
                        hf.kv_lora_rank, hf.qk_rope_head_dim, hf.qk_nope_head_dim, hf.v_head_dim
                    )
                    held = expanded(hf.kv_b_proj(held[0]), held[1], dims)
                past.update(*held, 0)
                tables = (cos[:, index : index + 1], sin[:, index : index + 1])
                want, _ = hf(step.hidden[index][None, None], tables, None, past)
                torch.testing.assert_close(got[index], want[0, 0], rtol=1e-5, atol=1e-6)
    finally:
        absorbed.bfloat16()


def test_only_the_slots_are_written(decoder, batch):
    step = batch.fresh()
    decoder(*step)
    for before, after in zip(
        (*batch.kv_caches, *batch.kr_caches), (*step.kv_caches, *step.kr_caches), strict=True
    ):
        width = before.shape[-1]
        changed = (before != after).view(-1, width).any(-1).nonzero().flatten()
        assert changed.tolist() == sorted(batch.slot_mapping.tolist())


def test_batch_is_consistent(batch):
    assert len(set(batch.block_tables.flatten().tolist())) == batch.block_tables.numel()
    for table, position, slot in zip(
        batch.block_tables, batch.positions, batch.slot_mapping, strict=True
    ):
        assert slot == table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    assert torch.equal(batch.positions, batch.seq_lens - 1)


def test_parameters_are_shared(decoder):
    again = AbsorbedAttention(
        decoder.layers[0].self_attn.attention, lambda *tables: (tables[0], tables[1])
    )
    assert again.attention.q_a_proj.weight is decoder.layers[0].self_attn.attention.q_a_proj.weight


def test_attention_without_query_lora_is_refused():
    source = modeling()
    config = source.DeepseekV3Config(hidden_size=64, q_lora_rank=None, num_attention_heads=2)
    with torch.device("meta"):
        attention = source.DeepseekV3Attention(config, 0)
    with pytest.raises(ValueError, match="no query LoRA"):
        AbsorbedAttention(attention, source.apply_rotary_pos_emb)


def test_fused_is_as_near_to_float64_as_unfused(decoder, batch):
    def compiled(module):
        return torch.compile(module, backend=mf.backend(), fullgraph=True)

    with torch.no_grad():
        found = accuracy.measure_prologues(decoder, batch, compiled) + accuracy.measure_model(
            decoder, batch, compiled
        )
    assert len(found) == 2 * 4 + 1 + 2 * 2
    assert [item for item in found if item.problems] == []
    assert len(mf.reports()[-1].fused) == 2


def test_a_changed_row_and_a_larger_error_are_failures():
    assert accuracy.Measurement("layer 0", "kv_cache", 1e-3, 1e-3, untouched=False).problems
    assert accuracy.Measurement("layer 0", "query", 1e-3, 1.2e-3).problems
    assert not accuracy.Measurement("layer 0", "query", 1e-3, 1.0e-3).problems
