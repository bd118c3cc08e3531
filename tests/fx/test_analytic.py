"""Barriers: behind which steps nothing is read off probes, and which choices are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_fusion.fx.kinds import filled_with
from mla_fusion.fx.view import View

from .tracing import TOKENS, floats, integers, masks, outputs, view

Step = Callable[[Tensor], Tensor]
T, HE, WIDTH = 5, 16, 8


def behind(step: Callable[..., Any], *others: Tensor) -> View:
    """The step behind a product of [T, WIDTH]; other inputs come after it."""
    return view(lambda x, w, *rest: step(x @ w, *rest), floats(T, HE), floats(HE, WIDTH), *others)


def codes(step: Callable[..., Any], *others: Tensor) -> list[str]:
    return [barrier.code for barrier in behind(step, *others).barriers.values()]


PASS: dict[str, Step] = {
    # norms
    "rsqrt of a mean of squares": lambda v: v * torch.rsqrt(v.pow(2).mean(-1, True) + 1e-6),
    "and without an epsilon": lambda v: v * torch.rsqrt((v * v).mean(-1, True)),
    "sqrt and division": lambda v: v / torch.sqrt((v * v).sum(-1, True) / WIDTH + 1e-6),
    "power of -0.5": lambda v: v * (v.square().mean(-1, True) + 1e-6).pow(-0.5),
    "vector norm": lambda v: v / torch.linalg.vector_norm(v, dim=-1, keepdim=True),
    "norm of some columns": lambda v: v[:, :4] / v[:, :4].norm(dim=-1, keepdim=True),
    "F.normalize": lambda v: F.normalize(v, dim=-1),
    "F.normalize of bfloat16": lambda v: F.normalize(v.bfloat16(), dim=-1),
    "the kernel of torch": lambda v: F.rms_norm(v, (WIDTH,), None, 1e-6),
    "scaled before": lambda v: 3 * v / torch.linalg.vector_norm(v * 3, dim=-1, keepdim=True),
    # choices that are none
    "clamp_min(0) of squares": lambda v: (
        v * torch.rsqrt(v.pow(2).mean(-1, True).clamp_min(0) + 1e-6)
    ),
    "clamp_min below an epsilon": lambda v: (
        (v.pow(2).mean(-1, True) + 1e-5).clamp_min(1e-6).rsqrt()
    ),
    "abs of squares": lambda v: v.square().abs(),
    "relu of squares": lambda v: v.square().sum(-1).relu(),
    "maximum with less": lambda v: torch.maximum(v.square() + 1, torch.zeros(())),
    "minimum with more": lambda v: torch.minimum(-v.square(), torch.ones(())),
    "where with literals": lambda v: torch.where(torch.arange(WIDTH) < 4, v, -v),
    "masked_fill with literals": lambda v: v.masked_fill(torch.arange(WIDTH) < 4, 0.0),
    "index by literals": lambda v: v[:, torch.arange(3, -1, -1)],
    # casts and movement
    "casts among floats": lambda v: v.bfloat16().float().double(),
    "views": lambda v: v.view(T, 2, 4).transpose(1, 2).flip(-1).roll(1, 0).repeat(1, 1, 2),
    "dropout of nothing": lambda v: torch.dropout(v, 0.0, True),
    "quotient by what is above 1": lambda v: v / (v.square() + 1),
    "logarithm of what is above 1": lambda v: (v.square() + 1).log(),
    "power by exp and log": lambda v: ((v.square() + 1).log() * -0.5).exp(),
    # what exact arithmetic refuses: flat where no probe lies, or a root that changes its sign
    "sigmoid": lambda v: v * (80 - v).sigmoid(),
    "tanh": lambda v: v * (1e4 * v * v).tanh(),
    "erf": lambda v: v + 50 * (1 + torch.erf(-v - 80)),
    "softmax": lambda v: v.softmax(-1),
    "exp": lambda v: v * (-(v - 90).square()).exp(),
    "root of a square": lambda v: ((v - 100) ** 2).sqrt(),
    "root of one square": lambda v: (v * v).sqrt(),
    "root of the squares of two columns": lambda v: (v[:, :2] ** 2).sum(-1).sqrt(),
    "root of one column's square, spread": lambda v: (v[:, :1].expand(-1, 8) ** 2).sum(-1).sqrt(),
    "norm of what is shifted": lambda v: torch.linalg.vector_norm(v - 100, dim=-1),
    "norm of single elements": lambda v: torch.linalg.vector_norm(v.unsqueeze(-1), dim=-1),
    "rsqrt of a sum": lambda v: v.sum(-1).rsqrt(),
    "rsqrt of squares less something": lambda v: (v.square().mean(-1) - 1e-6).rsqrt(),
    "quotient": lambda v: v[:, :1] / v[:, 1:2],
    "reciprocal": lambda v: 1 / v,
    "logarithm": lambda v: v.log(),
    "power of a third": lambda v: v.pow(1 / 3),
    "negative power": lambda v: v.pow(-2),
    "power of itself": lambda v: torch.pow(v, v),
}

CHOICE: dict[str, Step] = {
    # out of range
    "factors one after the other": lambda v: v * 1e-18 * 1e-18 * 1e18 * 1e18,
    "clamp": lambda v: v.clamp(-8, 8),
    "clamp far out": lambda v: v.clamp(-1e30, 1e30),
    "hardtanh": lambda v: F.hardtanh(v, -8, 8),
    "threshold": lambda v: F.threshold(v, -20.0, 0.0),
    "comparison as a factor": lambda v: v * (v < 12),
    "fmod": lambda v: v.fmod(1e4),
    "minimum with a number": lambda v: torch.minimum(v, torch.full((), 1e4)),
    "masked_fill of the large": lambda v: v.masked_fill(v.abs() > 11, 0.0),
    "norm with ord 1": lambda v: torch.linalg.vector_norm(v, ord=1, dim=-1),
    "floor of 1e-3 under a norm": lambda v: (
        v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-3)
    ),
    "F.normalize with a floor": lambda v: F.normalize(v, dim=-1, eps=1e-3),
    "floor under a mean of squares": lambda v: v * v.pow(2).mean(-1, True).clamp_min(1e-3).rsqrt(),
    "ceiling over a mean of squares": lambda v: (
        v * (v.pow(2).mean(-1, True).clamp_max(1e4) + 1e-6).rsqrt()
    ),
    "maximum of a row": lambda v: v / v.amax(-1, True),
    "abs": lambda v: v.abs(),
    "sort": lambda v: v.sort(-1).values,
    "round": lambda v: v.round(),
    "cast to integers": lambda v: v.long().float(),
    "bits": lambda v: v.view(torch.int32).view(torch.float32),
    "where by its own values": lambda v: torch.where(v > 100, 0.0, v),
    "rounding division": lambda v: torch.div(v, 1e-9, rounding_mode="trunc") * 1e-9,
    "scaled out of range": lambda v: v * 1e-30 * 1e30,
    "logit with an epsilon": lambda v: torch.logit(v.sigmoid(), 1e-3),
}


@pytest.mark.parametrize("name", PASS)
def test_facts_go_on_behind(name: str) -> None:
    assert codes(PASS[name]) == []


@pytest.mark.parametrize("name", CHOICE)
def test_facts_end_at(name: str) -> None:
    assert codes(CHOICE[name])[:1] == ["step.choice"]


@pytest.mark.parametrize(
    "code, step",
    [
        ("step.random", lambda v: F.dropout(v, 0.1, True)),
        ("step.random", lambda v: v + torch.randn_like(v)),
        ("step.random", lambda v: v * torch.bernoulli(v.sigmoid())),
        ("step.unknown", lambda v: torch.as_strided(v, (3, 2), (1, 2))),
        ("step.unknown", lambda v: torch.linalg.inv(v[:, :5])),
    ],
)
def test_random_and_unknown_steps(code: str, step: Step) -> None:
    assert code in codes(step)


SIZES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda v, o: v * o.shape[0],
    "quotient": lambda v, o: v / (o.shape[0] + 1),
    "product with a third": lambda v, o: v * (o.shape[0] / 3),
    "sum over an expand": lambda v, o: v.unsqueeze(0).expand(o.shape[0], *v.shape).sum(0),
}
# Of no product: what they are at one length, they are there alone.
LENGTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fill": lambda v, o: torch.full((1,), o.shape[0]),
    "fill like another": lambda v, o: v.new_full((1,), o.shape[0]),
    "tensor": lambda v, o: torch.scalar_tensor(o.shape[0]),
    "sum of ones": lambda v, o: torch.ones(o.shape[0]).sum(),
    "last of a count": lambda v, o: torch.arange(o.shape[0])[-1:],
    "count from a size": lambda v, o: torch.arange(o.shape[0], o.shape[0] + 3),
    "join": lambda v, o: torch.cat([torch.zeros(o.shape[0]), torch.ones(2)]),
    "flip": lambda v, o: torch.arange(o.shape[0]).flip(0),
}
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fill": lambda v, o: torch.full((o.shape[0], 1), 2.0),
    "count": lambda v, o: torch.arange(o.shape[0]) * 2 + 1,
    "zeros in columns": lambda v, o: torch.zeros(o.shape[0]).unsqueeze(1).expand(-1, 3),
}


@pytest.mark.parametrize("name", SIZES)
def test_facts_end_where_a_size_is_computed_with(name: str) -> None:
    graph = view(
        lambda x, w, o: SIZES[name](x @ w, o),
        floats(T, HE),
        floats(HE, WIDTH),
        floats(TOKENS),
        symbolic=True,
    )
    (made,) = outputs(graph)
    product = next(iter(graph.contractions))
    assert made not in graph.members(product)


@pytest.mark.parametrize("name", LENGTHS)
def test_what_a_length_decides_is_no_literal(name: str) -> None:
    graph = view(lambda v, o: LENGTHS[name](v, o), floats(T), floats(TOKENS), symbolic=True)
    assert not graph.is_constant(*outputs(graph))


@pytest.mark.parametrize("name", SHAPES)
def test_a_literal_of_any_length(name: str) -> None:
    graph = view(lambda v, o: SHAPES[name](v, o), floats(T), floats(TOKENS), symbolic=True)
    assert graph.is_constant(*outputs(graph))


@pytest.mark.parametrize(
    "dtype, held", [(torch.int64, 1.0), (torch.bool, 1.0), (torch.bfloat16, 1.5)]
)
def test_a_fill_is_what_its_dtype_holds(dtype: torch.dtype, held: float) -> None:
    graph = behind(lambda v: torch.full_like(v, 1.5, dtype=dtype))
    assert filled_with(*outputs(graph)) == held


def test_random_numbers_are_equal_to_no_others() -> None:
    graph = view(lambda w: (F.dropout(w, 0.5, True), F.dropout(w, 0.5, True)), floats(4, 4))
    a, b = outputs(graph)
    assert not graph.same(a, b) and not graph.terms.same(a, b)


def test_what_stands_behind_a_choice_is_no_member_of_the_product() -> None:
    graph = behind(lambda v: (v.clamp(-8, 8) * 2, v * 2))
    (product,) = graph.contractions
    clamped, plain = outputs(graph)
    assert plain in graph.members(product) and clamped not in graph.members(product)
    assert graph.reaches(product, clamped)  # by operators that can be run, choices among them


@pytest.mark.parametrize("by", ["index", "mask", "gather", "embedding"])
def test_an_index_from_outside_is_a_choice(by: str) -> None:
    steps: dict[str, tuple[Callable[..., Any], Tensor]] = {
        "index": (lambda v, i: v[i], integers(T)),
        "mask": (lambda v, m: torch.where(m, v, 0.0), masks(T, 1)),
        "gather": (lambda v, i: v.gather(1, i), integers(T, 3)),
        "embedding": (lambda v, i: F.embedding(i, v), integers(T)),
    }
    step, other = steps[by]
    graph = behind(step, other)
    (barrier,) = graph.barriers.values()
    assert barrier.code == "step.choice"


def test_an_index_of_literals_is_movement() -> None:
    assert codes(lambda v: F.embedding(torch.arange(0, 4, 2), v)) == []
    assert codes(lambda v: v.gather(1, torch.arange(2).expand(T, 2) * 3)) == []


def test_counts_from_outside_are_a_choice() -> None:
    graph = behind(lambda v, n: torch.repeat_interleave(v, n, dim=0, output_size=T), integers(T))
    assert [barrier.code for barrier in graph.barriers.values()][:1] == ["step.choice"]


def test_the_detail_names_the_step_and_its_literals() -> None:
    (barrier,) = behind(lambda v: v.clamp(-8, 7)).barriers.values()
    assert (
        "clamp" in barrier.detail
        and "-8, 7" in barrier.detail
        and "picks by the values" in barrier.detail
    )
