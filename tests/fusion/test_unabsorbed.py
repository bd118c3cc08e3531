"""No W_uk product, ``Config(targets=("v3", "identity"))``: q_nope is the kernel's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import HCQ, HE, paged_args
from tests.catalogue.unabsorbed import PaddedQuery
from tests.harness import assert_as_exact, clones, run_fused

IDENTITY = mf.Config(targets=("v3", "identity"), verify="all")


class HuggingFace(nn.Module):
    """Hugging Face's DeepseekV3Attention without a cache: per-head keys, values from kv_b_proj."""

    def __init__(self) -> None:
        super().__init__()
        mf.offline.activate()  # transformers imports torch_npu where it is installed
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3Attention,
            DeepseekV3RotaryEmbedding,
        )

        config = DeepseekV3Config(
            hidden_size=HE,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=HCQ,
            num_hidden_layers=1,
            attn_implementation="sdpa",
        )
        self.attention = DeepseekV3Attention(config, 0).bfloat16()
        self.rotary = DeepseekV3RotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        return self.attention(x, self.rotary(x, positions), attention_mask=None)[0]


def test_hugging_face_attention_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = HuggingFace().eval(), (torch.randn(2, 5, HE).bfloat16(),)
    fused = run_fused(model, clones(x), IDENTITY)
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement.startswith("staged") and fusion.dims["D"] == 128
    assert_as_exact(model, x, fused)


@pytest.mark.parametrize("hook", [False, True])
def test_ge_graph_of_the_real_torchair(hook: bool) -> None:
    operators = mf.lower(PaddedQuery(), *paged_args(), config=IDENTITY, hook=hook).ge_ops
    assert operators["MlaPrologV3"] == 1 and "RmsNorm" not in operators
