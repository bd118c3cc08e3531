"""A symbolic size that a guard has made a number is written as that number."""

from __future__ import annotations

import torch

import mla_fusion as mf
from tests.catalogue import select
from tests.harness import clones, distance, traced


def test_scales_in_blocks_of_a_width_that_was_symbolic() -> None:
    """make_fx gives the width of x a symbol, and the first product makes it a number."""
    torch.manual_seed(0)
    (entry,) = (entry for entry in select("symbolic") if entry.name == "MxFull")
    model, args = entry.model(), entry.args()
    gm, weights = traced(model, args, dynamic=True)
    (fusion,) = mf.fuse(gm, entry.config(strict=True)).fused
    assert fusion.placement == "in place"
    mine, theirs = clones(args), clones(args)
    with torch.no_grad():
        found, wanted = [*gm(*weights, *mine), *mine], [*model(*theirs), *theirs]
    assert all(distance(a, b) < 3e-2 for a, b in zip(found, wanted, strict=True))
