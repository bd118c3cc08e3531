"""Rows assigned by slices, of slices too: the rows written are the model's, also where nothing is
verified.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, run_fused

Part = Callable[[Tensor], Tensor]  # of a cache, the slice that is assigned


class Assigns(Base):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        for cache, rows in ((kv_cache, c_kv), (kr_cache, k_pe)):
            part = self.part(cache)
            part[:] = rows.view(part.shape)


FLAT: dict[str, Part] = {
    "one": lambda c: c[8:16],
    "of a slice": lambda c: c[2:][6:14],
    "of two": lambda c: c[2:60][4:][2:10],
    "from the start": lambda c: c[:40][8:16],
}
DENSE: dict[str, Part] = {
    "rows": lambda c: c[:2, 4:8],
    "rows of rows": lambda c: c[:2, 4:][:, 2:6],
    "sequences of sequences": lambda c: c[1:][1:3, 4:8],
    "both": lambda c: c[:, 4:12][:2][:, 2:6],
}


@pytest.mark.parametrize("name", one_in(2, [*FLAT, *DENSE]))
def test_rows_are_the_models(name: str) -> None:
    torch.manual_seed(0)
    x, cos, sin, *_, slots = paged_args()
    shape = (64,) if name in FLAT else (4, 32)
    caches = (torch.randn(*shape, width).bfloat16() for width in (HCKV, DR))
    model, args = Assigns((FLAT | DENSE)[name]), (x, cos, sin, *caches, slots)
    fused = run_fused(model, clones(args), mf.Config(verify="off"))
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place" or name in DENSE
    assert_as_exact(model, args, fused)


class FromStart(Assigns):
    """One token of each sequence, at a place that the caller gives as an int."""

    def __init__(self, part: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__(lambda cache: part(cache, self.start))

    def forward(self, start: int, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.start = start
        return super().forward(*args)


@pytest.mark.parametrize(
    ("part", "placement"),
    one_in(
        1,
        [
            (lambda c, n: c[:8, n : n + 1], "staged"),
            (lambda c, n: c[1:9, n : n + 1], "staged"),
            (lambda c, n: c[:8, n + 1 : n + 2], "staged"),
            (lambda c, n: c[:8, 2:][:, n : n + 1], "staged"),
            (lambda c, n: c[:8, n : n + 2][:, :1], "staged"),
            (lambda c, n: c[n : n + 8, 3:4], "staged"),
        ],
    ),
)
def test_rows_from_a_symbolic_place_on(
    part: Callable[[Tensor, int], Tensor], placement: str
) -> None:
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
    assert fusion.placement.startswith(placement)
