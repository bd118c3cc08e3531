"""How many tokens a proof draws."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.commit import proof
from mla_fusion.fx.shrink import Shrink
from mla_fusion.report.rejection import Refuse
from tests.catalogue import base
from tests.harness import compiled, fuse_only

TOKENS, ROWS = 64, 1024


def test_a_large_cache_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fewer tokens do not fit all are drawn, whatever the size of the caches."""
    monkeypatch.setattr(proof, "_ALL_TOKENS", TOKENS * 2 * base.HCKV)
    drawn, compare = list[Shrink | None](), proof._Run.compare_at_all

    def refused_at_first(run: proof._Run) -> int:
        drawn.append(run.at.shrink)
        if len(drawn) == 1:
            raise Refuse("proof.differs", "sizes do not fit")
        return compare(run)

    monkeypatch.setattr(proof._Run, "compare_at_all", refused_at_first)
    x, cos, sin, _, _, _ = base.paged_args(TOKENS)
    caches = (
        torch.zeros(ROWS // base.BLOCK_SIZE, base.BLOCK_SIZE, 1, width).bfloat16()
        for width in (base.HCKV, base.DR)
    )
    args = x, cos, sin, *caches, torch.randperm(ROWS)[:TOKENS]
    compiled(base.Base(), args, fuse_only(mf.Config(verify="off")))
    assert [fusion.placement for fusion in mf.reports()[-1].fused] == ["in place"]
    assert drawn == [Shrink(TOKENS), None]
