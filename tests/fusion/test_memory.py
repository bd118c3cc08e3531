"""Which results share memory, with each other and with inputs, is as in the unfused graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests import harness
from tests.catalogue import base
from tests.exhaustive import one_in
from tests.fusion.test_strides import Gives

Results = Callable[[Tensor, Tensor, Tensor], Any]  # of the query, query_rope and x


class Returns(Gives):
    def __init__(self, results: Results) -> None:
        super().__init__(lambda query: query)
        self.results = results

    def forward(self, x: Tensor, *args: Tensor) -> Any:  # type: ignore[override]
        query, query_rope = super().forward(x, *args)
        return query, query_rope, *self.results(query, query_rope, x)


RESULTS: dict[str, Results] = {
    "other numbers": lambda q, r, x: (q * 2,),
    "a copy": lambda q, r, x: (q.clone(), r.clone()),
    "casts there and back": lambda q, r, x: (q.float().to(q.dtype), r.double().to(r.dtype)),
    "contiguous": lambda q, r, x: (q.contiguous(), q.reshape(-1)),
    "repeated once": lambda q, r, x: (q.repeat(1, 1, 1), q.to(q.dtype, copy=True)),
    "joined and cut": lambda q, r, x: (torch.cat([q, r], -1)[..., 512:],),
    "a view": lambda q, r, x: (q.transpose(0, 1), r.view(-1)),
    "a part": lambda q, r, x: (q[:, 0], q[2:]),
    "twice": lambda q, r, x: (q, q.view(q.shape)),
    "an input": lambda q, r, x: (x.view(-1),),
    "a copy of an input": lambda q, r, x: (torch.cat([x, x[:0]]),),
}


def shared(results: list[Tensor]) -> set[tuple[int, int]]:
    """Which change when which is written."""
    found = set()
    for place, result in enumerate(results):
        before = [other.clone() for other in results]
        result.zero_()
        changed = (not torch.equal(*pair) for pair in zip(before, results, strict=True))
        found |= {(place, other) for other, is_other in enumerate(changed) if is_other}
        for was, now in zip(before, results, strict=True):
            now.copy_(was)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", one_in(2, RESULTS))
def test_results_share_memory_as_before(name: str, dynamic: bool) -> None:
    model, args = Returns(RESULTS[name]), base.paged_args()
    wanted = harness.compiled(model, harness.clones(args), "aot_eager", dynamic)
    found = harness.compiled(model, harness.clones(args), mf.backend(), dynamic)
    assert harness.outcome(mf.reports()[-1]) == ("in place",)
    assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))
    assert shared(found) == shared(wanted)


def test_what_became_another_view_is_gone() -> None:
    gm = harness.traced_graph(Returns(RESULTS["a part"]), *base.paged_args())
    assert mf.fuse(gm).fused
    assert all(
        node.users
        for node in gm.graph.nodes
        if node.op == "call_function" and "copy_" not in node.name
    )
