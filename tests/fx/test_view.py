"""One pass over a graph: equal values, what is made of which product, what a choice cuts off,
squares, literals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.facts.reading import HE, T
from tests.fx.tracing import calls, floats, inputs, outputs, view

W = 6
Fn = Callable[..., Any]


def test_equal_operators_on_equal_inputs_are_one_value() -> None:
    graph = view(lambda x: (x.exp() + 1, x.exp() + 1, x.exp() + 2, x.sin() + 1), floats(T, W))
    one, same, literal, operator = outputs(graph)
    assert graph.same(one, same) and graph.number(one) == graph.number(same)
    assert not graph.same(one, literal) and not graph.same(one, operator)


@pytest.mark.parametrize(
    "fn", [lambda x: (x + 1, x + 1.0), lambda x: (x.float(), x.double()), lambda x: (x, x.clone())]
)
def test_values_that_differ_in_dtype_or_step_are_told_apart(fn: Fn) -> None:
    graph = view(fn, floats(T, W).bfloat16())
    one, other = outputs(graph)
    assert not graph.same(one, other)


def test_random_values_are_never_equal() -> None:
    graph = view(lambda x: (torch.rand_like(x), torch.rand_like(x)), floats(T, W))
    assert not graph.same(*outputs(graph))


def test_members_are_what_analytic_steps_make_of_a_product() -> None:
    graph = view(
        lambda x, w: ((x @ w) * 2, (x @ w).relu() * 2, x * 2), floats(T, HE), floats(HE, W)
    )
    made, behind_a_choice, beside = outputs(graph)
    product = calls(graph, "mm")[0]
    assert made in graph.members(product) and graph.depends_on_products(made)
    assert beside not in graph.members(product) and not graph.depends_on_products(beside)
    second = calls(graph, "mm")[-1]
    assert behind_a_choice not in graph.members(second)
    (relu,) = calls(graph, "relu")
    assert relu in graph.barriers and not graph.ends_walk(relu)
    assert graph.reaches(second, behind_a_choice)


def test_a_sum_of_two_products_is_made_of_both() -> None:
    graph = view(lambda x, v, w: x @ v + x @ w, floats(T, HE), floats(HE, W), floats(HE, W))
    assert graph.sources(outputs(graph)[0]) == set(calls(graph, "mm"))


SQUARES: dict[str, Fn] = {
    "einsum": lambda u: torch.einsum("tc,tc->t", u, u),
    "rows by columns": lambda u: u.unsqueeze(1) @ u.unsqueeze(2),
    "diagonal": lambda u: (u @ u.t()).diagonal(),
}


@pytest.mark.parametrize("name", SQUARES)
def test_sums_of_squares_by_products(name: str) -> None:
    graph = view(SQUARES[name], floats(T, W))
    found = {graph.squares_of(node) for node in graph.nodes} - {None}
    assert len(found) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda u: torch.einsum("tc,tc->t", u, u * 2),
        lambda u: torch.einsum("tc,tc->t", u, u.flip(0)),
        lambda u: torch.einsum("tc,tc->t", u, u.roll(1, -1)),
        lambda u: (u @ u.t()).diagonal(1),
        lambda u: u @ u.t(),
    ],
)
def test_products_that_are_no_squares(fn: Fn) -> None:
    graph = view(fn, floats(T, W))
    assert {graph.squares_of(node) for node in graph.nodes} == {None}


@pytest.mark.parametrize(
    ("step", "in_order"),
    [
        (lambda x: x.view(-1), True),
        (lambda x: x.unsqueeze(1).float(), True),
        (lambda x: x.t().t(), True),
        (lambda x: x.t(), False),
        (lambda x: x[1:], False),
        (lambda x: x.view(T, 2, W // 2).transpose(0, 1), False),
    ],
)
def test_views_that_hold_all_elements_in_order(step: Fn, in_order: bool) -> None:
    graph = view(step, floats(T, W).bfloat16())
    assert graph.in_order(inputs(graph)[0], outputs(graph)[0]) == in_order


@pytest.mark.parametrize(
    ("made", "constant", "plain"),
    [
        (lambda x: torch.ones(W), True, True),
        (lambda x: torch.cat([-torch.ones(W // 2), torch.ones(W // 2)]), True, True),
        (lambda x: torch.full((W,), 0.5), True, True),
        (lambda x: torch.arange(W) * 0.1, True, False),
        (lambda x: x[0] * 1, False, False),
    ],
)
def test_literals(made: Callable[[Tensor], Tensor], constant: bool, plain: bool) -> None:
    graph = view(made, floats(T, W))
    (node,) = outputs(graph)
    assert graph.is_constant(node) == constant
    assert not constant or graph.is_plain_constant(node) == plain


def test_readers_by_strides_are_noticed() -> None:
    assert view(lambda x: x.as_strided((2,), (3,)) + 1, floats(T, W)).reads_by_strides
    assert not view(lambda x: x.t() + 1, floats(T, W)).reads_by_strides
