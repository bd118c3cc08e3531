"""Weights that are drawn, scaled or mixed at each call; modes of the caller."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args
from tests.catalogue.rotations import GptjOneByOne
from tests.harness import assert_as_exact, clones, compiled, distance, flat, refused, traced_graph


class Made(Base):
    """W_uk is made in the graph, of a number that the model holds, and of x."""

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.register_buffer("times", torch.tensor(0.5).bfloat16())

    def down(self, x: Tensor) -> Tensor:
        self.x = x
        return super().down(x)

    def w_uk(self) -> Tensor:
        return self.make(super().w_uk(), self.times, self.x)


def test_a_weight_is_drawn_at_each_call() -> None:
    torch._dynamo.reset()
    model, args = Made(lambda weight, times, x: F.dropout(weight, 0.5, True)), paged_args()
    run, results = torch.compile(model, backend=mf.backend()), []
    for seed in (1, 2):
        for function in (model, run):
            torch.manual_seed(seed)
            with torch.no_grad():
                results.append(flat(function(*clones(args)))[0])
    assert len(mf.reports()[-1].fused) == 1
    assert distance(results[1], results[0]) < 0.02 and distance(results[3], results[2]) < 0.02
    assert distance(results[1], results[3]) > 0.1


class ScaledByArgument(Base):
    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        *args, self.times = given
        return super().forward(*args)

    def w_uk(self) -> Tensor:
        return super().w_uk() * self.times


def test_a_weight_times_one_number() -> None:
    torch._dynamo.reset()
    for model, args in (
        (Made(lambda weight, times, x: weight * times), paged_args()),
        (ScaledByArgument(), (*paged_args(), torch.tensor(3.0).bfloat16())),
    ):
        assert_as_exact(model, args, compiled(model, clones(args), mf.backend()))
        assert [item.placement for item in mf.reports()[-1].fused] == ["in place"]


class PickedByANumber(Base):
    def forward(self, *given) -> tuple[Tensor, Tensor]:
        *args, self.number = given
        return super().forward(*args)

    def down(self, x: Tensor) -> Tensor:
        weight = self.q_a_proj.weight
        return F.linear(x, torch.stack((weight, weight.flip(0)))[self.number])


def test_a_weight_is_picked_by_an_int_of_the_call() -> None:
    torch._dynamo.reset()
    model = PickedByANumber()
    run = torch.compile(model, backend=mf.backend())
    for number in (0, 1, 0):  # from the second number on it is symbolic
        args = paged_args()
        with torch.no_grad():
            results = [flat(function(*clones(args), number))[0] for function in (model, run)]
        assert distance(*results) < 0.02
        assert len(mf.reports()[-1].fused) == 1


def test_a_weight_that_changes_is_named() -> None:
    graph = traced_graph(Made(lambda weight, times, x: weight * x[0, 0]), *paged_args())
    assert refused(graph).code == "linear.hidden"


class HeadsMixed(Base):
    """A weight stands on the left of a product head by head."""

    def absorb(self, q_nope: Tensor) -> Tensor:
        return torch.matmul(self.kv_a_layernorm.weight[:4].view(2, 2), super().absorb(q_nope))


class ColumnsScaled(Base):
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(q * self.q_a_layernorm.weight[:384])


def test_other_products_with_weights() -> None:
    graph = traced_graph(HeadsMixed(), *paged_args())
    assert len(mf.explain(graph, boundary=True).fused) == 1
    assert refused(traced_graph(ColumnsScaled(), *paged_args())).code == "linear.scaled"


def test_halves_are_compared_whatever_the_model_stacks() -> None:
    config = mf.Config(kr_layout="half", verify="all")
    report = mf.explain(traced_graph(GptjOneByOne(), *paged_args()), config, boundary=True)
    assert [item.placement for item in report.fused] == ["in place"], str(report)


def test_autocast_of_the_caller_changes_nothing() -> None:
    graph = traced_graph(Base(), *paged_args())
    with torch.autocast("cpu", torch.float16):
        assert len(mf.explain(graph, boundary=True).fused) == 1
