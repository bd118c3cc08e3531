"""What stacks assemble in place fuses as what it is made of; with one thing wrong it stays, or stays exact."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture

from .harness import assert_as_exact, both_ways, clones, compiled, flat, outcome
from .stacks import MISSES, STACKS, WrittenBack, row_args
from .variants import STAGED


@pytest.mark.parametrize("name", STACKS)
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, args, placement = STACKS[name]
    module, given = model(), args()
    for report, fused in both_ways(module, given):
        assert outcome(report) == placement, str(report)
        assert_as_exact(module, given, fused, slack=1.2)


@pytest.mark.parametrize("name", ["RowsInPlace", "CountedPairs"])
def test_device_form(name: str) -> None:
    model, args, placement = STACKS[name]
    gm, _ = capture(model(), *args(), device="npu")
    assert outcome(mf.fuse(gm)) == placement


@pytest.mark.parametrize("name", ["RowsInPlace", "HeadsFirst", "FourSequences"])
def test_symbolic_sizes(name: str) -> None:
    torch.manual_seed(0)
    model, args, placement = STACKS[name]
    module, given = model(), args()
    fused = compiled(module, clones(given), mf.backend(), dynamic=True)
    assert outcome(mf.reports()[-1]) == placement, str(mf.reports()[-1])
    assert_as_exact(module, given, fused, slack=1.2)


def test_unabsorbed_and_written_back() -> None:
    torch.manual_seed(0)
    module, given = WrittenBack(), row_args()
    for report, fused in both_ways(module, given, mf.Config(unabsorbed="identity")):
        assert outcome(report) == STAGED, str(report)
        assert_as_exact(module, given, fused, slack=1.2)


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_is_never_wrong(name: str) -> None:
    torch.manual_seed(0)
    model, args, expected = MISSES[name]
    module, given = model(), args()
    got = compiled(module, clones(given), mf.backend(mf.Config(verify="off")))
    assert outcome(mf.reports()[-1]) == expected, str(mf.reports()[-1])
    assert_as_exact(module, given, got, slack=1.2)


def test_an_unfused_graph_keeps_its_writes() -> None:
    model, args, _ = MISSES["shifted"]
    gm, _ = capture(model(), *args())
    before = str(gm.graph)
    mf.fuse(gm)
    assert str(gm.graph) == before
    mf.explain(gm)
    assert str(gm.graph) == before


def test_an_exported_module_is_called_as_before() -> None:
    torch.manual_seed(0)
    model, args, placement = STACKS["RowsInPlace"]
    module, given = model(), args()
    exported = torch.export.export(module, given).run_decompositions({}).module()
    assert outcome(mf.fuse(exported)) == placement
    with torch.no_grad():
        assert_as_exact(module, given, [*flat(exported(*(ours := clones(given)))), *ours], slack=1.2)


def test_explaining_changes_nothing() -> None:
    model, args, _ = STACKS["RowsInPlace"]
    gm, _ = capture(model(), *args())
    before = str(gm.graph)
    assert outcome(mf.explain(gm)) == STAGED and str(gm.graph) == before
