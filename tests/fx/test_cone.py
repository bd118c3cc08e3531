"""What is made of one product, as a program: its elements by number, what meets it, and what is
left out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.facts import projection
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.view import View
from tests.facts.reading import HE, T
from tests.fx.tracing import floats, inputs, outputs, view

W = 6
Step = Callable[..., Tensor]


def cone(step: Step, *others: Tensor, weight_first: bool = False) -> tuple[View, Cone]:
    x, w = floats(T, HE), floats(HE, W)
    multiply = (lambda x, w: w.t() @ x.t()) if weight_first else (lambda x, w: x @ w)
    graph = view(lambda x, w, *rest: step(multiply(x, w), *rest), x, w, *others)
    (item,) = projection.find(graph)
    return graph, Cone(graph, item.product, weight_is_left=weight_first)


@pytest.mark.parametrize("weight_first", [False, True])
def test_elements_are_numbered_by_token_and_column(weight_first: bool) -> None:
    _, found = cone(lambda y: y * 2, weight_first=weight_first)
    codes = torch.arange(T * W).reshape(T, W)
    assert (found.tokens, found.width) == (T, W)
    assert torch.equal(found.codes, codes.t() if weight_first else codes)
    assert torch.equal(found.rows(found.codes), codes)


def test_a_run_gives_what_the_graph_computes() -> None:
    step = lambda y, table: (y * table).view(T, 2, 3).transpose(1, 2) - 1  # noqa: E731
    graph, found = cone(step, floats(T, W))
    product, table = torch.randn(T, W, dtype=torch.float64), torch.randn(T, W, dtype=torch.float64)
    values = found.run(product, [table])
    assert found.bases == [inputs(graph)[2]]
    assert torch.equal(values[found.slot(outputs(graph)[0])], step(product, table))


@pytest.mark.parametrize(
    "cut",
    [lambda t: t[:, :W], lambda t: t.float()[:, :W], lambda t: t[:, :W].unsqueeze(1).squeeze(1)],
)
def test_views_of_a_table_lead_to_the_table(cut: Step) -> None:
    graph, found = cone(lambda y, table: y * cut(table), floats(T, 2 * W).bfloat16())
    assert found.bases == [inputs(graph)[2]]


def test_rows_of_a_longer_table_are_the_base() -> None:
    """Above the slice stand the rows of every position."""
    graph, found = cone(lambda y, table: y * table[3 : 3 + T], floats(20, W))
    (base,) = found.bases
    assert base.meta["val"].shape == (T, W) and base is not inputs(graph)[2]


def test_equal_values_are_one_base() -> None:
    _, found = cone(lambda y, table: y * table.exp() + table.exp(), floats(T, W))
    assert len(found.bases) == 1


def test_literals_are_no_bases() -> None:
    _, found = cone(lambda y: y * torch.cat([-torch.ones(W // 2), torch.ones(W // 2)]))
    assert found.bases == []


def test_attention_is_too_large_to_be_probed() -> None:
    graph, found = cone(lambda y, keys: y[:, :, None] * keys, floats(1, 1, 1 << 20))
    assert outputs(graph)[0] not in found.nodes


def test_values_are_drawn_by_dtype() -> None:
    step = lambda y, table, mask: y * table * mask  # noqa: E731
    _, found = cone(step, floats(T, W).bfloat16(), torch.zeros(T, W, dtype=torch.bool))
    drawn = found.draw(torch.Generator().manual_seed(0))
    assert {value.dtype for value in drawn} == {torch.float64, torch.bool}
    assert [tuple(value.shape) for value in drawn] == [found.shape(base) for base in found.bases]


def test_signatures_are_equal_for_equal_steps() -> None:
    one, same, other = (
        cone(step)[1].signature for step in (lambda y: y * 2, lambda z: z * 2, lambda y: y * 3)
    )
    assert one == same != other
