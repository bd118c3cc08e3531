"""What fuses with eight tokens fuses with those of serving, few of which are probed."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from tests.catalogue import ENTRIES, base
from tests.exhaustive import one_in
from tests.harness import traced_graph

ROWS = 1024


@pytest.mark.parametrize("tokens", one_in(2, [64, 96, 100, 128, 512]))
@pytest.mark.parametrize("name", ["AbsorbByEinsum", "WholeHeads", "scaled_shear", "TokensLast"])
def test_many_tokens(name: str, tokens: int) -> None:
    x, cos, sin, *_ = base.paged_args(tokens)
    caches = (
        torch.zeros(ROWS // base.BLOCK_SIZE, base.BLOCK_SIZE, 1, width).bfloat16()
        for width in (base.HCKV, base.DR)
    )
    graph = traced_graph(ENTRIES[name].model(), x, cos, sin, *caches, torch.randperm(ROWS)[:tokens])
    report = mf.explain(graph, mf.Config(verify="off"))
    assert [fusion.placement for fusion in report.fused] == ["in place"], str(report)
