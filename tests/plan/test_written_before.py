"""A cache of which other rows were written before: it is that cache, and no part of one."""

from __future__ import annotations

from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.prologues import PagedRotateHalf
from tests.harness import traced_graph


class Cleared(PagedRotateHalf):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *held: Tensor) -> Tensor:
        for cache in held[:2]:
            cache[1:].zero_()
        return super().forward(x, cos, sin, *held)


def test_the_step_before_is_named() -> None:
    (fusion,) = mf.fuse(traced_graph(Cleared(), *paged_args())).fused
    assert {item.code for item in fusion.staged_by} == {"cache.no_input"}
    for item in fusion.staged_by:
        assert "has written it" in item.message and "is a part of" not in item.message
