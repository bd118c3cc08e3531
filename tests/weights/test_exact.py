"""Float32 norm weights that hold bfloat16 numbers: followed through updates, else refused."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.weights.cache import WeightError
from tests.catalogue.base import DR, HCKV, paged_args
from tests.catalogue.public_serving import Float32Norms
from tests.harness import assert_as_exact, clones, run_fused


def test_updates_are_packed_anew_or_refused() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, args = Float32Norms(), paged_args()
    run = torch.compile(
        model, backend=mf.backend(mf.Config(verify="off", updates="every call")), fullgraph=True
    )
    with torch.no_grad():
        before = run(*clones(args))[0]
        (fusion,) = mf.reports()[-1].fused
        assert any("float32 norm weights" in text for text in fusion.assumptions)
        model.q_a_layernorm.weight.data.mul_(2)
        model.kv_a_layernorm.weight.data.mul_(1)
        assert not torch.equal(run(*clones(args))[0], before)
        model.q_a_layernorm.weight.data.add_(1e-5)
        given = clones(args)
        with pytest.raises(WeightError, match=r"\[norm.gamma_dtype\]"):
            run(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, args, strict=True))  # nothing was written
    torch._dynamo.reset()


def test_a_lowered_graph_knows_too() -> None:
    """The parameters of ``mf.lower`` are fake; what they hold is looked at before."""
    report = mf.lower(Float32Norms(), *paged_args(), config=mf.Config(verify="off")).report
    assert report is not None and len(report.fused) == 1
    hooked = mf.explain(
        torch.export.export(Float32Norms(), paged_args()).run_decompositions({}).module()
    )
    assert [item.code for item in hooked.rejected] == ["norm.gamma_dtype"]
    assert "mla_fusion.backend() also takes" in hooked.rejected[0].remedy


class Rearranged(Float32Norms):
    """The norm's weight is a part of a larger parameter, or its numbers in another order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        width = self.kv_a_layernorm.weight.numel()
        self.both = torch.nn.Parameter((1 + torch.randn(2 * width) / 8).bfloat16().float())

    def latent(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([HCKV, DR], -1)
        weight = (
            self.both.view(2, -1)[1]
            if self.order == "part"
            else self.both.view(2, -1).t().reshape(-1)[:HCKV]
        )
        wide = c_kv.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight
        return normed.to(x.dtype), k_pe


@pytest.mark.parametrize("order", ["part", "turned"])
def test_a_view_of_a_parameter(order: str) -> None:
    torch.manual_seed(0)
    model, args = Rearranged(order), paged_args()
    fused = run_fused(model, clones(args))
    assert_as_exact(model, args, fused)
