"""Questions about one node, answered from the operator table and the node's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from mla_fusion.fx import kinds
from tests.fx.tracing import TOKENS, floats, outputs, view

Fn = Callable[..., Any]


def last(fn: Fn, symbolic: bool = False) -> Node:
    return outputs(view(fn, floats(TOKENS, 6), symbolic=symbolic))[0]


@pytest.mark.parametrize(
    ("fn", "is_view", "is_reshape", "is_cast"),
    [
        (lambda x: x.view(6, TOKENS), True, True, False),
        (lambda x: x.t(), True, False, False),
        (lambda x: x[:, 1:], True, False, False),
        (lambda x: x.split(3, -1)[1], True, False, False),
        (lambda x: x.double(), False, False, True),
        (lambda x: x * 2, False, False, False),
        (lambda x: x.topk(2).values, False, False, False),
    ],
)
def test_views_reshapes_and_casts(fn: Fn, is_view: bool, is_reshape: bool, is_cast: bool) -> None:
    node = last(fn)
    assert (kinds.is_view(node), kinds.is_reshape(node), kinds.is_cast(node)) == (
        is_view,
        is_reshape,
        is_cast,
    )


@pytest.mark.parametrize(
    ("fn", "faithful"),
    [
        (lambda x: x.double(), True),
        (lambda x: x.bfloat16(), True),
        (lambda x: x.half(), False),
        (lambda x: x.to(torch.float8_e4m3fn), False),
        (lambda x: x.long(), False),
        (lambda x: x * 1, False),
    ],
)
def test_casts_that_keep_every_bfloat16_number(fn: Fn, faithful: bool) -> None:
    assert kinds.is_faithful_cast(last(fn)) == faithful


@pytest.mark.parametrize(
    ("fn", "number"),
    [
        (lambda x: torch.zeros_like(x), 0.0),
        (lambda x: torch.ones_like(x), 1.0),
        (lambda x: torch.full_like(x, 0.5), 0.5),
        (lambda x: torch.full_like(x, 1.5, dtype=torch.int64), 1.0),
        (lambda x: x * 0, None),
        (lambda x: torch.arange(3), None),
    ],
)
def test_fills(fn: Fn, number: float | None) -> None:
    assert kinds.filled_with(last(fn)) == number


def test_memory_that_nobody_has_written_holds_no_number() -> None:
    found = kinds.filled_with(last(lambda x: torch.empty_like(x)))
    assert found is not None and math.isnan(found)


@pytest.mark.parametrize(
    ("fn", "axes"),
    [(lambda x: x.sum(-1), [1]), (lambda x: x.sum((0, 1)), [0, 1]), (lambda x: x.sum(), [0, 1])],
)
def test_axes_that_an_operator_names(fn: Fn, axes: list[int]) -> None:
    assert kinds.named_axes(last(fn), 2) == axes


@pytest.mark.parametrize(
    ("fn", "among"),
    [
        (lambda x: x * x.shape[0], True),
        (lambda x: torch.full((3,), x.shape[0]), True),
        (lambda x: x.new_zeros(x.shape[0]), False),
        (lambda x: x * 2, False),
    ],
)
def test_sizes_that_are_computed_with(fn: Fn, among: bool) -> None:
    assert (kinds.size_among_numbers(last(fn, symbolic=True)) is not None) == among


@pytest.mark.parametrize(
    ("fn", "symbolic"),
    [(lambda x: x.sum(0), True), (lambda x: x.sum(1), False), (lambda x: x.sum(), True)],
)
def test_sums_over_an_axis_of_symbolic_length(fn: Fn, symbolic: bool) -> None:
    assert kinds.reduces_a_symbolic_axis(last(fn, symbolic=True)) == symbolic


def test_an_argument_by_its_name_or_the_schemas_default() -> None:
    node = last(lambda x: x.softmax(-1))
    assert kinds.argument(node, "dim") == -1
    assert kinds.argument(last(lambda x: x.sum(1)), "keepdim") is False
    assert kinds.argument(node, "no_such_argument", 7) == 7
