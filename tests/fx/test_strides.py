"""A value replaced by one of other strides: views become reshapes, what leaves the graph lies as it
lay.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.fx import strides
from mla_fusion.fx.build import GraphBuilder
from tests.fx.tracing import trace

aten = torch.ops.aten
GIVEN = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def turned(
    reader: Callable[[Tensor], Tensor], exact: bool = True
) -> tuple[Tensor, Tensor, list[str]]:
    """What a graph gives before and after ``neg`` is replaced by one that is dense the other way
    round.
    """
    gm = trace(lambda x: reader(x.neg()), GIVEN)
    wanted = gm(GIVEN)
    old = next(node for node in gm.graph.nodes if node.target is aten.neg.default)
    builder = GraphBuilder(gm)
    builder.at(old, {})
    across = builder.call(
        aten.clone.default,
        builder.call(aten.t.default, old.args[0]),
        memory_format=torch.contiguous_format,
    )
    new = builder.call(aten.t.default, builder.call(aten.neg.default, across))
    old.replace_all_uses_with(new)
    strides.follow(builder, [(new, old)], exact)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return wanted, gm(GIVEN), [str(node.target) for node in gm.graph.nodes]


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "a view": lambda y: y.view(2, 12) + 1,
    "a view that is given out": lambda y: y.view(2, 12),
    "any strides": lambda y: y.sum(0),
    "element by element": lambda y: y * 2,
    "as_strided": lambda y: y.as_strided((3, 2), (2, 1)) + 1,
    "a chain": lambda y: (y * 2).view(24)[3:].exp(),
}


@pytest.mark.parametrize("name", READERS)
def test_the_same_values_with_the_same_strides(name: str) -> None:
    wanted, got, _ = turned(READERS[name])
    assert torch.equal(wanted, got) and wanted.stride() == got.stride()


def test_what_leaves_may_lie_as_it_is_made() -> None:
    wanted, got, operators = turned(READERS["itself"], exact=False)
    assert torch.equal(wanted, got) and got.stride() != wanted.stride()
    assert operators.count("aten.clone.default") == 1


def test_a_view_becomes_a_reshape_and_no_copy_is_made_for_the_others() -> None:
    assert "aten.reshape.default" in turned(READERS["a view"])[2]
    assert turned(READERS["any strides"])[2].count("aten.clone.default") == 1


def test_the_reader_by_strides_is_found_behind_other_steps() -> None:
    gm = trace(lambda x: (x.neg() * 2).as_strided((2,), (1,)), GIVEN)
    start = next(node for node in gm.graph.nodes if node.target is aten.neg.default)
    found = strides.reader([start])
    assert found is not None and found.target is aten.as_strided.default
    plain = trace(lambda x: (x.neg() * 2).view(24), GIVEN)
    assert strides.reader(plain.graph.find_nodes(op="placeholder")) is None
