"""Weights that a product of parameters makes in the graph are weights as any other."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args
from tests.exhaustive import pairs
from tests.harness import traced_graph


class Adapted(nn.Module):
    """The weight plus its adapter."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(rows, 8).bfloat16())
        self.down = nn.Parameter(torch.randn(8, columns).bfloat16())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Turned(Adapted):
    def forward(self, weight: Tensor) -> Tensor:
        return weight @ (self.down.mT @ self.down)


LAYERS = "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"


@pytest.mark.parametrize(("name", "made"), pairs(LAYERS, [Adapted, Turned]))
def test_weight_made_by_a_product(name: str, made: type[Adapted]) -> None:
    model = Base()
    layer = getattr(model, name)
    parametrize.register_parametrization(layer, "weight", made(*layer.weight.shape))
    (fusion,) = mf.fuse(traced_graph(model, *paged_args())).fused
    assert fusion.placement == "in place" and fusion.verified == "verified"


def test_no_prologue_is_named_for_adapted_layers_alone() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False).bfloat16() for _ in range(3)))
    for layer in model:
        parametrize.register_parametrization(layer, "weight", Adapted(*layer.weight.shape))
    report = mf.explain(traced_graph(model, torch.randn(8, 64).bfloat16()))
    assert not report.fused and not report.rejected
