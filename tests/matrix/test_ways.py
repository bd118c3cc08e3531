"""``mf.lower`` in each of its ways, and what must hold of the graphs on every pair of releases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mla_fusion as mf
from mla_fusion import releases
from tests.catalogue import base, prologues
from tests.fusion.ge_graphs import same_wiring
from tests.matrix.byhand import ByHand, read

UNFUSED = mf.Config(enable=False)

pytestmark = pytest.mark.skipif(
    releases.refusal() is not None, reason="this release is refused: test_refused.py"
)


@pytest.fixture(name="model", params=[prologues.PagedRotateHalf, prologues.Neox])
def _model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    torch.manual_seed(0)
    monkeypatch.setattr(prologues, "attend", read)
    return request.param()


def alone(lowered: mf.Lowering) -> None:
    """One kernel, no copy of a cache."""
    assert lowered.ge_ops["MlaPrologV3"] == 1
    assert lowered.ge_ops["TensorMove"] == lowered.ge_ops["Assign"] == 0


def test_fused(model: nn.Module) -> None:
    lowered = mf.lower(model, *base.paged_args())
    alone(lowered)
    assert lowered.report is not None
    assert [fusion.placement for fusion in lowered.report.fused] == ["in place"]


def test_hook(model: nn.Module) -> None:
    lowered = mf.lower(model, *base.paged_args(), hook=True)
    alone(lowered)
    assert lowered.report is not None and len(lowered.report.fused) == 1


def test_dynamic(model: nn.Module) -> None:
    with torch._dynamo.config.patch(specialize_float=True):
        lowered = mf.lower(model, *base.paged_args(), dynamic=True)
    alone(lowered)
    (x,) = [
        op
        for op in lowered.ge_graph.op
        if op.type == "Data" and op.attr["index"].i == _place_of_x(lowered)
    ]
    assert -1 in x.output_desc[0].shape.dim  # the number of tokens is not known


def _place_of_x(lowered: mf.Lowering) -> int:
    kernel = next(op for op in lowered.ge_graph.op if op.type == "MlaPrologV3")
    first = kernel.input[0].rpartition(":")[0]
    return next(op.attr["index"].i for op in lowered.ge_graph.op if op.name == first)


def test_npugraph_ex(model: nn.Module) -> None:
    lowered = mf.lower(model, *base.paged_args(), mode="npugraph_ex")
    (call,) = [
        n for n in lowered.fx_after.graph.nodes if str(n.target) == "npu.npu_mla_prolog_v3.default"
    ]
    assert [cache.op for cache in call.args[9:11]] == ["placeholder", "placeholder"]
    assert not any("clone" in name or "aten.copy" in name for name in lowered.fx_ops)


@pytest.mark.parametrize("functional", [False, True], ids=["in_place", "functional"])
def test_call_by_hand(functional: bool) -> None:
    alone(mf.lower(ByHand(functional), *base.paged_args(), config=UNFUSED))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_parity_with_the_call_by_hand(model: nn.Module, dynamic: bool) -> None:
    args = base.paged_args()
    with torch._dynamo.config.patch(specialize_float=True):
        fused = mf.lower(model, *args, dynamic=dynamic)
        byhand = mf.lower(ByHand(), *args, dynamic=dynamic, config=UNFUSED)
    assert fused.ge_ops == byhand.ge_ops
    assert same_wiring(fused.ge_graph, byhand.ge_graph)


def test_parity_in_npugraph_ex(model: nn.Module) -> None:
    args = base.paged_args()
    fused = mf.lower(model, *args, mode="npugraph_ex")
    byhand = mf.lower(ByHand(), *args, mode="npugraph_ex", config=UNFUSED)
    assert fused.fx_ops == byhand.fx_ops
