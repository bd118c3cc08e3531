"""Static graphs of many tokens: the facts are read on few, the verdict is the same, the numbers are
checked on all.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base, layouts, prologues
from tests.exhaustive import one_in


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCKS", 64)


def prefill_args() -> tuple[Tensor, ...]:
    freqs = torch.view_as_real(
        torch.polar(torch.ones(128, base.DR // 2), torch.rand(128, base.DR // 2) * 6.28)
    )
    x = torch.randn(2, 64, base.HE).bfloat16()
    return (
        x,
        freqs,
        torch.randn(4, 128, base.HCKV).bfloat16(),
        torch.randn(4, 128, base.DR).bfloat16(),
    )


CASES = {
    "64 tokens": (prologues.PagedRotateHalf, lambda: base.paged_args(64)),
    "512 tokens, as many as the latent is wide": (
        prologues.PagedRotateHalf,
        lambda: base.paged_args(512),
    ),
    "128 tokens, as many as D": (prologues.FusedQkvA, lambda: base.paged_args(128)),
    "4 sequences of 32": (layouts.Sequences, lambda: layouts.sequence_args(4, 32)),
    "64 sequences of 2": (layouts.Sequences, lambda: layouts.sequence_args(64, 2)),
    "16 sequences of 16": (layouts.Sequences, lambda: layouts.sequence_args(16, 16)),
    "dense prefill": (prologues.ComplexDense, prefill_args),
    "npu operators": (prologues.NpuOperators, lambda: base.paged_args(128)),
}


@pytest.mark.parametrize(("device", "name"), one_in(3, itertools.product(("cpu", "npu"), CASES)))
def test_fuses(device: str, name: str) -> None:
    model, args = CASES[name]
    gm, _ = capture(model(), *args(), device=device)
    report = mf.fuse(gm)
    assert len(report.fused) == 1, str(report)


@pytest.mark.exhaustive
def test_batches_of_any_number_of_long_sequences() -> None:
    """Only the length is static: it is shrunk, and every token of the verified call has a slot of
    its own.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = layouts.sequence_args(3, 96)
    for given in args[:3] + args[5:]:
        torch._dynamo.mark_dynamic(given, 0)
    for cache in args[3:5]:
        torch._dynamo.mark_dynamic(cache, 0)
    with torch.no_grad():
        torch.compile(layouts.Sequences(), backend="mla_fusion", fullgraph=True)(*args)
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place" and fusion.verified == "verified"
    assert {figure.output for figure in fusion.figures} == {
        "query",
        "query_rope",
        "kv_cache",
        "kr_cache",
    }
