"""A failure, wherever it happens, costs a graph its fusion and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import mla_fusion as mf
from mla_fusion.commit import rewrite, transaction, verify
from mla_fusion.compile.boundary import BoundaryBuilder
from mla_fusion.compile.device_graph import capture
from mla_fusion.emit import contract, results, targets
from mla_fusion.fx import build, strides
from mla_fusion.match.finder import Finder
from mla_fusion.observe import draw
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import clones, compiled

# Where something may go wrong: an attribute, and how many calls of it go well. The layers model has
# three prologues.
STAGES: dict[str, tuple[Any, str, int]] = {
    "recognition": (Finder, "find", 0),
    "plan": (rewrite, "prove", 1),
    "contract": (contract, "ask", 0),
    "picture": (draw, "fused", 0),
    "verification": (verify, "compare", 0),
    "place": (rewrite, "prove", 4),
    # the first ones are made by the proof and by verification
    "first call": (targets, "call_kernel", 6),
    "last call": (targets, "call_kernel", 8),
    "result": (results, "fit", 12),
    "propagation": (build.GraphBuilder, "propagate", 8),
    "copy": (rewrite, "copied", 100),
    "strides": (strides, "follow", 0),
    "finish": (build.GraphBuilder, "finish", 0),
    "lint": (Graph, "lint", 0),
    "close": (build.GraphBuilder, "close", 0),
    "install": (transaction, "install", 0),
}
OF_BOUNDARY = {
    "packing": (BoundaryBuilder, "packed", 5),
    "finish": (BoundaryBuilder, "finish", 0),
    "inputs": (BoundaryBuilder, "_inputs", 0),
    "bytes": (BoundaryBuilder, "_bytes_packed", 0),
}


class Defect(RuntimeError):
    """What no rule of the pass raises."""


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int) -> None:
    """The call number ``after`` of an attribute, counted from 0, raises; so do those that
    follow.
    """
    right, calls = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) > after:
            raise Defect(f"in {name}")
        return right(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)


@cache
def _captured() -> GraphModule:
    return capture(prologues.Layers(), *prologues.layers_args(), device="cpu")[0]


def layers() -> GraphModule:
    """A copy of one captured graph."""
    return copy.deepcopy(_captured())


def state(gm: GraphModule) -> tuple[Any, ...]:
    """All that a caller can see of a module: nodes by identity, their arguments and metadata, code,
    attributes.
    """
    nodes = [
        (node, node.args, node.kwargs, node.target, list(node.users), dict(node.meta))
        for node in gm.graph.nodes
    ]
    held = [
        (name, id(value))
        for name, value in (*gm.named_buffers(), *gm.named_parameters(), *gm.named_modules())
    ]
    return gm.graph, str(gm.graph), gm.code, nodes, held, sorted(vars(gm))


@pytest.mark.parametrize("stage", one_in(4, STAGES))
def test_a_defect_leaves_the_graph_as_it_was(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gm = layers()
    before = state(gm)
    fail_at(monkeypatch, *STAGES[stage])
    with pytest.raises(Defect):
        mf.fuse(gm)
    assert state(gm) == before
    monkeypatch.undo()
    fail_at(monkeypatch, *STAGES[stage])
    report = mf.fuse(gm, mf.Config(strict=False))
    assert state(gm) == before
    assert report.fused == [] and {item.code for item in report.rejected} == {"pass.failed"}
    assert all(f"Defect: in {STAGES[stage][1]}" in item.message for item in report.rejected)
    assert mf.reports()[-1] is report and "Traceback" in caplog.text
    monkeypatch.undo()
    assert len(mf.fuse(gm).fused) == 3


def test_code_that_cannot_be_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = layers()
    before = state(gm)
    fail_at(monkeypatch, type(gm), "recompile", 0)
    report = mf.fuse(gm, mf.Config(strict=False))
    assert report.fused == [] and [item.code for item in report.rejected] == ["pass.failed"]
    monkeypatch.undo()
    assert state(gm) == before


@pytest.fixture(scope="module", name="layers_model")
def _layers_model() -> tuple[nn.Module, tuple[Tensor, ...], list[Tensor]]:
    """A model of three layers, its arguments, and what both are after a run without the pass."""
    model, args = prologues.Layers(), prologues.layers_args()
    return model, args, compiled(model, clones(args), "aot_eager")


@pytest.mark.parametrize(
    "stage",
    [
        *one_in(4, [f"boundary {stage}" for stage in OF_BOUNDARY]),
        *one_in(
            len(STAGES),
            ["recognition", *(name for name in STAGES if name not in ("lint", "recognition"))],
        ),
    ],
)
def test_a_compiled_model_runs_as_if_the_pass_were_not_there(
    stage: str,
    layers_model: tuple[nn.Module, tuple[Tensor, ...], list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, args, want = layers_model
    where = (
        OF_BOUNDARY[stage.removeprefix("boundary ")]
        if stage.startswith("boundary")
        else STAGES[stage]
    )
    if where[:2] in ((build.GraphBuilder, "finish"), (build.GraphBuilder, "close")):
        where = (BoundaryBuilder, *where[1:])
    fail_at(monkeypatch, *where)
    got = compiled(model, clones(args), mf.backend(mf.Config(strict=False)))
    assert {item.code for item in mf.reports()[-1].rejected} == {
        "pass.failed"
    } and not mf.reports()[-1].fused
    assert all(map(torch.equal, got, want))
    monkeypatch.undo()
    fail_at(monkeypatch, *where)
    with pytest.raises(Exception, match=f"in {where[1]}"):
        compiled(model, clones(args), mf.backend())


def test_the_graph_of_a_module_is_the_new_one_with_its_constants() -> None:
    gm = layers()
    kept, names = gm.graph, [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    mf.fuse(gm)
    assert gm.graph is not kept and gm.graph.owning_module is gm
    assert [node.name for node in gm.graph.nodes if node.op == "placeholder"] == names
    left = {node.name for node in kept.nodes} & {node.name for node in gm.graph.nodes}
    by_name = {node.name: node for node in kept.nodes}
    for node in gm.graph.nodes:
        if node.name in left:  # a name is never given to another operation
            assert node.op == by_name[node.name].op
            assert node.target == by_name[node.name].target or "reshape" in str(node.target)
            assert node.meta.get("stack_trace") == by_name[node.name].meta.get("stack_trace")
            assert node.meta.get("nn_module_stack") == by_name[node.name].meta.get(
                "nn_module_stack"
            )


@pytest.fixture
def exported() -> Iterator[GraphModule]:
    with torch.no_grad():
        yield torch.export.export(prologues.PagedRotateHalf(), base.paged_args()).module()


def test_an_exported_module_keeps_its_parameters_and_runs(exported: GraphModule) -> None:
    parameters = dict(exported.named_parameters())
    args = base.paged_args()
    want = [exported(*(given := clones(args))), *given]
    assert len(mf.fuse(exported).fused) == 1
    assert {name: id(value) for name, value in exported.named_parameters()} == {
        name: id(value) for name, value in parameters.items()
    }
    got = [exported(*(given := clones(args))), *given]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0.1, atol=0.1)


def test_what_explain_gives_a_meta_value_loses_it_again(exported: GraphModule) -> None:
    attributes = exported.graph.find_nodes(op="get_attr")
    for node in attributes:
        node.meta.pop("val", None)
    before = state(exported)
    mf.explain(exported)
    assert state(exported) == before
