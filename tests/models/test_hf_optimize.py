"""optimize(): the same tokens from absorbed attention over paged latents, and back again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_fusion.models import hf
from mla_fusion.models.features import EXPANDS_AFTER_CACHE, TWO_WIDTHS
from tests.exhaustive import one_in
from tests.harness import distance as error

from .hf_models import KERNEL, MODELS, build, build_multimodal, prompt

GREEDY: dict[str, Any] = dict(do_sample=False, return_dict_in_generate=True, output_logits=True)
LATENT = 512 + 64


def two_widths() -> bool:
    """Has the release a static cache for keys and values of different widths?"""
    from transformers.cache_utils import StaticLayer

    return TWO_WIDTHS.has(StaticLayer)


LONG = ("deepseek_v2", "deepseek_v3", "longcat_flash", "glm4_moe_lite", "minicpm3", "deepseek_v32")


@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_greedy_tokens_are_the_same(name: str) -> None:
    """32 (others: 16) new float32 tokens, left-padded; logits within 1e-4 of the original's."""
    model, inputs = build(name), prompt()
    tokens = 32 if name in LONG else 16
    before = model.generate(**inputs, max_new_tokens=tokens, **GREEDY)
    summary = hf.optimize(model)
    assert summary.converted and not summary.skipped, str(summary)
    after = model.generate(**inputs, max_new_tokens=tokens, **GREEDY)
    assert isinstance(after.past_key_values, hf.MlaPagedCache)
    assert torch.equal(after.sequences, before.sequences)
    assert max(error(a, b) for a, b in zip(after.logits, before.logits, strict=True)) < 1e-4


@pytest.mark.parametrize(
    "changes, converted, how",
    [
        ({"no_rope_layers": [1, 1, 1, 0]}, [0, 1, 2], {"cache_implementation": "static"}),
        ({"no_rope_layers": [0, 1, 1, 1]}, [1, 2, 3], {"num_beams": 3}),
        ({"no_rope_layers": [1] * 4, "kv_source_layers": [0, 0, 2, 2]}, [0, 2], {}),
        ({"no_rope_layers": [1] * 4, "indexer_types": ["full", "shared"] * 2}, [0, 1, 2, 3], {}),
    ],
)
def test_layers_that_are_not_converted_keep_their_cache(changes, converted, how) -> None:
    model, inputs = build_multimodal(changes), prompt()
    wanted = model.generate(**inputs, max_new_tokens=12, do_sample=False, **how)
    summary = hf.optimize(model)
    assert [item.layer for item in summary.converted] == converted
    assert {item.kernel.partition(":")[0] for item in summary.converted} == {"q_lora.absent"}
    found = model.generate(
        **inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **how
    )
    assert torch.equal(found.sequences, wanted)
    assert [layer.index for layer in found.past_key_values.paged_layers] == converted


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "longcat_flash"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_caches_that_generate_is_asked_for(name: str, cache: str) -> None:
    model, inputs = build(name), prompt()
    asked = {"cache_implementation": cache} if cache == "dynamic" or two_widths() else {}
    before = model.generate(**inputs, max_new_tokens=16, **asked, **GREEDY)
    hf.optimize(model, block_size=16)
    after = model.generate(**inputs, max_new_tokens=16, cache_implementation=cache, **GREEDY)
    assert torch.equal(after.sequences, before.sequences)
    assert isinstance(after.past_key_values, hf.MlaPagedCache)
    assert after.past_key_values.max_cache_len == (24 if cache == "static" else -1)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_caches_of_transformers_go_on_working(kind: str) -> None:
    import transformers

    model, inputs = build("deepseek_v3"), prompt()
    before = model.generate(**inputs, max_new_tokens=12, **GREEDY)
    hf.optimize(model)
    options = {"max_cache_len": 32} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **options)
    if kind == "StaticCache" and not two_widths():
        with pytest.raises(
            hf.OptimizeError, match=r"\[cache.kind\] .*MlaPagedCache.*transformers>=5.0"
        ):
            model.generate(**inputs, max_new_tokens=12, past_key_values=cache, **GREEDY)
        return
    after = model.generate(**inputs, max_new_tokens=12, past_key_values=cache, **GREEDY)
    assert after.past_key_values is cache
    assert torch.equal(after.sequences, before.sequences)


@pytest.mark.portable
def test_the_paged_cache_serves_a_model_that_is_not_optimised() -> None:
    """Where its modules cache latents; of one that caches keys of all heads, none are taken."""
    model, inputs = build("deepseek_v3"), prompt()
    before = model.generate(**inputs, max_new_tokens=12, **GREEDY)
    cache = hf.MlaPagedCache(model, block_size=16)
    if not EXPANDS_AFTER_CACHE.has(type(model.model.layers[0].self_attn)):
        with pytest.raises(
            hf.OptimizeError,
            match=r"\[cache.kind\] layer 0 caches 4 "
            r"heads.*transformers>=5.15",
        ):
            model.generate(**inputs, max_new_tokens=12, past_key_values=cache, **GREEDY)
        return
    after = model.generate(**inputs, max_new_tokens=12, past_key_values=cache, **GREEDY)
    assert torch.equal(after.sequences, before.sequences)
    # float32
    assert max(error(a, b) for a, b in zip(after.logits, before.logits, strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2_lite"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "use_cache": False},
        {"do_sample": True, "num_return_sequences": 3},
        # Some releases need an end to look a prompt up.
        {"do_sample": False, "prompt_lookup_num_tokens": 3, "batch": 1, "eos_token_id": 127},
    ],
    ids=["sampled", "beams", "beams_static", "no_cache", "several", "prompt_lookup"],
)
def test_every_way_to_generate(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    options = dict(options)
    inputs = prompt(
        batch=options.pop("batch", 2), padded=0 if "prompt_lookup_num_tokens" in options else 4
    )

    def run(**options: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return model.generate(**inputs, max_new_tokens=12, **options)

    missing = () if two_widths() else ("cache_implementation",)
    before = run(**{key: value for key, value in options.items() if key not in missing})
    hf.optimize(model, block_size=16)
    assert torch.equal(run(**options), before)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "longcat_flash", "deepseek_v32"])
def test_chunked_prefill(name: str, attention: str) -> None:
    """Several new tokens over a past, few (absorbed) and many (expanded): sdpa and eager masks."""
    from transformers import DynamicCache

    model, inputs = build(name, attention=attention), prompt(length=40)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def chunks(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            parts = [
                model(
                    input_ids=ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache
                ).logits
                for a, b in [(0, 30), (30, 32), (32, 35), (35, 40)]
            ]
        return torch.cat(parts, 1)[mask == 1]

    before = chunks(DynamicCache(config=model.config))
    hf.optimize(model)
    assert error(chunks(hf.MlaPagedCache(model, block_size=16)), before) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        (torch.bfloat16, "sdpa"),
        (torch.float16, "eager"),
        *one_in(1, [(torch.bfloat16, "eager"), (torch.float16, "sdpa")], first=3),
    ],
)
def test_rounded_models_stay_as_near_to_float32(
    dtype: torch.dtype, attention: str, record_property: Callable[[str, object], None]
) -> None:
    """Relative L2 error of 12 steps' logits against float32, at most 1.1 of the original's."""
    exact = build("deepseek_v3", KERNEL | {"num_attention_heads": 4, "num_key_value_heads": 4})
    ids = prompt(batch=4, length=20, padded=0)["input_ids"]

    def steps(model: Any) -> torch.Tensor:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :8], past_key_values=cache)
            logits = [
                model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits
                for i in range(8, 20)
            ]
        return torch.cat(logits, 1)

    wanted = steps(exact)
    model = build(
        "deepseek_v3",
        KERNEL | {"num_attention_heads": 4, "num_key_value_heads": 4},
        attention=attention,
    )
    model = model.to(dtype)
    original = error(steps(model), wanted)
    hf.optimize(model)
    ratio = error(steps(model), wanted) / original
    record_property("ratio", round(ratio, 3))
    assert ratio <= 1.1


@pytest.mark.portable
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 512},
        {"kv_lora_rank": 48, "q_lora_rank": 48},
        {
            "kv_lora_rank": 64,
            "q_lora_rank": 128,
            "hidden_size": 128,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "q_lora_rank": 48},
    ],
    ids=["hidden_is_rank", "equal_ranks", "powers_of_two", "q_rank_is_latent_and_rope"],
)
def test_roles_are_told_apart_where_widths_coincide(changes: dict[str, Any]) -> None:
    model, inputs = build("deepseek_v3", changes), prompt()
    before = model.generate(**inputs, max_new_tokens=8, **GREEDY)
    assert len(hf.optimize(model).converted) == 2
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=8, **GREEDY).sequences, before.sequences
    )


def test_a_wrong_block_size_leaves_the_model_as_it_was() -> None:
    model = build("deepseek_v3")
    with pytest.raises(ValueError, match="block_size must be a multiple of 16"):
        hf.optimize(model, block_size=7)
    with pytest.raises(TypeError, match="expected a model of transformers, got int"):
        hf.optimize(3)
    assert not any("forward" in vars(module) for module in model.modules())


def test_revert_restores_everything() -> None:
    model, inputs = build("longcat_flash"), prompt()
    with torch.no_grad():
        before = model(**inputs).logits
        generated = model.generate(**inputs, max_new_tokens=8, **GREEDY)
        held = [dict(vars(module)) for module in model.modules()]
        parameters = dict(model.named_parameters())
        hf.optimize(model)
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        model.generate(**inputs, max_new_tokens=8, cache_implementation="static")
        hf.revert(model)
        after = model(**inputs).logits
        again = model.generate(**inputs, max_new_tokens=8, **GREEDY)
    for module, attributes in zip(model.modules(), held, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(
            vars(module)[name] is value
            for name, value in attributes.items()
            if name != "generation_config"
        )
    assert torch.equal(after, before)
    assert all(torch.equal(a, b) for a, b in zip(again.logits, generated.logits, strict=True))
    assert not isinstance(again.past_key_values, hf.MlaPagedCache)
    with pytest.raises(hf.OptimizeError, match=r"\[model.state\]"):
        hf.revert(model)


def test_an_optimised_model_is_still_a_module() -> None:
    """Copied, saved, trained: the same parameters and names, gradients through absorbed steps."""
    model, inputs = build("deepseek_v3"), prompt()
    names = list(model.state_dict())
    hf.optimize(model)
    assert list(model.state_dict()) == names
    again = copy.deepcopy(model)
    assert again.model.layers[0].self_attn.forward.__self__ is again.model.layers[0].self_attn
    with torch.no_grad():
        again.model.layers[0].self_attn.kv_b_proj.weight.zero_()
        assert not torch.equal(again(**inputs).logits, model(**inputs).logits)
    assert hf.optimize(model) is hf.optimize(model)

    model.requires_grad_(True)
    model(**inputs).logits.square().mean().backward()
    gradient = model.model.layers[0].self_attn.kv_b_proj.weight.grad
    assert gradient is not None and bool(gradient.abs().sum() > 0)


def test_attentions_are_returned_where_eager_returns_them() -> None:
    model = build("deepseek_v3", attention="eager")
    ids = prompt(padded=0)["input_ids"]

    def weights() -> torch.Tensor:
        with torch.no_grad():
            cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
            return model(
                input_ids=ids[:, -1:], past_key_values=cache, output_attentions=True
            ).attentions[1]

    before = weights()
    hf.optimize(model)
    torch.testing.assert_close(weights(), before, rtol=1e-4, atol=1e-5)


# -- the summary


def test_summary_of_kernel_dims() -> None:
    model = build("deepseek_v3", KERNEL, dtype=torch.bfloat16)
    summary = hf.optimize(model)
    assert summary.fusable == 3
    assert summary.bytes_per_token == 3 * LATENT * 2
    assert summary.expanded_bytes_per_token == 3 * 8 * (192 + 128) * 2
    data = json.loads(summary.to_json())
    assert data["bytes_per_token"] == summary.bytes_per_token and len(data["converted"]) == 3
    assert "optimized 3 of 3 attentions" in str(summary) and "fusable in bfloat16" in str(summary)


def test_the_summary_says_where_rows_go() -> None:
    summary = hf.optimize(build("deepseek_v2", KERNEL, dtype=torch.float32))
    assert {item.placement for item in summary.converted} == {"staged"}
    assert "fusable in bfloat16, staged" in str(summary)


def test_what_cannot_be_traced_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v3", KERNEL)
    monkeypatch.setattr(
        type(model.model.layers[0].self_attn.q_a_layernorm),
        "forward",
        lambda self, x: x / x.abs().max().item(),  # a number, of which fake tensors have none
    )
    summary = hf.optimize(model)
    assert summary.fusable == 0 and summary.converted[0].kernel.startswith(
        "pass.failed: its step cannot be traced"
    )


@pytest.mark.parametrize(
    "name, changes, objection",
    [
        ("deepseek_v2_lite", {}, "q_lora.absent"),
        ("deepseek_v3_bias", {}, "linear.bias"),
        ("deepseek_v3", {"hidden_size": 1152}, "dims.he"),
        ("axk2", {}, "q_lora.interrupted"),
        ("bailing_hybrid", {}, "q_lora.absent"),
    ],
)
def test_absorbed_but_not_for_the_kernel(
    name: str, changes: dict[str, Any], objection: str
) -> None:
    summary = hf.optimize(build(name, changes))
    assert summary.fusable == 0
    assert {item.kernel.partition(":")[0] for item in summary.converted} == {objection}
