"""Forwards of their own, as code beside transformers has: converted, or refused with what is so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_fusion.models import hf
from mla_fusion.models.features import OWN_CLASS
from mla_fusion.models.hf import modeling

from .hf_models import build, prompt

modeling()
modeling_utils = pytest.importorskip("transformers.modeling_utils")
deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
ALL_ATTENTION_FUNCTIONS = modeling_utils.ALL_ATTENTION_FUNCTIONS
eager_attention_forward = deepseek.eager_attention_forward
rotate = deepseek.apply_rotary_pos_emb_interleave

Attend = Callable[..., Tensor]


def by_table(module: Any, *states: Any) -> Any:
    raise NotImplementedError  # the forward calls the table itself


def expanding(
    parts: Callable[..., tuple[Any, Any]], attend: Attend = by_table, longest: int = 1 << 20
) -> Any:
    """Expands latents before it caches them; up to ``longest`` tokens go to the table."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        batch, tokens, _ = hidden_states.shape
        nope, rope, value = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_nope, q_pe = (
            q.view(batch, tokens, -1, nope + rope).transpose(1, 2).split([nope, rope], dim=-1)
        )
        c_kv, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, rope], dim=-1)
        kv = (
            self.kv_b_proj(self.kv_a_layernorm(c_kv))
            .view(batch, tokens, -1, nope + value)
            .transpose(1, 2)
        )
        k_nope, values = parts(kv, nope, value)
        q_pe, k_pe = rotate(q_pe, k_pe.view(batch, 1, tokens, rope), *position_embeddings)
        query = torch.cat((q_nope, q_pe), dim=-1)
        keys = torch.cat((k_nope, k_pe.expand(*k_nope.shape[:-1], -1)), dim=-1)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        if tokens > longest:
            return self.o_proj(
                attend(self, query, keys, values, attention_mask).reshape(batch, tokens, -1)
            ), None
        usual = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        found, _ = usual(self, query, keys, values, attention_mask, scaling=self.scaling)
        return self.o_proj(found.reshape(batch, tokens, -1)), None

    return forward


def with_forward(forward: Any, **changes: Any) -> Any:
    model = build("deepseek_v3", changes)
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        body = {"__call__": nn.Module.__call__, "__init__": kind.__init__, "forward": forward}
        layer.self_attn.__class__ = type("Own", (nn.Module,), body)
    return model


def by_method(kv: Any, nope: int, value: int) -> Any:
    return kv.split([nope, value], dim=-1)


def test_an_attention_that_expands_before_it_caches_is_converted() -> None:
    model = with_forward(expanding(by_method))
    with torch.no_grad():
        wanted = model(**prompt()).logits
        assert len(hf.optimize(model).converted) == 2
        torch.testing.assert_close(model(**prompt()).logits, wanted)


@pytest.mark.parametrize("name", ["qk_nope_head_dim", "v_head_dim"])
def test_a_module_that_lacks_what_it_reads_is_refused(name: str) -> None:
    model = build("deepseek_v3", {})
    for layer in model.model.layers:
        delattr(layer.self_attn, name)
    skipped = hf.optimize(model).skipped
    assert len(skipped) == 2 and all(name in item.message for item in skipped), skipped


def attending(self: Any, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
    keys, values = past_key_values.update(
        self.kv_a_proj_with_mqa(hidden_states), hidden_states, self.layer_idx
    )
    return torch.matmul(keys.softmax(-1), values), None


def test_another_class_is_named_where_transformers_has_one() -> None:
    model = with_forward(attending)
    assert all(OWN_CLASS in item.message for item in hf.optimize(model).skipped)
    model.config.model_type = "of_my_own"
    assert not any(OWN_CLASS in item.message for item in hf.optimize(model).skipped)
