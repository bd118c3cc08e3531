"""A size that no node of the graph holds: the value that has it is asked."""

from __future__ import annotations

import torch

import mla_fusion as mf
from tests.catalogue import prologues
from tests.catalogue.base import paged_args
from tests.harness import clones, distance


def test_halves_of_the_tokens() -> None:
    """Two prologues, each of half of the tokens: how many the second half has, its x says."""

    class Halves(prologues.PagedRotateHalf):
        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, cos, sin, kv_cache, kr_cache, slots = args
            half = len(x) // 2
            caches = kv_cache, kr_cache
            first = x[:half], cos[:half], sin[:half], *caches, slots[:half]
            second = x[half:], cos[half:], sin[half:], *caches, slots[half:]
            return super().forward(*first), super().forward(*second)

    torch.manual_seed(0)
    model, args = Halves().eval(), paged_args()
    for place in (0, 1, 2, 5):
        torch._dynamo.mark_dynamic(args[place], 0)
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)
    for tokens in (8, 7):
        given = [arg[:tokens] if len(arg) == 8 else arg for arg in args]
        with torch.no_grad():
            got, want = run(*clones(given)), model(*clones(given))
        assert all(distance(one, other) < 0.02 for one, other in zip(got, want, strict=True))
    report = mf.reports()[-1]
    assert len(report.fused) == 2 and not report.rejected
