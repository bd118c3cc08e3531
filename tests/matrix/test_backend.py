"""The backend on CPU tensors: no release of torch_npu is too old for it."""

from __future__ import annotations

import copy

import pytest
import torch

import mla_fusion as mf
from tests.catalogue import base, prologues

MODELS = (
    prologues.PagedRotateHalf,
    prologues.PagedFunctionalNorm,
    prologues.Neox,
    prologues.FusedQkvA,
)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("model", MODELS)
def test_compiled_results_are_those_of_the_model(
    model: type[torch.nn.Module], dynamic: bool | None
) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    module, args = model(), base.paged_args()
    with torch.no_grad():
        expected_args = copy.deepcopy(args)
        expected = module(*expected_args)
        found = torch.compile(module, backend="mla_fusion", dynamic=dynamic, fullgraph=True)(*args)
    assert len(mf.reports()[-1].fused) == 1
    for got, wanted in (
        (found, expected),
        (args[3], expected_args[3]),
        (args[4], expected_args[4]),
    ):
        assert (got.float() - wanted.float()).norm() < 2e-2 * wanted.float().norm()
