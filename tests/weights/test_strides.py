"""Weights that begin at one address with other strides, in a graph whose strides are symbolic."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import clones, distance

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("updates", one_in(1, ["rounds", "counted", "every call"]))
def test_other_rows_of_one_tensor(updates: str) -> None:
    model, name = prologues.Neox(), "kv_a_proj_with_mqa.weight"
    rows, columns = model.kv_a_proj_with_mqa.weight.shape
    whole, args = torch.randn(4 * rows, columns).bfloat16() * 0.03, base.paged_args()

    def call(weight: Tensor, *args: Tensor) -> Tensor:
        return functional_call(model, {name: weight}, args)[0]

    config = mf.Config(updates=updates)
    run = torch.compile(call, backend=mf.backend(config), fullgraph=True)
    with torch.no_grad():
        for step in 1, 2, 3, 4, 1:
            weight = whole[::step][:rows]
            assert distance(run(weight, *clones(args)), call(weight, *clones(args))) < 0.02
    assert mf.reports()[-1].fused
