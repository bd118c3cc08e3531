"""A failure, wherever it happens, costs a graph its fusion and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, compiled, traced_graph
from tests.soundness.families import FAMILIES
from tests.soundness.families.transaction import PLACES, broken
from tests.soundness.member import Member, Verdict


@cache
def _captured() -> GraphModule:
    return traced_graph(prologues.Layers(), *prologues.layers_args())


def layers() -> GraphModule:
    """A copy of one captured graph."""
    return copy.deepcopy(_captured())


def state(gm: GraphModule) -> tuple[Any, ...]:
    """All that callers see of a module: nodes, arguments, metadata, code and attributes."""
    nodes = [
        (node, node.args, node.kwargs, node.target, list(node.users), dict(node.meta))
        for node in gm.graph.nodes
    ]
    held = [
        (name, id(value))
        for name, value in (*gm.named_buffers(), *gm.named_parameters(), *gm.named_modules())
    ]
    return gm.graph, str(gm.graph), gm.code, nodes, held, sorted(vars(gm))


@pytest.mark.parametrize("place", one_in(6, PLACES))
def test_a_defect_leaves_the_graph_as_it_was(place: str) -> None:
    """And the report says so; ``Config(strict=True)`` raises it."""
    family = FAMILIES["transaction.defect"]
    assert family.judge is not None
    for regime, at in (("boundary", 1), ("fuse", 1), ("fuse", 5)):
        found = family.judge(Member(family.name, f"{place}#{at}", "commit", regime, "paged"))
        assert found.verdict is Verdict.REFUSED, found.detail


@pytest.fixture(scope="module", name="layers_model")
def _layers_model() -> tuple[nn.Module, tuple[Tensor, ...], list[Tensor]]:
    """A model of three layers, its arguments, and what both are after a run without the pass."""
    model, args = prologues.Layers(), prologues.layers_args()
    return model, args, compiled(model, clones(args), "aot_eager")


@pytest.mark.parametrize("place", one_in(8, [path for path in PLACES if "torch" not in path]))
def test_a_compiled_model_runs_as_if_the_pass_were_not_there(
    place: str, layers_model: tuple[nn.Module, tuple[Tensor, ...], list[Tensor]]
) -> None:
    model, args, want = layers_model
    with broken(place, 1) as calls:
        got = compiled(model, clones(args), mf.backend(mf.Config(strict=False)))
    report = mf.reports()[-1]
    assert not calls[0] or report.rejected, str(report)
    if report.fused:  # the other layers
        assert_as_exact(model, args, got, slack=1.3)
    else:
        assert all(map(torch.equal, got, want))


def test_a_defect_while_one_pair_of_sites_is_probed_costs_that_pair() -> None:
    with broken("mla_fusion.propose.prologue:_Joiner.proposal", 1):
        report = mf.fuse(layers(), mf.Config(verify="off", strict=False))
    assert [rejection.code for rejection in report.rejected] == ["pass.failed"]
    assert report.fused


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
