"""Projections: which operand is the weight, what the activation comes from, and which rows of it
are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_fusion.facts import projection
from mla_fusion.facts.projection import reads_whole, same_rows, token_sizes
from tests.fx.tracing import POSITIONS, SEQUENCES, TOKENS, floats, view

B, S, HE, WIDTH = SEQUENCES, POSITIONS, 16, 8
Product = Callable[[Tensor, Tensor], Tensor]  # of x [B, S, HE] and w [WIDTH, HE]

PRODUCTS: dict[str, Product] = {
    "linear": F.linear,
    "matmul": lambda x, w: x @ w.t(),
    "mm of rows": lambda x, w: torch.mm(x.view(-1, HE), w.t()),
    "einsum": lambda x, w: torch.einsum("bsh,oh->bso", x, w),
    "weight first": lambda x, w: (w @ x.reshape(-1, HE).t()).t(),
    "in float64": lambda x, w: F.linear(x.double(), w.double()),
    "of a cast": lambda x, w: F.linear(x.float(), w.float()),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_spelling(name: str, symbolic: bool) -> None:
    graph = view(PRODUCTS[name], floats(B, S, HE), floats(WIDTH, HE), symbolic=symbolic)
    (item,) = projection.find(graph)
    x, _ = graph.gm.graph.find_nodes(op="placeholder")
    # of two plain inputs the right one is the weight
    if not (name == "weight first" and not symbolic):
        assert item.origin is x
        assert item.is_flat and len(item.summed) == len(item.column_labels) == 1
        assert reads_whole(graph, item)
    assert graph.contractions[item.node] is item.product


def test_merged_tokens_keep_their_sizes() -> None:
    graph = view(
        lambda x, w: x.view(-1, HE) @ w, floats(B, S, HE), floats(HE, WIDTH), symbolic=True
    )
    (item,) = projection.find(graph)
    x, _ = graph.gm.graph.find_nodes(op="placeholder")
    assert list(map(str, token_sizes(item) or [])) == [
        str(size) for size in x.meta["val"].shape[:2]
    ]


def two(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], symbolic: bool = False
) -> tuple[Any, ...]:
    """Two projections of one x [TOKENS, HE], each reading it in its own way."""
    fn = lambda x, v, w: (first(x) @ v, second(x) @ w)  # noqa: E731
    graph = view(fn, floats(TOKENS, HE), floats(HE, WIDTH), floats(HE, WIDTH), symbolic=symbolic)
    return graph, *projection.find(graph)


@pytest.mark.parametrize("symbolic", [False, True])
def test_two_projections_of_the_same_rows(symbolic: bool) -> None:
    graph, a, b = two(lambda x: x, lambda x: x.view(-1, HE).float(), symbolic)
    assert a.origin is b.origin and same_rows(graph, a, b) and reads_whole(graph, b)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x[1:],
        lambda x: x[: x.shape[0] // 2],
        lambda x: x.t().reshape(x.shape),
        lambda x: x[0:1].expand(x.shape),
    ],
)
def test_two_projections_of_other_rows(rows: Callable[[Tensor], Tensor], symbolic: bool) -> None:
    graph, *found = two(lambda x: x, rows, symbolic)
    if len(found) == 2 and found[0].origin is found[1].origin:
        assert not same_rows(graph, *found) and not reads_whole(graph, found[1])


@pytest.mark.parametrize(
    "step", [lambda x: x.flip(0), lambda x: x.roll(1, 0), lambda x: x.clamp(-8, 8), lambda x: x * 2]
)
def test_what_computes_is_an_origin_of_its_own(step: Callable[[Tensor], Tensor]) -> None:
    _, a, b = two(lambda x: x, step)
    assert a.origin is not b.origin


def test_a_product_of_two_activations_is_none() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        rows = x @ w
        return rows @ rows.t()

    graph = view(fn, floats(TOKENS, HE), floats(HE, WIDTH))
    assert len(projection.find(graph)) == 1


def test_heads_are_a_batch() -> None:
    fn = lambda q, w: torch.einsum("tnd,ndc->tnc", q, w)  # noqa: E731
    (item,) = projection.find(view(fn, floats(TOKENS, 2, 4), floats(2, 4, 8)))
    assert len(item.batch) == 1 and not item.is_flat
