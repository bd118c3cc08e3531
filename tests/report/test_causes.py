"""Messages name what is the case: the compiler, the cause, the operator, the line."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.harness import graph_of, traced_graph


def of_a_block_major_pool() -> tuple[Tensor, ...]:
    """The caches of one layer, strided in their first axis."""
    x, cos, sin, kv, kr, slots = paged_args()
    pools = (torch.stack([cache, cache], 1) for cache in (kv, kr))
    return (x, cos, sin, *(pool[:, 0] for pool in pools), slots)


class ByBlockAndPlace(Base):
    """What is made of it is given out, not attended over."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        c, s = cos[:, None], sin[:, None]
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe[:, None], c, s)[:, 0])
        return self.absorb(q_nope), self.rotate(q_pe, c, s)

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache[slots // 16, slots % 16] = c_kv[:, None]
        kr_cache[slots // 16, slots % 16] = k_pe[:, None]


@pytest.mark.parametrize("hook", [False, True])
def test_ge_copies_a_strided_cache_and_the_report_says_so(hook: bool) -> None:
    args = of_a_block_major_pool()
    report = mf.lower(ByBlockAndPlace(), *args, hook=hook).report
    assert report is not None
    (fusion,) = report.fused
    assert fusion.placement == "in place"
    assert len(fusion.warnings) == 2
    assert f"{2 * args[3].numel() * 2 // 1024}.0 KiB a step" in fusion.warnings[0]
    named = "arg" if hook else "kv_cache"  # a hook is not told how the model calls its inputs
    assert f"warning: {named}" in str(report) and "has strides" in fusion.warnings[0]
    assert "stored as halves" not in fusion.rope


def test_only_ge_copies_it() -> None:
    args = of_a_block_major_pool()
    lowered = mf.lower(ByBlockAndPlace(), *args, mode="npugraph_ex").report
    here = mf.explain(graph_of(ByBlockAndPlace(), *args), boundary=True)
    contiguous = mf.lower(ByBlockAndPlace(), *paged_args()).report
    for report in (lowered, here, contiguous):
        assert report is not None
        assert [(one.placement, one.warnings) for one in report.fused] == [("in place", ())]
