"""Rows assigned by a slice that begins at a place the caller gives as an int."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.exhaustive import one_in
from tests.harness import clones

Part = Callable[[Tensor, int], Tensor]  # of a cache and the place, the slice that is assigned


class FromStart(Base):
    """One token of each sequence."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        for cache, rows in ((kv_cache, c_kv), (kr_cache, k_pe)):
            part = self.part(cache, self.start)
            part[:] = rows.view(part.shape)

    def forward(self, start: int, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.start = start
        return super().forward(*args)


PARTS: list[Part] = [
    lambda c, n: c[:8, n : n + 1],
    lambda c, n: c[1:9, n : n + 1],
    lambda c, n: c[:8, n + 1 : n + 2],
    lambda c, n: c[:8, 2:][:, n : n + 1],
    lambda c, n: c[:8, n : n + 2][:, :1],
    lambda c, n: c[n : n + 8, 3:4],
]


@pytest.mark.parametrize("part", one_in(1, PARTS))
def test_rows_from_a_symbolic_place_on(part: Part) -> None:
    torch.manual_seed(0)
    x, cos, sin, *_, slots = paged_args()
    caches = tuple(torch.randn(12, 32, width).bfloat16() for width in (HCKV, DR))
    torch._dynamo.reset()
    model, args = FromStart(part), (x, cos, sin, *caches, slots)
    run = torch.compile(model, backend=mf.backend(), fullgraph=True, dynamic=True)
    for start in (3, 2, 4):
        ours, theirs = clones(args), clones(args)
        for cache in ours[3:5]:
            torch._dynamo.mark_static(cache, 1)  # a BlockSize
        with torch.no_grad():
            run(start, *ours), model(start, *theirs)
        for found, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    (fusion,) = mf.reports()[-1].fused
    is_of_first = part in PARTS[:3:2]  # sequences, in their own blocks
    assert fusion.placement.startswith("in place" if is_of_first else "staged")
