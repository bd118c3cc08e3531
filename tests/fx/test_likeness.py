"""Layers that are equal node by node are read once; with one thing different each is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.facts import projection
from mla_fusion.facts.reading import FactReader
from mla_fusion.fx.likeness import likeness, outline
from tests.fx.tracing import floats, view

T, HE, W = 5, 16, 8
Step = Callable[[Tensor, Tensor], Tensor]  # of a product and a table


def step(y: Tensor, table: Tensor) -> Tensor:
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)) * table


def pair(one: Step, other: Step, width: int = W) -> Any:
    """What stands in the second cone for the nodes of the first; only cones of equal outline are
    walked.
    """
    fn = lambda x, v, w, a, b: (one(x @ v, a), other(x @ w, b))  # noqa: E731
    graph = view(
        fn, floats(T, HE), floats(HE, W), floats(HE, width), floats(T, W), floats(T, width)
    )
    first, second = projection.find(graph)
    reader = FactReader(graph, [first, second])
    cone = reader.read(first).cone
    outlines = [outline(graph, item.product, item.weight_is_left) for item in (first, second)]
    return likeness(cone, second.product) if outlines[0] == outlines[1] else None


def test_equal_layers_are_alike() -> None:
    move = pair(step, step)
    assert move is not None
    assert all(
        node.target == other.target for node, other in move.items() if node.op == "call_function"
    )
    assert len(set(move.values())) == len(move)


OTHER: dict[str, Step] = {
    "another epsilon": lambda y, t: (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)) * t,
    "another axis": lambda y, t: (y * torch.rsqrt(y.pow(2).mean(0, keepdim=True) + 1e-6)) * t,
    "another operator": lambda y, t: (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)) - t,
    "sides exchanged": lambda y, t: t * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "one step more": lambda y, t: step(y, t) * 2,
    "another reader of the product": lambda y, t: step(y, t) + y,
}


@pytest.mark.parametrize("name", OTHER)
def test_layers_that_differ_are_not(name: str) -> None:
    assert pair(step, OTHER[name]) is None


def test_products_of_another_width_are_not() -> None:
    assert pair(step, step, W // 2) is None


def test_layers_that_mix_tokens_are_read_once() -> None:
    """Each meets a table of its own where tokens were mixed: nothing there is followed, and no
    table is missed.
    """
    tokens = 64  # as many are probed as few

    def mixing(y: Tensor, table: Tensor) -> Tensor:
        return step(y, table[:1]) + y.cumsum(0) * table

    fn = lambda x, v, w, a, b: (mixing(x @ v, a), mixing(x @ w, b))  # noqa: E731
    weights, tables = floats(HE, W), floats(tokens, W)
    graph = view(fn, floats(tokens, HE), weights, weights, tables, tables)
    found = projection.find(graph)
    reader = FactReader(graph, found)
    first, second = (reader.read(item) for item in found)
    assert first.cone.mixed is not None and reader.probes == 1
    assert len(first.norms) == len(second.norms) == 1
    assert not {*first.cone.bases}.intersection(second.cone.bases)
