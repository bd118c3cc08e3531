"""The fused layer, lowered by the real torchair, equals the layer with the call by hand."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in

from .ge_graphs import called_by_hand, same_wiring

UNFUSED = mf.Config(enable=False)


class ByHand(nn.Module):
    """What an engineer writes instead of the prologue: packed weights and one call."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape).bfloat16())

        self.weight_dq = weight(base.HE, base.HCQ)
        self.weight_uq_qr = weight(base.HCQ, heads * (base.D + base.DR))
        self.weight_uk = weight(heads, base.D, base.HCKV)
        self.weight_dkv_kr = weight(base.HE, base.HCKV + base.DR)
        self.gamma_cq = weight(base.HCQ)
        self.gamma_ckv = weight(base.HCKV)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        return called_by_hand(self, x, cos, sin, (kv_cache, kr_cache), slots)


@cache
def by_hand(mode: str, dynamic: bool = False) -> mf.Lowering:
    return mf.lower(ByHand(), *base.paged_args(), mode=mode, dynamic=dynamic, config=UNFUSED)


MODELS = {
    "rotate_half": prologues.PagedRotateHalf,
    "functional_norm": prologues.PagedFunctionalNorm,
    "neox": prologues.Neox,
    "npu_v1": lambda: prologues.NpuOperators(version=1),
    "npu_v2": lambda: prologues.NpuOperators(version=2),
    "fused_qkv_a": prologues.FusedQkvA,
}


@pytest.fixture(params=MODELS, name="model")
def _model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.mark.parametrize("dynamic", one_in(2, [False, True]))
def test_ge_graph_is_the_handwritten_one(model: nn.Module, dynamic: bool) -> None:
    args = base.paged_args()
    with torch._dynamo.config.patch(specialize_float=True):
        fused = mf.lower(model, *args, mode="ge", dynamic=dynamic)
        byhand = by_hand("ge", dynamic)
    assert fused.ge_ops == byhand.ge_ops
    assert same_wiring(fused.ge_graph, byhand.ge_graph)
    assert fused.ge_ops["MlaPrologV3"] == 1
    assert fused.ge_ops["TensorMove"] == fused.ge_ops["Assign"] == 0


def test_npugraph_ex_writes_the_placeholders(model: nn.Module) -> None:
    fused = mf.lower(model, *base.paged_args(), mode="npugraph_ex")
    assert fused.fx_ops == by_hand("npugraph_ex").fx_ops
    (call,) = [
        n for n in fused.fx_after.graph.nodes if str(n.target) == "npu.npu_mla_prolog_v3.default"
    ]
    assert [cache.op for cache in call.args[9:11]] == ["placeholder", "placeholder"]
    assert not any(
        "clone" in name or "copy_" in name
        for name in fused.fx_ops
        if name != "aten._to_copy.default"
    )


def test_layers_in_one_graph() -> None:
    torch.manual_seed(0)
    lowered = mf.lower(prologues.Layers(), *prologues.layers_args(), mode="ge")
    assert lowered.ge_ops["MlaPrologV3"] == 3
    assert lowered.ge_ops["TensorMove"] == lowered.ge_ops["Assign"] == 0


def test_unfused_graph_is_refused_by_name() -> None:
    from mla_fusion.tools.lowering import LoweringError

    with pytest.raises(LoweringError, match=r"index_put") as refused:
        mf.lower(prologues.PagedRotateHalf(), *base.paged_args(), mode="ge", config=UNFUSED)
    assert "aten.index_put.default" in refused.value.operators


class Interleaved(base.Base):
    """Tables of full width, an entry for each number of a pair, and pairs in another order."""

    places: list[int] | None = None

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        rows = x * c + turned * s
        return rows if self.places is None else rows[..., self.places]


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_columns_in_another_order_on_a_device(is_shuffled: bool) -> None:
    """A graph of a device cannot hold a list of column numbers that the pass makes."""
    model = Interleaved()
    if is_shuffled:
        model.places = (torch.arange(base.DR) * 5 % base.DR).tolist()
    lowering = mf.lower(model, *base.paged_args(), mode="npugraph_ex")
    assert lowering.report is not None and lowering.report.fused, str(lowering.report)
