"""The absorbed form computes what Hugging Face's own expanded attention computes."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.models.absorbed import AbsorbedAttention, AbsorbedDecoder
from mla_fusion.models.features import EXPANDS_AFTER_CACHE
from mla_fusion.models.hf import modeling, random_decoder
from mla_fusion.models.hf.latent_attention import LatentDims, expanded
from mla_fusion.tools.accuracy import distance
from mla_fusion.tools.paged import PagedBatch, random_batch

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
    caches = {
        name: [cache.double() for cache in getattr(batch, name)]
        for name in ("kv_caches", "kr_caches")
    }
    step = batch._replace(hidden=batch.hidden.double(), **caches)
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


def test_attention_without_query_lora_is_refused():
    source = modeling()
    config = source.DeepseekV3Config(hidden_size=64, q_lora_rank=None, num_attention_heads=2)
    with torch.device("meta"):
        attention = source.DeepseekV3Attention(config, 0)
    with pytest.raises(ValueError, match="no query LoRA"):
        AbsorbedAttention(attention, source.apply_rotary_pos_emb)


def test_a_fused_step_is_near_the_unfused_one_and_writes_no_other_row(decoder, batch):
    unfused, fused = batch.fresh(), batch.fresh()
    with torch.no_grad():
        run = torch.compile(decoder, backend=mf.backend(), fullgraph=True)
        assert distance(run(*fused), decoder(*unfused)) < 2e-2
    assert len(mf.reports()[-1].fused) == 2
    others = torch.ones(batch.kv_caches[0][..., 0].numel(), dtype=torch.bool)
    others[batch.slot_mapping] = False
    for step in range(2):
        for name in ("kv_caches", "kr_caches"):
            kept, ours, theirs = (getattr(one, name)[step] for one in (batch, fused, unfused))
            rows = [one.reshape(len(others), -1) for one in (kept, ours, theirs)]
            assert torch.equal(rows[0][others], rows[1][others])
            assert distance(rows[1][~others], rows[2][~others]) < 2e-2
