"""Every entry of the catalogue: fused where it says and as exactly as before, or refused with the
code it says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import mla_fusion as mf
from tests.catalogue import Entry, select
from tests.harness import (
    assert_as_exact,
    clones,
    compiled,
    flat,
    fuse_only,
    graph_of,
    outcome,
    refused,
)

ELSEWHERE = "near miss, plain, unabsorbed"  # test_int8_plain.py, test_unabsorbed.py, and below
OF_BYTES = {"int8", "cache"}, {"floats", "cache"}  # test_int8_caches.py, test_floats.py
FUSED = [
    entry for entry in select(without=ELSEWHERE) if not any(tags <= entry.tags for tags in OF_BYTES)
]


def each(entries: Iterable[Entry], *more: Any, of: int = 1, first: int = 0) -> list[Any]:
    """A case for every entry, marked as its tags say; one of ``of`` runs each time, the others are
    exhaustive.

    The forms of a graph begin at entries of their own, so that more entries are seen each time.
    """
    cases = []
    for number, entry in enumerate(entries):
        marks = [pytest.mark.portable] if "portable" in entry.tags else []
        marks += [pytest.mark.exhaustive] if number % of != first else []
        cases.append(
            pytest.param(entry, *more, marks=marks, id="-".join([entry.name, *map(str, more)]))
        )
    return cases


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_outcome(report: mf.Report, entry: Entry, alone: bool = False) -> None:
    assert outcome(report) == (entry.alone if alone and entry.alone else entry.outcome), str(report)
    assert {fusion.target for fusion in report.fused} <= {entry.targets[-1]}, str(report)
    assert all(entry.detail in fusion.placement for fusion in report.fused), str(report)
    assert all(
        fusion.instead_of.startswith(f"[{entry.instead_of}")
        for fusion in report.fused
        if entry.instead_of
    )
    modes = {fusion.attributes.get("weight_quant_mode", 0) for fusion in report.fused}
    assert modes <= {entry.weight_quant_mode}, str(report)
    assert not (report.fused and report.rejected), str(report)


@pytest.mark.parametrize("entry", each(FUSED, of=8))
def test_fuses_as_exactly(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    fused = compiled(model, clones(args), mf.backend(entry.config(verify="all")))
    assert_outcome(mf.reports()[-1], entry)
    assert all(value.double().isfinite().all() for value in fused if value.is_floating_point())
    assert_as_exact(model, args, fused, entry.slack)


@pytest.mark.parametrize("entry", each(FUSED, of=16, first=1))
def test_fuses_without_a_boundary(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    fused = compiled(model, clones(args), fuse_only(entry.config(verify="all")))
    assert_outcome(mf.reports()[-1], entry, alone=True)
    assert_as_exact(model, args, fused, entry.slack)


@pytest.mark.parametrize("entry", each(select("symbolic"), of=10, first=1))
def test_symbolic_sizes(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    fused = compiled(model, clones(args), mf.backend(entry.config()), dynamic=True)
    assert_outcome(mf.reports()[-1], entry)
    assert_as_exact(model, args, fused, entry.slack)


@pytest.mark.parametrize(
    ("entry", "dynamic"),
    [
        *each(select("device", without="near miss"), False, of=10, first=3),
        *each(select("device", "whole", "symbolic"), True, of=10, first=0),
    ],
)
def test_device_form(entry: Entry, dynamic: bool) -> None:
    """The graph that torchair's pre-pass hook receives on device npu; fused, it holds no prologue
    any more.
    """
    gm = graph_of(entry.model(), *entry.args(), device="npu", dynamic=dynamic)
    assert_outcome(mf.fuse(gm, entry.config()), entry)
    assert mf.fuse(gm, entry.config()).fused == []


@pytest.mark.parametrize("entry", each(select("export")))
def test_an_exported_module_is_called_as_before(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    exported = torch.export.export(model, args).run_decompositions({}).module()
    assert_outcome(mf.fuse(exported, entry.config()), entry)
    with torch.no_grad():
        assert_as_exact(model, args, [*flat(exported(*(ours := clones(args)))), *ours], entry.slack)


MISSES = select("near miss", without="run, plain, unabsorbed")


@pytest.mark.parametrize(
    ("entry", "device"), [*each(MISSES, "cpu", of=8), *each(MISSES, "npu", of=8, first=4)]
)
def test_a_near_miss_is_refused(entry: Entry, device: str) -> None:
    gm = graph_of(entry.model(), *entry.args(), device=device)
    assert (refused(gm, entry.config()).code,) == entry.outcome


@pytest.mark.parametrize("entry", each(select("near miss", "run"), of=6))
def test_a_near_miss_is_never_wrong(entry: Entry) -> None:
    """Without verification, so that the facts alone must tell it apart."""
    model, args = entry.model(), entry.args()
    got = compiled(model, clones(args), mf.backend(entry.config(verify="off")))
    assert_outcome(mf.reports()[-1], entry)
    assert_as_exact(model, args, got, entry.slack)
