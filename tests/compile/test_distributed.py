"""``DistributedDataParallel``: its splitter asks the first call of each part for fake results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.harness import assert_no_worse, clones, eager, exact, flat


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Headed(nn.Module):
    """Behind the prologue a product whose weight fills the first bucket: two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = prologues.PagedRotateHalf()
        with torch.no_grad():
            width = self.layer(*base.paged_args()).flatten(1).shape[1]
        self.head = nn.Parameter(torch.randn(width, (1 << 20) // width).bfloat16() / width**0.5)

    def forward(self, *args: Tensor) -> Tensor:
        return self.layer(*args).flatten(1).to(self.head.dtype) @ self.head


def test_the_first_call_is_as_right_as_the_second() -> None:
    torch.manual_seed(0)
    model, args = Headed().requires_grad_(True), base.paged_args()
    wanted = exact(model, args), eager(model, args)
    before = len(mf.reports())
    run = torch.compile(DistributedDataParallel(model), backend=mf.backend())
    for _ in range(2):
        given = clones(args)
        with torch.no_grad():
            found = [*flat(run(*given)), *given]
        assert {type(value) for value in found} == {Tensor}
        assert_no_worse(*wanted, found)
    parts = mf.reports()[before:]
    assert len(parts) > 1 and any(report.fused for report in parts)
