"""The compiled decode step of an optimised model: every prologue fused, caches written in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.models import hf
from mla_fusion.models.features import COUNTS_POSITIONS
from tests.exhaustive import one_in
from tests.harness import distance as error

from .hf_models import KERNEL, build
from .paged import rows

PLAIN = "deepseek_v3"
ONE = {"num_hidden_layers": 1, "first_k_dense_replace": 1}


def started(model: Any, length: int = 6, limit: int = 64) -> tuple[Any, torch.Tensor]:
    """A cache of fixed size that holds a prompt, and the next token of each of two sequences."""
    ids = torch.randint(3, 120, (2, length + 1), generator=torch.Generator().manual_seed(3))
    cache = hf.MlaPagedCache(model, max_cache_len=limit)
    with torch.no_grad():
        model(input_ids=ids[:, :length], past_key_values=cache)
    return cache, ids[:, length:]


def told(model: Any, cache: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a step must be told beside its tokens: positions, where the model would count them."""
    if COUNTS_POSITIONS.has(type(model).forward):
        return {}
    return {"cache_position": cache.get_seq_length() + torch.arange(ids.shape[1])}


# model, what becomes of the cache write, attributes of the fused call
STEPS: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "deepseek_v3": ("in place", {}, {}),
    "deepseek_v3_half": ("in place", ONE, {}),
    "deepseek_v3_yarn": ("in place", ONE, {}),
    # Their experts are chosen by value, which ends a graph; the attentions stay whole.
    "longcat_flash": (
        "in place",
        {"num_hidden_layers": 2},
        {"qc_qr_scale": (1024 / 1536) ** 0.5, "kc_scale": 2**0.5},
    ),
    "glm4_moe_lite": ("in place", ONE | {"qk_nope_head_dim": 192, "v_head_dim": 192}, {}),
    "mistral4": ("in place", ONE, {}),  # its query is multiplied by a number for each token
    "deepseek_v32": ("in place", ONE, {"query_norm_flag": True}),
    "glm_moe_dsa": ("in place", ONE, {"query_norm_flag": True}),
    # Interleaved output of complex RoPE: exact only beside the cache.
    "deepseek_v2": ("staged", ONE, {}),
}
BREAKS = ("longcat_flash", "glm4_moe_lite")
LIKE_OTHERS = (
    "deepseek_v3_half",
    "deepseek_v3_yarn",
    "longcat_flash",
    "glm4_moe_lite",
    "mistral4",
    "glm_moe_dsa",
)


def twin(cache: Any, dtype: torch.dtype) -> Any:
    """A cache of its own that holds the same."""
    other = copy.deepcopy(cache)
    for layer in other.paged_layers:
        for name, pool in list(layer.pools()):
            setattr(layer, name, pool.to(dtype))
    return other


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in LIKE_OTHERS else [])
        for name in STEPS
    ],
)
def test_fused_steps_on_cpu(name: str) -> None:
    """Logits as near to float32 as the eager model's: relative L2 error 1.1 times as large and a
    rounding at most.
    """
    how, changes, attributes = STEPS[name]
    sizes = KERNEL | {"num_attention_heads": 4, "num_key_value_heads": 4} | changes
    model = build(name, sizes, dtype=torch.bfloat16)
    layers = len(hf.optimize(model).converted)
    cache, ids = started(model)
    eager, exact = twin(cache, torch.bfloat16), twin(cache, torch.float32)
    torch._dynamo.reset()
    known = len(mf.reports())
    compiled = torch.compile(
        model.forward, backend="mla_fusion", fullgraph=name not in BREAKS, dynamic=False
    )
    with torch.no_grad():
        found = [
            compiled(input_ids=ids, past_key_values=cache, **told(model, cache, ids)).logits
            for _ in range(3)
        ]
        plain = [model(input_ids=ids, past_key_values=eager).logits for _ in range(3)]
        exactly = model.float()
        wanted = [exactly(input_ids=ids, past_key_values=exact).logits for _ in range(3)]
    reports = mf.reports()[known:]
    text = "\n".join(map(str, reports))
    fused = [fusion for report in reports for fusion in report.fused]
    assert len(fused) == layers and not any(report.rejected for report in reports), text
    assert all(fusion.layer.rstrip(".01").endswith("self_attn") for fusion in fused), text
    assert name in BREAKS or len(reports) == 1
    assert all(
        how in line for line in text.splitlines() if line.startswith("  + ") and "equal" not in line
    ), text
    for attribute, value in attributes.items():
        assert fused[0].attributes[attribute] == pytest.approx(value, rel=1e-6)
    assert int(cache.get_seq_length()) == 9
    for a, b, c in zip(found, plain, wanted, strict=True):
        assert error(a, c) <= 1.1 * error(b, c) + 2**-9
    torch._dynamo.reset()


@pytest.mark.parametrize("name, layers", one_in(2, [("deepseek_v3", 3), ("youtu", 4)]))
def test_every_prologue_is_one_operator_in_the_ge_graph(name: str, layers: int) -> None:
    """By the real torchair: no copy of a cache, nothing assigned."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": layers}
    model = build(name, KERNEL | sizes, dtype=torch.bfloat16)
    assert len(hf.optimize(model).converted) == layers
    cache, ids = started(model)
    held = [rows(layer) for layer in cache.paged_layers]
    lowered = mf.lower(hf.DecodeStep(model, cache), ids)
    assert lowered.ge_ops["MlaPrologV3"] == layers
    assert (
        not {"TensorMove", "Assign", "Scatter", "ScatterUpdate", "ScatterNdUpdate"}
        & lowered.ge_ops.keys()
    )
    assert lowered.report is not None and len(lowered.report.fused) == layers
    assert all(
        torch.equal(a, b)
        for old, layer in zip(held, cache.paged_layers, strict=True)
        for a, b in zip(old, rows(layer), strict=True)
    )


def test_a_decode_step_is_one_fused_graph_in_every_release() -> None:
    """``DecodeStep`` tells positions where the model would count them."""
    model = build(
        PLAIN,
        KERNEL | {"num_attention_heads": 4, "num_key_value_heads": 4} | ONE,
        dtype=torch.bfloat16,
    )
    hf.optimize(model)
    cache, ids = started(model)
    plain = twin(cache, torch.bfloat16)
    torch._dynamo.reset()
    known = len(mf.reports())
    step = torch.compile(
        hf.DecodeStep(model, cache), backend="mla_fusion", fullgraph=True, dynamic=False
    )
    eager = hf.DecodeStep(model, plain)
    with torch.no_grad():
        assert all(error(step(ids), eager(ids)) < 2e-2 for _ in range(2))
    assert [len(report.fused) for report in mf.reports()[known:]] == [1]
    assert int(cache.get_seq_length()) == int(plain.get_seq_length()) == 8
    torch._dynamo.reset()


def test_a_compiled_model_generates_the_same_tokens() -> None:
    """float32 (nothing fuses): generate() with a compiled forward and a static cache."""
    model = build(PLAIN, ONE)
    ids = torch.randint(3, 120, (2, 5), generator=torch.Generator().manual_seed(3))
    before = model.generate(ids, max_new_tokens=12, do_sample=False)
    hf.optimize(model)
    torch._dynamo.reset()
    eager = model.forward
    model.forward = torch.compile(eager, backend="mla_fusion", dynamic=False)
    try:
        after = model.generate(
            ids, max_new_tokens=12, do_sample=False, cache_implementation="static"
        )
    finally:
        del model.forward
        torch._dynamo.reset()
    assert torch.equal(after, before)


def test_a_compiled_step_that_runs_over_the_end_fails() -> None:
    model = build(PLAIN, ONE)
    hf.optimize(model)
    cache, ids = started(model, limit=8)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend="mla_fusion", fullgraph=True, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            compiled(input_ids=ids, past_key_values=cache, **told(model, cache, ids))
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds|DATA bounds)"):
            compiled(input_ids=ids, past_key_values=cache, **told(model, cache, ids))
    torch._dynamo.reset()


def test_a_cache_that_is_too_small_is_refused_before_it_starts() -> None:
    model = build(PLAIN, ONE)
    hf.optimize(model)
    cache = hf.MlaPagedCache(model, max_cache_len=8)
    ids = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(hf.OptimizeError, match=r"\[cache.full\]"):
        model.generate(ids, max_new_tokens=6, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, past_key_values=cache)
    assert int(cache.get_seq_length()) == 8
