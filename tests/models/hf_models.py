"""Hugging Face's MLA models with small random weights; latents of the kernel's width if cheap."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch

import mla_fusion as mf

BASE: dict[str, Any] = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=48,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=48,
    num_hidden_layers=2,
    vocab_size=128,
    intermediate_size=64,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
KERNEL: dict[str, Any] = dict(
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    num_hidden_layers=3,
    first_k_dense_replace=3,
    intermediate_size=128,
)
"""Dims that the kernel takes."""

INDEXED_WITH_SINKS = dict(layer_types=["indexed_attention"] * 2, indexer_types=["full"] * 2)
INDEXER = dict(index_n_heads=4, index_head_dim=64, index_topk=8)
LONGCAT = dict(
    num_layers=1, ffn_hidden_size=64, expert_ffn_hidden_size=32, zero_expert_num=1, moe_topk=2
)
YARN = dict(
    rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=0.7, mscale_all_dim=0.9,
        original_max_position_embeddings=128, beta_fast=32, beta_slow=1,
    )
)  # fmt: skip
KIMI = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
LLAMA4 = {
    "rope_parameters": YARN["rope_parameters"]
    | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
}

# name: (model type, changes of BASE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2_lite": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_half": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3_yarn": ("deepseek_v3", YARN),
    "deepseek_v3_bias": ("deepseek_v3", {"attention_bias": True}),
    "longcat_flash": ("longcat_flash", LONGCAT),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "youtu": ("youtu", {}),
    "axk1": ("axk1", {}),
    "axk2": ("axk2", {}),
    "minicpm3": ("minicpm3", {}),
    "mistral4": ("mistral4", LLAMA4),  # scales its query by position
    "deepseek_v32": ("deepseek_v32", INDEXER),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXER),
    # Layers of linear attention beside the latents; kimi_linear does not rotate.
    "bailing_hybrid": ("bailing_hybrid", {"num_hidden_layers": 6, "q_lora_rank": None}),
    "kimi_linear": (
        "kimi_linear",
        {"num_hidden_layers": 4, "q_lora_rank": None, "layer_types": KIMI},
    ),
}

WITH_SINKS: tuple[str, dict[str, Any]] = ("hy_v4", INDEXED_WITH_SINKS)
"""HY-V4 adds a learnt sink to every softmax, which latents know nothing of."""


def build(
    name: str,
    changes: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
) -> Any:
    """A model of MODELS, of unit gain: greedy choices are no ties. Skips what the release lacks."""
    model_type, own = WITH_SINKS if name == "hy_v4" else MODELS[name]
    config = config_of(model_type, {**BASE, **own, **(changes or {})})
    source = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    kind = next(value for key, value in vars(source).items() if key.endswith("ForCausalLM"))
    return _randomised(kind._from_config(config, dtype=dtype, attn_implementation=attention), seed)


VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)


def build_multimodal(changes: dict[str, Any]) -> Any:
    """Mistral Large 4, its text changed: layers without rotation, or with another's latents."""
    text = {"model_type": "mistral_large4_text", **BASE, "num_hidden_layers": 4, **changes}
    config = config_of("mistral_large4", {"text_config": text, "vision_config": VISION})
    from transformers import AutoModelForImageTextToText

    return _randomised(AutoModelForImageTextToText.from_config(config, dtype=torch.float32), 0)


def _randomised(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def config_of(model_type: str, values: dict[str, Any]) -> Any:
    """A configuration for the installed release: transformers 4 has no ``rope_parameters``."""
    mf.offline.activate()  # transformers imports torch_npu where it is installed
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {__version__} has no {model_type}")
    rope = values.get("rope_parameters")
    if rope and not hasattr(AutoConfig.for_model(model_type), "rope_parameters"):
        values = {key: value for key, value in values.items() if key != "rope_parameters"}
        values |= {"rope_theta": rope["rope_theta"]}
        values |= {
            "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"}
        }
    # configurations add to what they are given
    return AutoConfig.for_model(model_type, **copy.deepcopy(values))


def prompt(batch: int = 2, length: int = 9, padded: int = 4) -> dict[str, torch.Tensor]:
    """Random ids; of the last sequence ``padded`` tokens on the left are padding."""
    ids = torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, :padded] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
