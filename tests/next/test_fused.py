"""The next core, over the catalogue: what it fuses is placed as the entry says, and gives what the
model gives.
"""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from tests.catalogue import Entry, select
from tests.exhaustive import one_in
from tests.fusion.test_catalogue import assert_outcome, assert_right
from tests.harness import clones, outcome, run_fused, traced_graph

# What this core does not do yet.
MISSING = {
    "NormByScaledGram",
    "Normalize",
    "QueryByPosition",
    "WrittenBack",
    "linear undivided",
    "scaled_shear",
}
# What it does otherwise: rightly, as the numbers show.
OTHERWISE = {
    # a query times 0, a step of rows times 1: no more than the numbers that are left
    "SlotsFromQuery": ("in place",),
    "QueryReadTwice": ("in place",),
    # all heads times 2, which quantisation takes back
    "SmoothedQuery": ("in place",),
    # what an activation is rounded to is not compared
    "ScaleRounded": ("in place",),
    # staged for a reason in other words
    "PackedUnquantised": ("staged",),
    "RowReturned": ("staged",),
    # the new rows are read from the cache
    "NewRowsRead": ("in place",),
}

FUSED = [entry for entry in select(without="near miss, key, static") if entry.name not in MISSING]


@pytest.fixture(autouse=True)
def _values_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_FUSION_CORE", "values")
    torch.manual_seed(0)


@pytest.mark.parametrize("entry", one_in(12, FUSED, first=4), ids=str)
def test_what_is_fused_is_placed_as_the_entry_says_and_gives_what_the_model_gives(
    entry: Entry,
) -> None:
    model, args = entry.model(), entry.args()
    fused = run_fused(model, clones(args), entry.config(verify="all", strict=True))
    report = mf.reports()[-1]
    if entry.name in OTHERWISE:
        assert outcome(report) == OTHERWISE[entry.name]
    else:
        assert_outcome(report, entry)
    assert_right(entry, model, args, fused)


# of tokens on one axis: sizes that are computed of several are not lowered yet
SYMBOLIC = [entry for entry in FUSED if entry.name in ("PagedRotateHalf", "Neox", "by_einsum")]


@pytest.mark.parametrize("entry", SYMBOLIC, ids=str)
def test_a_graph_with_symbolic_sizes_is_fused_as_well(entry: Entry) -> None:
    gm = traced_graph(entry.model(), *entry.args(), dynamic=True)
    assert_outcome(mf.explain(gm, entry.config(verify="off"), boundary=True), entry)
