"""Serving stacks change torch's default dtype and device while models are built, and compile under
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import mla_fusion as mf
from tests import harness
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import traced_graph


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype, device", [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
@pytest.mark.parametrize(
    "model, args",
    one_in(
        1, [(prologues.ComplexDense, prologues.dense_args), (prologues.FusedQkvA, base.paged_args)]
    ),
)
def test_the_pass_and_a_step_run_under_them(
    model: type, args: object, dtype: torch.dtype, device: str
) -> None:
    module, given = model(), args()  # type: ignore[operator]
    wanted = harness.eager(module, harness.clones(given))
    torch._dynamo.reset()
    run = torch.compile(module, backend=mf.backend(mf.Config(slots="checked")), fullgraph=True)
    for _ in range(2):
        mine = harness.clones(given)
        with defaults(dtype, device), torch.no_grad():
            found = [*harness.flat(run(*mine)), *mine]
    assert len(mf.reports()[-1].fused) == 1
    assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_graph_is_read_where_tensors_are_made_elsewhere(device: str) -> None:
    """On this machine there may be no such device: nothing of the pass is made there."""
    gm = traced_graph(prologues.FusedQkvA(), *base.paged_args())
    with torch.device(device):
        assert len(mf.explain(gm).fused) == 1
