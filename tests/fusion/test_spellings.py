"""The seven spellings of the absorbed decode prologue: found, fused, and as exact as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import spellings as s
from tests.harness import assert_as_exact, both_ways, clones, compiled, eager

# The kernel takes bfloat16 tables; DeepSeek's complex table is float32, and rounding it is part of the kernel's
# contract. Everything else errs no more than 1.1 times what the unfused model does.
SLACK = {s.ComplexDense: 1.5, s.ComplexConjugated: 1.5}

CASES = {
    "a_rotate_half": (s.PagedRotateHalf, s.paged_args, "in place"),
    "a_functional_norm": (s.PagedFunctionalNorm, s.paged_args, "in place"),
    "a_sqrt_norm": (s.PagedSqrtNorm, s.paged_args, "in place"),
    "a_even_odd": (s.EvenOdd, s.paged_args, "in place"),
    "a_block_offset": (s.BlockOffset, s.paged_args, "in place"),
    "b_complex_dense": (s.ComplexDense, s.dense_args, "staged"),
    "b_complex_conjugated": (s.ComplexConjugated, s.dense_args, "staged"),
    "c_neox": (s.Neox, s.paged_args, "in place"),
    "d_npu_v1": (lambda: s.NpuOperators(version=1), s.paged_args, "in place"),
    "d_npu_v2": (lambda: s.NpuOperators(version=2), s.paged_args, "in place"),
    "e_fused_qkv_a": (s.FusedQkvA, s.paged_args, "in place"),
    "g_indexer": (s.WithIndexer, s.paged_args, "in place"),
}


@pytest.fixture(params=CASES, name="case")
def _case(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[torch.Tensor, ...], str]:
    torch.manual_seed(0)
    model, args, placement = CASES[request.param]
    return model(), args(), placement


@pytest.mark.portable
def test_fuses_as_exactly(case: tuple[nn.Module, tuple[torch.Tensor, ...], str]) -> None:
    model, args, placement = case
    for report, fused in both_ways(model, args, mf.Config(verify="all")):
        assert not report.rejected, str(report)
        assert [f.placement.startswith(placement) for f in report.fused] == [True], str(report)
        assert_as_exact(model, args, fused, SLACK.get(type(model), 1.1))


def test_dynamic_token_count(case: tuple[nn.Module, tuple[torch.Tensor, ...], str]) -> None:
    model, args, placement = case
    fused = compiled(model, clones(args), mf.backend(), dynamic=True)
    report = mf.reports()[-1]
    assert [f.placement.startswith(placement) for f in report.fused] == [True], str(report)
    assert_as_exact(model, args, fused, SLACK.get(type(model), 1.1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_device_form(case: tuple[nn.Module, tuple[torch.Tensor, ...], str], dynamic: bool) -> None:
    """The graph that torchair's pre-pass hook receives on device npu."""
    model, args, placement = case
    with torch._dynamo.config.patch(specialize_float=True):
        gm, _ = capture(model, *args, device="npu", dynamic=dynamic)
    report = mf.fuse(gm)
    assert [f.placement.startswith(placement) for f in report.fused] == [True], str(report)
    assert mf.fuse(gm).fused == []


def test_layers_share_tables_and_probes() -> None:
    torch.manual_seed(0)
    model, args = s.Layers(), s.layers_args()
    fused = compiled(model, clones(args), mf.backend())
    report = mf.reports()[-1]
    assert len(report.fused) == 3 and not report.rejected
    assert [bool(f.figures) for f in report.fused] == [True, False, False]
    assert report.operators["after"]["npu.npu_mla_prolog_v3_functional.default"] == 3
    assert_as_exact(model, args, fused, SLACK.get(type(model), 1.1))


def test_query_norm_serves_the_second_reader() -> None:
    torch.manual_seed(0)
    model, args = s.WithIndexer(), s.paged_args()
    compiled(model, clones(args), mf.backend())
    (fusion,) = mf.reports()[-1].fused
    assert fusion.attributes["query_norm_flag"] is True
    assert "query_norm" in fusion.replaced.values()


def test_rows_without_a_slot_are_untouched() -> None:
    torch.manual_seed(0)
    model, args = s.PagedRotateHalf(), s.paged_args()
    *_, kv_cache, kr_cache, slots = compiled(model, clones(args), mf.backend())
    written = torch.zeros(s.BLOCKS * s.BLOCK_SIZE, dtype=torch.bool)
    written[slots] = True
    for before, after in zip(args[3:5], (kv_cache, kr_cache), strict=True):
        rows, was = after.flatten(0, 2), before.flatten(0, 2)
        assert torch.equal(rows[~written], was[~written])
        assert not torch.equal(rows[written], was[written])


def test_interleaved_rows_stay_interleaved() -> None:
    """Staging re-interleaves: the cache of a complex-RoPE model holds what its other readers expect."""
    torch.manual_seed(0)
    model, args = s.ComplexDense(), s.dense_args()
    unfused, fused = eager(model, clones(args)), compiled(model, clones(args), mf.backend())
    assert torch.allclose(unfused[-1].float(), fused[-1].float(), rtol=0.05, atol=0.05)


def test_half_rows_by_the_callers_word() -> None:
    torch.manual_seed(0)
    model, args = s.ComplexDense(), s.dense_args()
    exact = eager(model, clones(args))
    fused = compiled(model, clones(args), mf.backend(mf.Config(kr_layout="half", verify="off")))
    written = exact[-1][:2, 3:6]
    halves = torch.cat([written[..., 0::2], written[..., 1::2]], -1)
    assert torch.allclose(fused[-1][:2, 3:6].float(), halves.float(), rtol=0.05, atol=0.05)
