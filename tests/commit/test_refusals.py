"""What is refused when a plan is to be committed: order, streams, verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.commit import verified, verify
from mla_fusion.emit import targets
from mla_fusion.report.report import Shown
from tests.catalogue import (
    base,
    prologues,
)
from tests.harness import refused, traced_graph


def test_graph_that_is_not_functional() -> None:
    class InPlace(base.Base):
        def rotate_q(self, q_pe: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            rotated = self.rotate(q_pe, c, s)
            seen = rotated.sum()  # before the change, and it must stay so
            return rotated.mul_(seen / seen)

    gm = torch.export.export(InPlace(), base.paged_args()).module()
    assert isinstance(gm, GraphModule)
    left = refused(gm)
    assert (left.code, left.layer) == (
        "graph.not_functional",
        "Base",
    ) and "(Base's mul" in left.message


def test_exported_programs() -> None:
    """torch.export's graph keeps its cache writes in place (staged); decomposed, it is
    functional.
    """
    program = torch.export.export(prologues.PagedRotateHalf(), base.paged_args())
    gm = program.module()
    assert isinstance(gm, GraphModule)
    assert [f.placement.partition(":")[0] for f in mf.fuse(gm).fused] == ["staged"]
    (fusion,) = mf.fuse(program.run_decompositions().graph_module).fused
    # which the graph returns
    assert fusion.placement.startswith("written by the kernel into new caches")


def test_a_prologue_that_nobody_reads() -> None:
    """Dead ends that no clean-up has taken away: the last values are there, and nothing after
    them.
    """
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


def test_what_differs_by_a_trillionth() -> None:
    class Nearly(base.Base):
        def rotate_k(self, k_pe: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return self.rotate((k_pe.float() * (1 + 1e-12)).bfloat16(), c, s)

    assert refused(traced_graph(Nearly(), *base.paged_args())).code == "proof.differs"


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second witness alone."""
    monkeypatch.setattr(verified, "prove", lambda *_: Shown())


def test_call_that_does_not_run(monkeypatch: pytest.MonkeyPatch, unproved: None) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(targets, "call_kernel", fail)
    rejection = refused(traced_graph(prologues.PagedRotateHalf(), *base.paged_args()))
    assert rejection.code == "verify.mismatch" and "no such kernel" in rejection.message


def test_verification_catches_a_wrong_replacement(
    monkeypatch: pytest.MonkeyPatch, unproved: None
) -> None:
    from mla_fusion.emit import rows

    right = rows.table
    monkeypatch.setattr(
        rows, "table", lambda b, *given: b.call(torch.ops.aten.neg.default, right(b, *given))
    )
    rejection = refused(traced_graph(prologues.PagedRotateHalf(), *base.paged_args()))
    assert rejection.code == "verify.mismatch"
    assert str(verify.TOLERANCE) in rejection.message
