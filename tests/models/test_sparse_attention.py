"""Attention over an indexer's picks: the operator equals the masked form; NPU steps hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.models import hf
from mla_fusion.models.hf.latent_attention import LatentDims, absorbed_attention
from tests.exhaustive import one_in

from .hf_models import KERNEL, build
from .test_hf_compiled import started

DIMS = LatentDims(512, 64, 32, 48)
B, N, S, L, PICKS = 2, 4, 3, 20, 8


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    mf.offline.activate()  # torch_npu defines the operator; here it gets a CPU kernel


def given() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Both forms' arguments, the tokens each may see, the best of them (or fewer than picked)."""
    torch.manual_seed(0)
    tensors = {
        "q_nope": torch.randn(B, N, S, 32),
        "q_pe": torch.randn(B, N, S, 64),
        "c_kv": torch.randn(B, 1, L, 512),
        "k_pe": torch.randn(B, 1, L, 64),
        "kv_up": torch.randn(N * 80, 512) / 16,
    }
    seen = torch.ones(B, 1, S, L, dtype=torch.bool).tril(L - S)
    seen[1, :, :, :15] = False
    picks = (
        torch.randn(B, S, L).masked_fill(~seen[:, 0], float("-inf")).topk(PICKS, -1).indices.int()
    )
    return {**tensors, "dims": DIMS, "scaling": 0.1}, seen, picks


@pytest.mark.parametrize("factor", [None, 2.0, torch.linspace(1, 2, S).view(1, 1, S, 1)])
@pytest.mark.parametrize("additive", [False, True])
def test_as_the_mask_that_the_picks_make(factor: Any, additive: bool) -> None:
    arguments, seen, picks = given()
    others = torch.ones(B, S, L, dtype=torch.bool).scatter(-1, picks.long(), False).unsqueeze(1)
    wanted, _ = absorbed_attention(**arguments, mask=seen & ~others, factor=factor)
    mask = (
        torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        if additive
        else seen
    )
    found, _ = absorbed_attention(**arguments, picks=picks, mask=mask, factor=factor)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_without_a_mask_all_picks_count() -> None:
    arguments, _, _ = given()
    picks = torch.randn(B, S, L).topk(PICKS, -1).indices.int()
    others = torch.ones(B, S, L, dtype=torch.bool).scatter(-1, picks.long(), False).unsqueeze(1)
    wanted, _ = absorbed_attention(**arguments, mask=~others)
    found, _ = absorbed_attention(**arguments, picks=picks)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", one_in(2, ["deepseek_v32", "glm_moe_dsa"]))
def test_a_step_on_an_npu_holds_the_operator(name: str) -> None:
    """By the real torchair: prologues in place, picks attended by the operator, no cache copied."""
    sizes = {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
    }
    model = build(name, KERNEL | sizes, dtype=torch.bfloat16)
    assert hf.optimize(model).fusable == 2
    cache, ids = started(model)
    lowered = mf.lower(hf.DecodeStep(model, cache), ids, mode="npugraph_ex")
    assert lowered.report is not None
    assert [fusion.placement for fusion in lowered.report.fused] == ["in place"] * 2
    assert all(fusion.attributes["query_norm_flag"] for fusion in lowered.report.fused)
    assert lowered.fx_ops["npu.npu_mla_prolog_v3.default"] == 2
    assert lowered.fx_ops["npu.npu_sparse_flash_attention.default"] == 2
    pools = {tuple(pool.shape) for pool in cache.tensors()}
    copies = ("aten.clone.default", "aten.copy_.default")
    copied = [
        node.meta["val"] for node in lowered.fx_after.graph.nodes if str(node.target) in copies
    ]
    assert not [value for value in copied if tuple(value.shape) in pools]
