"""What is refused when a plan is to be committed: order, streams, verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.commit import rewrite
from mla_fusion.fx.build import Builder
from mla_fusion.graph.form import Value
from mla_fusion.graph.lower import Lowering
from mla_fusion.plan.plan import Plan
from mla_fusion.witness import compare
from tests.catalogue import base, prologues
from tests.harness import refused, traced_graph


def test_exported_programs() -> None:
    """torch.export's graph keeps its cache writes in place (staged); functional if decomposed."""
    program = torch.export.export(prologues.PagedRotateHalf(), base.paged_args())
    gm = program.module()
    assert isinstance(gm, GraphModule)
    assert [f.placement.partition(":")[0] for f in mf.fuse(gm).fused] == ["staged"]
    (fusion,) = mf.fuse(program.run_decompositions().graph_module).fused
    # which the graph returns
    assert fusion.placement.startswith("written by the kernel into new caches")


def test_a_prologue_that_nobody_reads() -> None:
    """Dead ends that no clean-up took away: the last values are there, and nothing after them."""
    gm = traced_graph(base.Base(), *base.paged_args())
    (fusion,) = mf.explain(gm).fused
    *nodes, output = gm.graph.nodes
    made = [node for node in nodes if node.name in fusion.replaced]
    rows = [
        node for write in made for node in write.all_input_nodes if "index_put" in str(write.target)
    ]
    output.args = ((nodes[0],),)
    after = {*made, *rows}
    for node in nodes:
        if after.intersection(node.all_input_nodes):
            after.add(node)
    kept = {node for node in made if "cache" not in fusion.replaced[node.name]}
    for node in reversed(nodes):
        if node in after and node not in kept and node.op == "call_function" and not node.users:
            gm.graph.erase_node(node)
    assert refused(gm).code == "graph.unread"


def test_mixed_streams() -> None:
    gm = traced_graph(prologues.PagedRotateHalf(), *base.paged_args())
    mm = next(node for node in gm.graph.nodes if "mm" in node.name)
    mm.meta["stream_label"] = "11"
    assert refused(gm).code == "stream.mixed"


@torch.library.custom_op("mla_fusion_test::no_such_kernel", mutates_args=())
def no_such_kernel(value: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel")


no_such_kernel.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("mla_fusion_test.no_such_kernel", "no such kernel"),
        ("aten.neg", f"limit {compare.TOLERANCE}"),
    ],
)
def test_call_that_does_not_run_or_gives_other_numbers(
    monkeypatch: pytest.MonkeyPatch, operator: str, said: str
) -> None:
    right = rewrite.emit_call
    namespace, name = operator.split(".")
    wrong = getattr(getattr(torch.ops, namespace), name).default

    def changed(b: Builder, lower: Lowering, plan: Plan) -> dict[Value, Any]:
        results = right(b, lower, plan)
        return {leaf: b.call(wrong, node) for leaf, node in results.items()}

    monkeypatch.setattr(rewrite, "emit_call", changed)
    rejection = refused(traced_graph(prologues.PagedRotateHalf(), *base.paged_args()))
    assert rejection.code == "verify.mismatch" and said in rejection.message
