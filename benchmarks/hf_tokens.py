"""Do optimised Hugging Face models generate the same tokens, and round no worse?

    python benchmarks/hf_tokens.py [--tokens 64] [--json FILE]

Random weights of unit gain, two layers (longcat_flash: two attentions), latents of the kernel's
widths, two prompts of which one is padded. float32: greedy tokens. bfloat16: relative L2 error of
the logits of teacher-forced decode steps against the float32 original, of both sides.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch

from mla_fusion.models import hf

SIZES: dict[str, Any] = dict(
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=384,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_hidden_layers=2,
    vocab_size=1024,
    intermediate_size=512,
    moe_intermediate_size=64,
    # an expert chosen otherwise after rounding would outweigh all rounding
    first_k_dense_replace=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    pad_token_id=0,
    eos_token_id=None,
)
LONGCAT = dict(num_layers=1, ffn_hidden_size=512, expert_ffn_hidden_size=64, zero_expert_num=1)
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "longcat_flash": LONGCAT,
    "glm4_moe_lite": dict(mlp_layer_types=["dense", "dense"]),
    "youtu": {},
    "axk1": {},
    "minicpm3": {},
    "deepseek_v32": dict(index_n_heads=4, index_head_dim=64, index_topk=32),
}


def build(model_type: str) -> Any:
    hf.modeling()  # transformers, with or without a torch_npu that works
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SIZES, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def compare(model_type: str, tokens: int) -> dict[str, Any]:
    from transformers import DynamicCache

    model = build(model_type)
    ids = torch.randint(3, 1000, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=tokens, do_sample=False)

    def steps(text: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        model(input_ids=text[:, :12], past_key_values=cache)
        found = [
            model(input_ids=text[:, i : i + 1], past_key_values=cache).logits
            for i in range(12, text.shape[1])
        ]
        return torch.cat(found, 1).double()

    before = model.generate(ids, **options)
    exact = steps(before)
    hf.optimize(model)
    after = model.generate(ids, **options)
    hf.revert(model)
    model.bfloat16()
    original = steps(before)
    hf.optimize(model)
    optimized = steps(before)
    errors = [float((found - exact).norm() / exact.norm()) for found in (original, optimized)]
    equal = int((before == after)[:, 12:].sum())
    return {"tokens": equal, "of": 2 * tokens, "original": errors[0], "optimized": errors[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    print("| model type | equal tokens, float32 | error bfloat16, original | optimized | ratio |")
    print("|---|---:|---:|---:|---:|")
    with torch.no_grad():
        for model_type in MODELS:
            row = found[model_type] = compare(model_type, options.tokens)
            ratio = row["optimized"] / row["original"]
            figures = f"{row['original']:.2e} | {row['optimized']:.2e} | {ratio:.2f}"
            print(f"| {model_type} | {row['tokens']} of {row['of']} | {figures} |", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
