"""What a registered function is told apart by, what is compared on an example, and what the report
says of one that cannot be used.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mla_fusion as mf
from mla_fusion.fx import registered
from tests.catalogue import base
from tests.harness import traced_graph

SCALE = 2.0


@torch.library.custom_op("mine_told::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * 1.5


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    mf.register_operator(scaled, None)


def by(factor: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def through(function: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x)


def of_global(x: Tensor) -> Tensor:
    return torch.mul(x, SCALE)


def of_itself(x: Tensor, depth: int = 2) -> Tensor:
    return of_itself(x, depth - 1) if depth else F.silu(x) * math.pi


def digest(function: Callable[..., Any]) -> str:
    mf.register_operator(scaled, function)
    return registered.digest()


@pytest.mark.parametrize(
    "function",
    [
        lambda: by(2.0),
        lambda: by((2.0, torch.float32)),
        lambda: through(by(2.0)),
        lambda: through(F.silu),
        lambda: of_global,
        lambda: of_itself,
        lambda: lambda x, *, factor=2: sum(x * one for one in (factor,)),
    ],
)
def test_a_function_of_numbers_is_known_again(function: Callable[[], Any]) -> None:
    assert digest(function()) == digest(function())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (by(2.0), by(1.5)),
        (by(0.0), by(-0.0)),
        (by(1), by(True)),
        (by(torch.float16), by(torch.bfloat16)),
        (through(by(2.0)), through(by(1.5))),
        (through(F.silu), through(F.relu)),
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x.sin(), lambda x: x.cos()),
        (lambda x, factor=2: x * factor, lambda x, factor=3: x * factor),
        (lambda x: sum(x * 2 for _ in "a"), lambda x: sum(x * 3 for _ in "a")),
    ],
)
def test_another_function_is_another_one(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_a_changed_global_is_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(of_global)
    monkeypatch.setitem(globals(), "SCALE", 1.5)
    assert registered.digest() != before


@pytest.mark.parametrize(
    "function",
    [
        by(torch.ones(())),
        partial(torch.mul, other=2.0),
        torch.nn.SiLU(),
        through(random.Random(0).sample),
        through(torch.ones(()).mul),
        through(base.rotate_half.__get__(1)),
        through(base),
    ],
)
def test_what_does_not_tell_what_it_is_is_never_the_same(function: Any) -> None:
    """A compile cache must not take one for the other: so nothing is cached."""
    assert digest(function) != registered.digest()


def test_complex_results_are_compared_whole() -> None:
    example = torch.randn(4, dtype=torch.complex64)
    for other in (torch.conj_physical, lambda x: x * 1.5 + 5j):
        with pytest.raises(ValueError, match="off by"):
            mf.register_operator(scaled, other, example)
    mf.register_operator(scaled, by(1.5), example)


def test_infinities_are_what_they_are() -> None:
    example = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    mf.register_operator(scaled, by(1.5), example)
    for other in (torch.Tensor.nan_to_num, by(-1.5), lambda x: x.clamp(max=10.0) * 1.5):
        with pytest.raises(ValueError, match="off by"):
            mf.register_operator(scaled, other, example)


def test_an_example_without_numbers_shows_nothing() -> None:
    with pytest.raises(ValueError, match="no numbers to compare"):
        mf.register_operator(scaled, by(3.0), torch.ones(0, 4))


class Scaled(base.Base):
    """What W_dq makes of x goes through the operator."""

    def down(self, x: Tensor) -> Tensor:
        return scaled(super().down(x))


class Alone(Scaled):
    """A graph that calls the operator, and has nothing of a prologue."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)


@pytest.mark.parametrize(("model", "count"), [(Scaled, 6), (Alone, 1)])
def test_the_report_says_why_a_function_is_not_used(model: type[base.Base], count: int) -> None:
    """The log says so once; whoever reads the report has not seen it."""
    mf.register_operator(scaled, lambda x: x[..., :1])
    gm = traced_graph(model(), *base.paged_args()[:count])
    report = mf.explain(gm)
    assert not report.fused
    said = "a function is registered for it and cannot be used: it gives bfloat16[8, 1], not "
    assert said in str(report), str(report)


def test_a_function_that_calls_its_own_operator_is_no_end() -> None:
    mf.register_operator(scaled, lambda x: scaled(x) * 1.0)
    gm = traced_graph(Scaled(), *base.paged_args())
    report = mf.explain(gm)
    assert not report.fused and "cannot be used: it calls the operator itself" in str(report)
