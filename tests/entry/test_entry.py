"""``mf.fuse`` and ``mf.explain``: what they change, what they skip, and calls that are wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import ENTRIES, STAGED, base, misses_products, prologues
from tests.harness import clones, graph_of, outcome, refused, traced_graph


def test_explain_gives_the_reason_that_fuse_gives() -> None:
    gm = traced_graph(misses_products.Bias(), *base.paged_args())
    assert mf.explain(gm).rejected == mf.fuse(gm).rejected


def test_explain_changes_nothing() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    before = str(gm.graph)
    assert len(mf.explain(gm).fused) == 1
    assert str(gm.graph) == before


def test_explain_leaves_what_is_assembled_in_place() -> None:
    entry = ENTRIES["RowsInPlace"]
    gm, _ = capture(entry.model(), *entry.args())
    before = str(gm.graph)
    assert outcome(mf.explain(gm)) == (STAGED,) and str(gm.graph) == before


def test_an_unfused_graph_keeps_its_writes() -> None:
    entry = ENTRIES["shifted"]
    gm, _ = capture(entry.model(), *entry.args())
    before = str(gm.graph)
    mf.fuse(gm)
    assert str(gm.graph) == before
    mf.explain(gm)
    assert str(gm.graph) == before


def test_a_predicate_that_raises_is_the_callers_error() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    with pytest.raises(RuntimeError, match=r"in Config.skip raised AttributeError"):
        mf.fuse(gm, mf.Config(skip=(lambda candidate: candidate.no_such_fact,)))


@pytest.mark.parametrize(
    "entry",
    ["layers.1", lambda candidate: "layers.1" in str(candidate.nodes[0].meta["nn_module_stack"])],
)
def test_skip_by_layer_and_predicate(entry: Any) -> None:
    gm = graph_of(prologues.Layers(), *prologues.layers_args())
    report = mf.fuse(gm, mf.Config(skip=(entry,)))
    assert len(report.fused) == 2
    assert [(r.code, r.layer) for r in report.rejected] == [("skip", "layers.1")]


@pytest.mark.parametrize("model", [base.Base, misses_products.Bias, misses_products.Unabsorbed])
def test_skip_takes_the_name_that_the_report_gives(model: type[torch.nn.Module]) -> None:
    gm = traced_graph(model(), *base.paged_args())
    report = mf.explain(gm)
    (found,) = (*report.fused, *report.rejected)
    assert refused(gm, mf.Config(skip=(found.layer,))).code == "skip"


@pytest.mark.parametrize("entry", ["contract", "contract:dims.he"])
def test_skip_by_code_is_silent(
    entry: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "HE", 1152)
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    rejection = refused(gm, mf.Config(skip=(entry,)))
    assert rejection.code == "skip" and "contract:dims.he is in Config.skip" in rejection.message
    assert not caplog.records
    assert refused(gm).code == "contract:dims.he" and len(caplog.records) == 1


def test_disabled_pass_leaves_the_graph() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    before = str(gm.graph)
    report = mf.fuse(gm, mf.Config(enable=False))
    assert (report.fused, report.rejected, str(gm.graph)) == ([], [], before)
    assert "the pass is off: Config.enable is False" in str(report)


@pytest.mark.parametrize("given", [{"enable": "yes"}, {"skip": (3,)}])
def test_a_configuration_without_a_meaning_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Config.{next(iter(given))} "):
        mf.Config(**given)


def test_gradients_are_declined() -> None:
    torch._dynamo.reset()
    model = prologues.PagedRotateHalf()
    args = clones(base.paged_args())
    out = torch.compile(model, backend=mf.backend())(*args)
    assert out.requires_grad
    assert [r.code for r in mf.reports()[-1].rejected] == ["autograd"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: mf.fuse(torch.nn.Linear(2, 2)), TypeError, "GraphModule"),  # type: ignore[arg-type]
        (lambda: mf.fuse(torch.fx.symbolic_trace(torch.nn.Linear(2, 2))), ValueError, "meta"),
        (lambda: mf.Config(verify="sometimes"), ValueError, "off, first, all"),
        (lambda: mf.Config(cann="9.9"), ValueError, "9.0, 9.1, .*latest"),
        (lambda: mf.Config(soc="910"), ValueError, "A2 .*, A3 .*, A5 "),
        (lambda: mf.Config(skip="layers.1"), ValueError, "sequence"),  # type: ignore[arg-type]
        (lambda: mf.Config(targets=None), ValueError, "sequence"),  # type: ignore[arg-type]
        (lambda: mf.release(3), TypeError, "a module or a sequence"),  # type: ignore[arg-type]
        (lambda: mf.audit(torch.relu, torch.relu, soc="A9"), ValueError, "one of A2, A3, A5"),
        (lambda: mf.audit(torch.relu, torch.relu, tolerance=-1), ValueError, "positive"),
        (lambda: mf.torchair_pass(mf.Config(skip=(lambda c: True,))), ValueError, "module-level"),
    ],
)
def test_bad_calls(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_config_can_be_copied() -> None:
    assert copy.deepcopy(mf.Config(verify="all")) == mf.Config(verify="all")
