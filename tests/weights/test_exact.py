"""Float32 norm weights that hold bfloat16 numbers: followed through updates, refused once they hold others."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.weights import WeightError
from tests.catalogue.base import paged_args
from tests.catalogue.public_serving import Float32Norms
from tests.harness import clones


def test_updates_are_packed_anew_or_refused() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, args = Float32Norms(), paged_args()
    compiled = torch.compile(model, backend=mf.backend(mf.Config(verify="off")), fullgraph=True)
    with torch.no_grad():
        before = compiled(*clones(args))[0]
        (fusion,) = mf.reports()[-1].fused
        assert any("float32 norm weights" in text for text in fusion.assumptions)
        model.q_a_layernorm.weight.data.mul_(2)
        model.kv_a_layernorm.weight.data.mul_(1)
        assert not torch.equal(compiled(*clones(args))[0], before)
        model.q_a_layernorm.weight.data.add_(1e-5)
        given = clones(args)
        with pytest.raises(WeightError, match=r"\[norm.gamma_dtype\]"):
            compiled(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, args, strict=True))  # nothing was written
    torch._dynamo.reset()


def test_a_lowered_graph_knows_too() -> None:
    """The parameters of ``mf.lower`` are fake; what they hold is looked at before."""
    report = mf.lower(Float32Norms(), *paged_args(), config=mf.Config(verify="off")).report
    assert report is not None and len(report.fused) == 1
    hooked = mf.explain(torch.export.export(Float32Norms(), paged_args()).run_decompositions({}).module())
    assert [item.code for item in hooked.rejected] == ["norm.gamma_dtype"]
    assert "cannot be looked at here" in hooked.rejected[0].message
