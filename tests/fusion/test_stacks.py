"""What stacks assemble in place fuses as what it is made of; with one thing wrong it stays, or stays exact."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import spellings as s
from tests.catalogue.stacks import (
    MISSES,
    STACKS,
    Args,
    PrefillOfOperator,
    RowsNotGiven,
    RowsOfOperator,
    WrittenBack,
    row_args,
)
from tests.catalogue.variants import IN_PLACE, STAGED
from tests.harness import assert_as_exact, both_ways, clones, compiled, flat, outcome


@pytest.mark.parametrize("name", STACKS)
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, args, placement = STACKS[name]
    module, given = model(), args()
    for report, fused in both_ways(module, given):
        assert outcome(report) == placement, str(report)
        assert_as_exact(module, given, fused, slack=1.2)


@pytest.mark.parametrize("name", ["RowsInPlace", "CountedPairs", "RowsOfOperator"])
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


@pytest.mark.parametrize(
    ("model", "args", "expected"),
    [
        (WrittenBack, row_args, STAGED),
        (PrefillOfOperator, s.paged_args, IN_PLACE),
        (RowsNotGiven, s.paged_args, "reader.latent"),
    ],
)
def test_unabsorbed(model: type[torch.nn.Module], args: Args, expected: str) -> None:
    torch.manual_seed(0)
    module, given = model(), args()
    for report, fused in both_ways(module, given, mf.Config(unabsorbed="identity")):
        assert outcome(report) == expected, str(report)
        assert_as_exact(module, given, fused, slack=1.2)


def test_rows_of_a_skipped_token_are_not_read_outside_the_cache() -> None:
    torch.manual_seed(0)
    module, (*given, slots) = RowsOfOperator(), s.paged_args()
    slots[3] = -1
    kept = torch.arange(8) != 3

    def scores(backend: object) -> torch.Tensor:
        out = compiled(module, clones((*given, slots)), backend)[0]
        return out[kept][..., kept]

    with_rows, plain = scores(mf.backend()), scores(mf.backend(mf.Config(enable=False)))
    assert mf.reports()[-2].fused[0].assumptions[-1].startswith("the new rows are read back")
    assert torch.allclose(with_rows, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max()))


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
