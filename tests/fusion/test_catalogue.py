"""Every entry of the catalogue: fused where it says, as exactly as before, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from mla_fusion.meta.number_formats import HIFLOAT8
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import ENTRIES, Entry, select
from tests.catalogue.base import HCKV
from tests.catalogue.int8_plain import PlainFull
from tests.harness import (
    as_for_backend,
    assert_as_exact,
    assert_no_worse,
    both_ways,
    clones,
    compiled,
    distance,
    eager,
    exact,
    flat,
    graph_of,
    outcome,
    refused,
    run_fused,
)

FUSED, MISSES = select(without="near miss"), select("near miss", without="run")


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
def _seeded() -> Iterator[None]:
    """One thread: of two, either may be the last that writes a slot."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_outcome(report: mf.Report, entry: Entry, alone: bool = False) -> None:
    assert outcome(report) == (entry.alone if alone and entry.alone else entry.outcome), str(report)
    assert {fusion.target for fusion in report.fused} <= {entry.config().targets[-1]}, str(report)
    assert all(entry.detail in fusion.placement for fusion in report.fused), str(report)
    assert all(
        fusion.instead_of.startswith(f"[{entry.instead_of}")
        for fusion in report.fused
        if entry.instead_of
    )
    for name in ("weight_quant_mode", "kv_cache_quant_mode"):
        modes = {fusion.attributes.get(name, 0) for fusion in report.fused}
        assert modes <= {getattr(entry, name)}, str(report)
    assert not (report.fused and report.rejected), str(report)


def assert_right(
    entry: Entry, model: nn.Module, args: tuple[Tensor, ...], fused: list[Tensor]
) -> None:
    """As exact as the unfused run; where caches hold numbers of one byte, nearly the same bytes,
    and those of other rows the same.
    """
    floats = (one for one in fused if one.is_floating_point() and one.dtype.itemsize > 1)
    assert all(one.double().isfinite().all() for one in floats)
    if not ("cache" in entry.tags and entry.tags & {"int8", "floats"}):
        if {"plain", "weights"} <= entry.tags:
            torch.manual_seed(0)
            model_in_float64 = PlainFull()  # holds the same numbers, by products that float64 has
            assert_no_worse(
                exact(model_in_float64, args), eager(model, clones(args)), fused, entry.slack
            )
        else:
            assert_as_exact(model, args, fused, entry.slack)
        return
    unfused = eager(model, clones(args))
    rough = entry.weight_quant_mode == HIFLOAT8.full
    assert distance(fused[0], unfused[0]) < (1e-1 if rough else 3e-2)
    for before, plain, got in zip(args[3:5], unfused[-3:-1], fused[-3:-1], strict=True):
        old, wanted, new = (cache.reshape(-1, cache.shape[-1]) for cache in (before, plain, got))
        bytes_of = [rows.contiguous().view(torch.uint8) for rows in (old, wanted, new)]
        kept = (bytes_of[0] == bytes_of[1]).all(-1)
        assert torch.equal(bytes_of[2][kept], bytes_of[0][kept])
        rounded = 0.05 if got.dtype == torch.int8 else 0.1  # powers of two of blocks among them
        assert (bytes_of[1] != bytes_of[2]).float().mean() < rounded
        if got.dtype == torch.int8:  # behind the latent of packed rows are keys and scales
            steps = (new[:, :HCKV].int() - wanted[:, :HCKV].int()).abs()
            assert steps.max() <= (1 if got.shape[-1] <= HCKV else 2)


# Of what fuses, other entries than those that the next two tests compile.
@pytest.mark.parametrize("entry", [*each(select("near miss"), of=5), *each(FUSED, of=20, first=2)])
def test_an_outcome_is_read_from_the_graph(entry: Entry) -> None:
    """Without verification, so that the facts alone must tell near misses apart."""
    if entry.name in ("LatentDropout", "KeptCopies"):
        # what AOT makes of a dropout, and Dynamo of tensors that a model keeps
        gm = graph_of(entry.model(), *entry.args())
    else:
        gm, _ = as_for_backend(entry.model(), entry.args())
    config = entry.config(verify="off")
    if entry in MISSES:
        assert (refused(gm, config).code,) == entry.outcome
    else:
        assert_outcome(mf.explain(gm, config, boundary=True), entry)


@pytest.mark.parametrize("entry", each(FUSED, of=20))
def test_fuses_as_exactly(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    fused = run_fused(model, clones(args), entry.config(verify="all"))
    report = mf.reports()[-1]
    assert_outcome(report, entry)
    assert_right(entry, model, args, fused)


# of two inputs that are multiplied, a graph alone takes the right one for the weight
WEIGHTS_ON_THE_RIGHT = [
    entry for entry in FUSED if entry.name not in ("TokensLast", "WeightOnTheLeft")
]


@pytest.mark.parametrize("entry", each(WEIGHTS_ON_THE_RIGHT, of=100, first=4))
def test_compiled_and_by_fuse_alone(entry: Entry) -> None:
    """As the backend does it, and by ``mf.fuse``."""
    model, args = entry.model(), entry.args()
    for alone, (report, fused) in enumerate(both_ways(model, args, entry.config(verify="all"))):
        assert_outcome(report, entry, alone=bool(alone))
        assert_right(entry, model, args, fused)


@pytest.mark.parametrize("entry", each(select("symbolic"), of=32, first=1))
def test_symbolic_sizes(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    fused = compiled(model, clones(args), mf.backend(entry.config()), dynamic=True)
    assert_outcome(mf.reports()[-1], entry)
    assert_right(entry, model, args, fused)


def test_a_cache_whose_width_is_a_symbol() -> None:
    """Unverified: steps of the witness would make it a number."""
    entry = ENTRIES["OperatorsNz"]
    compiled(entry.model(), entry.args(), mf.backend(entry.config(verify="off")), dynamic=True)
    assert_outcome(mf.reports()[-1], entry)


@pytest.mark.parametrize(
    ("entry", "dynamic"),
    [
        *each(select("device", without="near miss"), False, of=50, first=3),
        *each(select("device", "whole", "symbolic"), True, of=50, first=0),
    ],
)
def test_device_form(entry: Entry, dynamic: bool) -> None:
    """The graph that torchair's pre-pass hook receives on device npu."""
    gm = graph_of(entry.model(), *entry.args(), device="npu", dynamic=dynamic)
    assert_outcome(mf.fuse(gm, entry.config()), entry)


@pytest.mark.parametrize("entry", each(select("export")))
def test_an_exported_module_is_called_as_before(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    exported = torch.export.export(model, args).run_decompositions({}).module()
    assert_outcome(mf.fuse(exported, entry.config()), entry)
    with torch.no_grad():
        fused = [*flat(exported(*(ours := clones(args)))), *ours]
    assert_right(entry, model, args, fused)


@pytest.mark.parametrize("entry", each(MISSES, of=16, first=4))
def test_a_near_miss_is_refused_on_an_npu(entry: Entry) -> None:
    gm = graph_of(entry.model(), *entry.args(), device="npu")
    assert (refused(gm, entry.config(verify="off")).code,) == entry.outcome


@pytest.mark.parametrize("entry", each(select("near miss", "run"), of=6))
def test_a_near_miss_is_never_wrong(entry: Entry) -> None:
    model, args = entry.model(), entry.args()
    got = run_fused(model, clones(args), entry.config(verify="off"))
    assert_outcome(mf.reports()[-1], entry)
    assert_right(entry, model, args, got)
