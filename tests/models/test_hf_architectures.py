"""Hugging Face's MLA models as they are, at sizes the kernel takes: what fuses under the identity
form, what must not.

None of them is absorbed, so only ``Config(targets=("v3", "identity"))`` lets the pass act at all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.models.features import TWO_WIDTHS
from tests.exhaustive import one_in

from .hf_models import config_of

IDENTITY = mf.Config(targets=("v3", "identity"))
SIZES = dict(
    hidden_size=1024,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_hidden_layers=1,
    vocab_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
INDEXER = dict(index_n_heads=4, index_head_dim=64, index_topk=16)
LONGCAT = dict(
    num_layers=1,
    num_hidden_layers=2,
    ffn_hidden_size=128,
    expert_ffn_hidden_size=64,
    zero_expert_num=1,
    moe_topk=2,
)

# name: (model type, changes, attributes that the call must have beside the epsilons and the cache
# mode)
FUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}, {}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "deepseek_v3_half": ("deepseek_v3", {"rope_interleave": False}, {}),
    "deepseek_v32": ("deepseek_v32", INDEXER, {"query_norm_flag": True}),
    "youtu": ("youtu", {}, {}),
    "axk1": ("axk1", {}, {}),
    "minicpm3": ("minicpm3", {}, {}),
    "longcat_flash": (
        "longcat_flash",
        LONGCAT,
        {"qc_qr_scale": (1024 / 1536) ** 0.5},  # rows for no cache are scaled by the graph
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**INDEXER, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 192},
        {"query_norm_flag": True},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no_q_lora": ("deepseek_v3", {"q_lora_rank": None}, "q_lora.absent"),
    "bias": ("deepseek_v3", {"attention_bias": True}, "linear.bias"),
    "hidden_size": ("deepseek_v3", {"hidden_size": 1152}, "contract:dims.he"),
    "rope_dim": ("deepseek_v3", {"qk_rope_head_dim": 32}, "rope.absent"),
}


def build(
    model_type: str, changes: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> torch.nn.Module:
    config = config_of(model_type, {**SIZES, **changes})
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def compiled_logits(model: torch.nn.Module, **inputs: Any) -> tuple[torch.Tensor, list[mf.Report]]:
    torch._dynamo.reset()
    known = len(mf.reports())
    with torch.no_grad():
        logits = torch.compile(model, backend=mf.backend(IDENTITY), dynamic=False)(**inputs).logits
    return logits, mf.reports()[known:]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(4, FUSED))
def test_fuses_every_layer_as_exactly(name: str) -> None:
    model_type, changes, attributes = FUSED[name]
    model = build(model_type, changes)
    inputs = {"input_ids": torch.randint(3, 60, (2, 6)), "use_cache": False}
    found, reports = compiled_logits(model, **inputs)
    fusions = [fusion for report in reports for fusion in report.fused]
    assert fusions and not [item for report in reports for item in report.rejected], "\n".join(
        map(str, reports)
    )
    for fusion in fusions:
        for attribute, value in attributes.items():
            assert fusion.attributes[attribute] == pytest.approx(value, rel=1e-6)
        assert {
            "qc_qr_scale",
            "kc_scale",
            "query_norm_flag",
        } & fusion.attributes.keys() == attributes.keys()
    with torch.no_grad():
        plain = model(**inputs).logits
        exact = model.float()(**inputs).logits  # float64 stops in the experts of some releases
    errors = [float((logits.double() - exact).norm() / exact.norm()) for logits in (found, plain)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("name", one_in(2, REFUSED))
def test_what_the_kernel_cannot_do_stays(name: str) -> None:
    model_type, changes, code = REFUSED[name]
    inputs = {"input_ids": torch.randint(3, 60, (2, 6)), "use_cache": False}
    _, reports = compiled_logits(build(model_type, changes), **inputs)
    assert [item.code for report in reports for item in report.rejected] == [code]
    assert not [fusion for report in reports for fusion in report.fused]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_decode_steps_over_huggingface_caches(kind: str) -> None:
    """Two greedy tokens after a prompt: transformers' caches stay, their writes are staged."""
    model = build("deepseek_v3", {})
    from transformers import DynamicCache, StaticCache
    from transformers.cache_utils import StaticLayer

    if kind == "static" and not TWO_WIDTHS.has(StaticLayer):
        pytest.skip(
            "keys and values of this release's static cache have one width, those of the model two"
        )

    def new_cache() -> Any:
        if kind == "static":
            return StaticCache(config=model.config, max_cache_len=32)
        return DynamicCache(config=model.config)

    def decode(step: Any) -> tuple[list[int], torch.Tensor]:
        cache, tokens = new_cache(), []
        with torch.no_grad():
            ids = torch.tensor([[5, 9, 33, 12]])
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            for _ in range(2):
                tokens.append(int(logits[0, -1].argmax()))
                logits = step(
                    input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True
                ).logits
        return tokens, logits

    torch._dynamo.reset()
    known = len(mf.reports())
    expected, plain = decode(model)
    found, logits = decode(torch.compile(model, backend=mf.backend(IDENTITY), dynamic=False))
    reports = mf.reports()[known:]
    assert sum(len(report.fused) for report in reports) >= 1, "\n".join(map(str, reports))
    assert not [item for report in reports for item in report.rejected]
    assert found == expected
    assert float((logits - plain).norm() / plain.norm()) < 2e-2
