"""What ``harness.traced_graph`` gives is the graph that Dynamo and AOT autograd give, to whoever
reads what it computes.
"""

from __future__ import annotations

from collections import Counter

import pytest
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.fx.kinds import op_name, operator_of
from tests.catalogue import Entry, select
from tests.harness import graph_of, traced_graph


def operators(gm: GraphModule) -> Counter[str]:
    """How often each is called, but for sizes and views: as many of these as it takes."""
    names = [op_name(node) for node in gm.graph.nodes if not operator_of(node).aliases]
    found = Counter(name for name in names if name.startswith(("aten::", "npu::")))
    return found - Counter({"aten::_unsafe_view": len(names), "aten::sym_size": len(names)})


PLAIN = "operators, floats, static, key, unabsorbed"
SOME = [*select("symbolic", without=PLAIN)[::32], *select("near miss", "run", without=PLAIN)[::32]]


CASES = [*((entry, False) for entry in SOME), *((entry, True) for entry in SOME[::3])]


@pytest.mark.parametrize(("entry", "dynamic"), CASES, ids=str)
def test_it_is_the_graph_that_a_backend_is_given(entry: Entry, dynamic: bool) -> None:
    model, args = entry.model(), entry.args()
    given = graph_of(model, *args, dynamic=dynamic)
    traced = traced_graph(model, *args, dynamic=dynamic)
    assert operators(traced) == operators(given)
    reports = [mf.explain(gm, entry.config(verify="off"), boundary=True) for gm in (given, traced)]
    first, second = (
        [(fusion.placement.partition(":")[0], fusion.attributes) for fusion in report.fused]
        for report in reports
    )
    assert first == second, str(reports[1])
    first, second = ([rejection.code for rejection in report.rejected] for report in reports)
    assert first == second, str(reports[1])
