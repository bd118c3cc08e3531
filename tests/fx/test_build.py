"""One recipe, written into a graph and run on tensors: the same values, with meta values that are
right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.fx.build import Builder, GraphBuilder, TensorBuilder
from tests.fx.tracing import inputs, trace, view

aten = torch.ops.aten
Recipe = Callable[[Builder, Any], Any]

RECIPES: dict[str, Recipe] = {
    "call": lambda b, x: b.call(aten.mul.Tensor, x, 2.0),
    "reshape": lambda b, x: b.reshape(x, (2, 12)),
    "reshape to its own shape": lambda b, x: b.reshape(x, (4, 6)),
    "cast": lambda b, x: b.cast(x, torch.bfloat16),
    "constant": lambda b, x: b.call(aten.index_select.default, x, 1, b.constant([5, 0, 3], x)),
    "several": lambda b, x: b.cast(
        b.reshape(b.call(aten.permute.default, x, [1, 0]), (3, 8)), torch.float64
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_graph_computes_what_tensors_do(name: str) -> None:
    given = torch.randn(4, 6)
    graph = view(lambda x: x + 1, given)
    gm, (x,) = graph.gm, inputs(graph)
    wanted = RECIPES[name](TensorBuilder({x: given}, graph.binding), given)
    builder = GraphBuilder(gm)
    (output,) = gm.graph.find_nodes(op="output")
    builder.at(output, {})
    made = RECIPES[name](builder, x)
    output.args = (made,)
    for constant, value in builder.constants.items():
        gm.register_buffer(constant, value)
    gm.graph.lint()
    gm.recompile()
    got = gm(given)
    assert torch.equal(got, wanted)
    assert (made.meta["val"].shape, made.meta["val"].dtype) == (got.shape, got.dtype)


def test_new_nodes_stand_where_they_are_asked_for_and_come_from_there() -> None:
    gm = trace(lambda x: (x + 1) * 2, torch.zeros(3))
    x, _, mul, _ = gm.graph.nodes
    builder = GraphBuilder(gm)
    builder.at(mul, {"stack_trace": "here"})
    made = builder.call(aten.neg.default, x)
    assert list(gm.graph.nodes).index(made) == list(gm.graph.nodes).index(mul) - 1
    assert made.meta["stack_trace"] == "here" and builder.made == [made]


def test_what_is_made_once_is_shared() -> None:
    gm = trace(lambda x: x + 1, torch.zeros(3))
    x, add, _ = gm.graph.nodes
    builder = GraphBuilder(gm)
    builder.at(add, {})

    def recipe(b: Any) -> Any:
        return b.call(aten.neg.default, x)

    assert builder.once("key", recipe) is builder.once("key", recipe)
    assert builder.once("other", recipe) is not builder.once("key", recipe)


def test_equal_calls_have_meta_values_of_their_own_memory() -> None:
    gm = trace(lambda x: x + 1, torch.zeros(3))
    x, add, _ = gm.graph.nodes
    builder = GraphBuilder(gm)
    builder.at(add, {})
    one, other = (builder.call(aten.neg.default, x).meta["val"] for _ in range(2))
    assert one is not other and one.shape == other.shape == (3,)
    assert isinstance(one, Tensor) and one.dtype == other.dtype
