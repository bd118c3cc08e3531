"""How many tokens a proof draws, and what it takes for equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.commit import proof
from mla_fusion.compile.device_graph import capture
from mla_fusion.emit import targets
from mla_fusion.fx.build import Builder
from mla_fusion.fx.shrink import Shrink
from mla_fusion.plan.plan import Plan
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


class CastTwice(base.Base):
    """Slots that are made of integers equal to them."""

    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots.int().long().reshape(-1)


def test_slots_are_no_twin_of_what_they_are_made_of() -> None:
    gm, _ = capture(CastTwice(), *base.paged_args(), device="cpu")
    (fusion,) = mf.explain(gm, boundary=True).fused
    assert fusion.placement == "in place" and fusion.verified


@pytest.mark.parametrize("at", [1, 2])
def test_a_defect_is_no_refusal(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A rule that does not know a shape refuses, and fewer assumptions are tried; a defect of what
    makes the call is told as one, even if it comes once.
    """
    calls, call_kernel = 0, targets.call_kernel

    def broken(b: Builder, plan: Plan) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("broken")
        return call_kernel(b, plan)

    monkeypatch.setattr(targets, "call_kernel", broken)
    graph, _ = capture(base.Base(), *base.paged_args(), device="cpu")
    report = mf.fuse(graph, mf.Config(strict=False))
    assert [item.code for item in report.rejected] == ["pass.failed"] and calls == at
    calls = 0
    with pytest.raises(RuntimeError, match="broken"):
        mf.fuse(graph, mf.Config(strict=True))
