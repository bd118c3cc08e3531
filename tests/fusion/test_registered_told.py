"""What is compared on an example of a registered function, and what the report says of one that
cannot be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base
from tests.harness import traced_graph


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
