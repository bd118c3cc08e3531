"""What optimize() leaves alone, and the reason that it gives."""

from __future__ import annotations

import copy
import inspect
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn

from mla_fusion.models import hf
from mla_fusion.models.features import EXPANDS_AFTER_CACHE

from .hf_models import BASE, build, prompt


def kv_bias(model: Any) -> None:
    up = model.model.layers[0].self_attn.kv_b_proj
    up.bias = nn.Parameter(torch.zeros(up.out_features))


def int8_weight(model: Any) -> None:
    up = model.model.layers[0].self_attn.kv_b_proj
    up.weight = nn.Parameter(up.weight.to(torch.int8), requires_grad=False)


def other_keys(model: Any) -> None:
    model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(
        lambda module, inputs, found: found.roll(1, -1)
    )


def no_expanding_projection(model: Any) -> None:
    model.model.layers[0].self_attn.kv_b_proj = nn.Identity()


def replaced_forward(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.forward = MethodType(type(attention).forward, attention)


def flash(model: Any) -> None:
    model.config._attn_implementation = "flash_attention_2"


def become(attention: Any, forward: Any) -> None:
    """A class of its own with this forward and no ``expand_kv``."""
    kind = type(attention)
    body = {"__call__": nn.Module.__call__, "__init__": kind.__init__, "forward": forward}
    attention.__class__ = type("Other", (nn.Module,), body)


def scoped(attention: Any, **names: Any) -> Any:
    """The forward of the attention with other meanings for some of the names that it looks up."""
    forward = inspect.unwrap(type(attention).forward)
    scope = {**forward.__globals__, **names}
    return FunctionType(
        forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
    )


def remote_code(model: Any) -> None:
    """As the code that checkpoints of DeepSeek-V2 and V3 bring: its own softmax."""

    def forward(self: Any, hidden_states: Any, past_key_value: Any = None, **kwargs: Any) -> Any:
        keys, values = past_key_value.update(
            self.kv_a_proj_with_mqa(hidden_states), hidden_states, self.layer_idx
        )
        return torch.matmul(torch.softmax(keys, dim=-1), values)

    become(model.model.layers[0].self_attn, forward)


def no_expansion(model: Any) -> None:
    """A forward that expands after the cache, without what expands."""
    attention = model.model.layers[0].self_attn
    if not EXPANDS_AFTER_CACHE.has(type(attention)):
        pytest.skip("this transformers has no expand_kv that could be taken away")
    become(attention, type(attention).forward)


def rotated_key_of_each_head(model: Any) -> None:
    """A forward that hands every head a rotated key of its own: there is more to cache than one."""
    attention = model.model.layers[0].self_attn
    if EXPANDS_AFTER_CACHE.has(type(attention)):
        pytest.skip("this transformers expands after its cache")
    heads = BASE["num_attention_heads"]
    become(
        attention,
        scoped(
            attention,
            apply_rotary_pos_emb_interleave=lambda q, k, cos, sin: (q, k.expand(-1, heads, -1, -1)),
        ),
    )


ALL_ATTENTION_FUNCTIONS: dict[str, Any] = {}


def keeping_state(model: Any) -> None:
    attention = model.model.layers[0].self_attn

    def forward(self: Any, hidden_states: Any, past_key_values: Any) -> Any:
        self.last = past_key_values.update(torch.zeros(1), hidden_states, 0)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self.last)

    if EXPANDS_AFTER_CACHE.has(type(attention)):
        attention.__class__ = type("Other", (type(attention),), {"forward": forward})
    else:
        become(attention, forward)


REFUSED = [
    ("kv_up.bias", kv_bias, 1),
    ("kv_up.weight", int8_weight, 1),
    ("kv_up.differs", other_keys, 1),
    ("kv_up.absent", no_expanding_projection, 1),
    ("forward.unknown", replaced_forward, 1),
    ("forward.unknown", keeping_state, 1),
    ("attention.implementation", flash, 2),
    ("cache.expanded", remote_code, 1),
    ("cache.expanded", no_expansion, 1),
    ("cache.expanded", rotated_key_of_each_head, 1),
]


@pytest.mark.parametrize(
    "code, change, count", REFUSED, ids=[change.__name__ for _, change, _ in REFUSED]
)
def test_what_does_not_fit_is_left_alone(code: str, change: Any, count: int) -> None:
    model = build("deepseek_v3")
    change(model)
    before = [dict(vars(module)) for module in model.modules()]
    summary = hf.optimize(model)
    assert [item.code for item in summary.skipped] == [code] * count
    assert summary.skipped[0].name == "model.layers.0.self_attn" and summary.skipped[0].message
    left = model.model.layers[0].self_attn
    assert vars(left).keys() == next(
        held.keys() for module, held in zip(model.modules(), before, strict=True) if module is left
    )
    assert len(summary.converted) == 2 - count


def test_attention_with_sinks_is_left_alone() -> None:
    summary = hf.optimize(build("hy_v4", attention="eager"))
    assert (
        not summary.converted
        and [item.code for item in summary.skipped] == ["attention.differs"] * 2
    )


def test_code_of_a_checkpoint_that_expands_before_it_caches_is_named() -> None:
    """As the remote code of DeepSeek-V2 and V3: softmax_scale, no expand_kv."""

    class Remote(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_idx, self.softmax_scale, self.kv_lora_rank = 0, 0.1, 32
            self.q_proj = nn.Linear(64, 4 * 48)
            self.kv_a_proj_with_mqa = nn.Linear(64, 32 + 16, bias=False)
            self.kv_a_layernorm = nn.RMSNorm(32)
            self.kv_b_proj = nn.Linear(32, 4 * 64, bias=False)
            self.o_proj = nn.Linear(4 * 32, 64, bias=False)

    summary = hf.optimize(nn.ModuleDict({"self_attn": Remote()}))
    assert [(item.name, item.code) for item in summary.skipped] == [("self_attn", "cache.expanded")]


def test_a_model_without_latents_is_left_alone() -> None:
    import transformers

    config = transformers.LlamaConfig(
        **{key: BASE[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    )
    model = transformers.LlamaForCausalLM(config)
    summary = hf.optimize(model)
    assert [item.code for item in summary.skipped] == [
        "attention.not_mla"
    ] * 2 and not summary.converted
    assert "_prepare_cache_for_generation" not in vars(model)
    with pytest.raises(hf.OptimizeError, match=r"\[cache.kind\]"):
        hf.MlaPagedCache(model)


def test_no_rotated_key_is_a_reason() -> None:
    model = build("deepseek_v3")
    attention = model.model.layers[0].self_attn
    attention.kv_a_proj_with_mqa = nn.Linear(64, 512, bias=False)
    attention.qk_rope_head_dim = 0
    assert hf.optimize(model).skipped[0].code == "rope.absent"


def test_another_attention_chosen_afterwards_is_refused() -> None:
    model = build("deepseek_v3")
    hf.optimize(model)
    attention = model.model.layers[0].self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "flash_attention_2"
    with pytest.raises(hf.OptimizeError, match=r"\[attention.implementation\]"):
        model(**prompt())
