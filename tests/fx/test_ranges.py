"""Ranges: what is claimed, and that no value leaves what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from mla_fusion.fx.ranges import UNBOUNDED, Range, Ranges
from mla_fusion.fx.view import View

from .tracing import TOKENS, floats, inputs, integers, outputs, trace, view

INF = math.inf

# name: function of v (floats) and the range of its result
OF_FLOATS: dict[str, tuple[Callable[[Tensor], Any], Range]] = {
    "input": (lambda v: v + 0, UNBOUNDED),
    "square": (lambda v: v * v, (0, INF)),
    "pow 2": (lambda v: v.pow(2), (0, INF)),
    "pow 3": (lambda v: v.pow(3), UNBOUNDED),
    "pow 4": (lambda v: v.pow(4), (0, INF)),
    "product of two": (lambda v: v * (v + 1), UNBOUNDED),
    "mean of squares": (lambda v: v.square().mean(-1), (0, INF)),
    "with an epsilon": (lambda v: v.square().mean(-1) + 1e-6, (1e-6, INF)),
    "with less than nothing": (lambda v: v.square().mean(-1) - 1e-6, (-1e-6, INF)),
    "root": (lambda v: (v.square() + 4).sqrt(), (2, INF)),
    "sigmoid times 3 less 1": (lambda v: v.sigmoid() * 3 - 1, (-1, 2)),
    "cosine less one": (lambda v: v.cos() - 1, (-2, 0)),
    "softmax": (lambda v: v.softmax(-1), (0, 1)),
    "negated square": (lambda v: -v.square(), (-INF, 0)),
    "abs": (lambda v: v.abs(), (0, INF)),
    "abs of 2 to 3": (lambda v: -(v.sigmoid() + 2).abs(), (-3, -2)),
    "clamp": (lambda v: v.clamp(-2, 3), (-2, 3)),
    "clamp of a square": (lambda v: v.square().clamp(max=9), (0, 9)),
    "relu of a cosine": (lambda v: v.cos().relu(), (0, 1)),
    "maximum": (lambda v: torch.maximum(v, v.square()), (0, INF)),
    "minimum": (lambda v: torch.minimum(v.cos(), v), (-INF, 1)),
    "where": (lambda v: torch.where(v > 0, v.cos(), v.sigmoid() * 5), (-1, 5)),
    "joined": (lambda v: torch.cat([v.cos(), v.square()]), (-1, INF)),
    "1 / 2 to 4": (lambda v: 1 / (2 + 2 * v.sigmoid()), (0.25, 0.5)),
    "1 / anything": (lambda v: 1 / v, UNBOUNDED),
    "reciprocal root of 2 to 4": (lambda v: (2 + 2 * v.sigmoid()).rsqrt(), (0.5, 2**-0.5)),
    "product with its own transpose": (lambda v: (v @ v.T).diagonal(), (0, INF)),
    "product of two matrices": (lambda v: v @ v.flip(0).T, UNBOUNDED),
    "huge power": (lambda v: (v.square() + 1e200).pow(3), (INF, INF)),
}

# of p (integers)
OF_INTEGERS: dict[str, tuple[Callable[[Tensor], Any], Range]] = {
    "input": (lambda p: p + 0, UNBOUNDED),
    "remainder": (lambda p: p % 16, (0, 15)),
    "remainder by less than nothing": (lambda p: p % -16, UNBOUNDED),
    "remainder of a truncation": (lambda p: p.fmod(16), UNBOUNDED),
    "mask": (lambda p: p & 15, (0, 15)),
    "sum of two remainders": (lambda p: (p % 4) * 4 + p % 3, (0, 14)),
    "quotient of a remainder": (lambda p: (p % 64) // 16, (0, 4)),
    "shift of a remainder": (lambda p: (p % 64) >> 4, (0, 3.9375)),
    "remainder, shifted up": (lambda p: (p % 4) << 4, (0, 48)),
    # (0, inf) is more than an int64 holds
    "clamped from below alone": (lambda p: p.clamp(min=0), UNBOUNDED),
    "clamped": (lambda p: p.clamp(0, 7), (0, 7)),
    "in int8": (lambda p: (p % 16).to(torch.int8), (0, 15)),
    "wrapped in int8": (lambda p: (p % 200).to(torch.int8), UNBOUNDED),
    "multiplied in int8": (lambda p: (p % 16).to(torch.int8) * 16, UNBOUNDED),
    "compared": (lambda p: (p > 3).long(), (0, 1)),
    "nothing of it": (lambda p: p * 0 + torch.arange(5), (0, 4)),
    "arange": (lambda p: torch.arange(5) * 3 - 1, (-1, 11)),
    "filled": (lambda p: torch.full_like(p, 7), (7, 7)),
    "not written": (lambda p: torch.empty_like(p), UNBOUNDED),
    "made of what is not written": (lambda p: p.new_empty(5) + 1, UNBOUNDED),
    "flipped and repeated": (lambda p: (p % 8).flip(0).repeat(2), (0, 7)),
    "taken from": (lambda p: (p % 8)[torch.tensor([0, 0, 1])], (0, 7)),
    "count": (lambda p: p.argmax(), UNBOUNDED),
}
CASES = {
    **{f"floats: {name}": (fn, wanted, floats(5, 5)) for name, (fn, wanted) in OF_FLOATS.items()},
    **{
        f"integers: {name}": (fn, wanted, integers(5)) for name, (fn, wanted) in OF_INTEGERS.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_range(name: str) -> None:
    fn, wanted, example = CASES[name]
    graph = view(fn, example)
    (node,) = outputs(graph)
    assert graph.ranges.of(node) == pytest.approx(wanted)


class _Checking(Interpreter):
    """Runs a graph and compares what each node holds with its range."""

    def __init__(self, graph: View, ranges: Ranges) -> None:
        super().__init__(graph.gm)
        self.ranges = ranges

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if (
            isinstance(value, Tensor)
            and value.numel()
            and not value.isnan().any()
            and "empty" not in n.name
        ):
            low, high = self.ranges.of(n)
            largest = max(1.0, float(value.double().nan_to_num().abs().max()))
            slack = 1e-6 * largest if value.is_floating_point() and largest < 1e30 else 0
            assert low - slack <= float(value.min()), f"{n.name} is below {low}"
            assert float(value.max()) <= high + slack, f"{n.name} is above {high}"
        return value


@pytest.mark.parametrize("name", CASES)
def test_no_value_is_out_of_its_range(name: str) -> None:
    fn, _, example = CASES[name]
    graph = view(fn, example)
    torch.manual_seed(0)
    for size in (0, 1, 50, 1e5, 1e18):
        value = size * torch.randn(example.shape, dtype=torch.float64)
        _Checking(graph, graph.ranges).run(value.to(example.dtype))


def test_inputs_are_trusted_where_somebody_says_so() -> None:
    graph = view(lambda p: (p + 0, p - 1, p.clamp(max=3), p.to(torch.int8)), integers(5))
    trusting = Ranges(graph, (0.0, 100.0))
    assert [trusting.of(node) for node in outputs(graph)] == [(0, 100), (-1, 99), (0, 3), (0, 100)]
    assert [graph.ranges.of(node) for node in outputs(graph)] == [UNBOUNDED] * 4


def test_floats_are_trusted_with_nothing() -> None:
    graph = view(lambda v: v + 0, floats(5))
    assert Ranges(graph, (0.0, 100.0)).of(inputs(graph)[0]) == UNBOUNDED


def test_positions_of_a_symbolic_number_of_tokens_have_no_end() -> None:
    graph = view(
        lambda v: torch.arange(v.shape[0]).double() + 0 * v[:, 0],
        floats(TOKENS, 4).double(),
        symbolic=True,
    )
    (count,) = (node for node in graph.nodes if "arange" in node.name or "iota" in node.name)
    assert graph.ranges.of(count)[1] > 1e6 or graph.ranges.of(count) == UNBOUNDED


def test_deep_graphs_are_not_followed_for_ever() -> None:
    def chain(v: Tensor) -> Tensor:
        for _ in range(3000):
            v = v + 1
        return v

    graph = View(trace(chain, floats(2)))
    assert graph.ranges.of(outputs(graph)[0]) == UNBOUNDED
