"""Columns that are put into another order between a projection and its norm: this rounds nothing,
and the weights take the order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import HCQ, Base, HfNorm, paged_args
from tests.harness import assert_as_exact, both_ways, outcome, refused, traced_graph

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda c_q: c_q.flip(-1),
    "roll": lambda c_q: c_q.roll(3, -1),
    "cat": lambda c_q: torch.cat([c_q[..., 700:], c_q[..., :700]], -1),
    "index": lambda c_q: c_q[..., torch.arange(HCQ).flip(0)],
}


class Moved(Base):
    order = "flip"

    def down(self, x: Tensor) -> Tensor:
        return ORDERS[self.order](super().down(x))


class SquaredInBfloat16(HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        statistic = x.pow(2).mean(-1, keepdim=True).to(torch.float32)
        return self.weight * (x * torch.rsqrt(statistic + self.eps)).to(x.dtype)


class Narrow(Moved):
    norm = SquaredInBfloat16


class TokensMoved(Base):
    def down(self, x: Tensor) -> Tensor:
        return super().down(x).flip(0)


@pytest.mark.parametrize("order", ORDERS)
def test_fuses_as_exactly(order: str) -> None:
    torch.manual_seed(0)
    model, args = Moved(), paged_args()
    model.order = order
    for report, fused in both_ways(model, args, mf.Config(strict=True)):
        assert outcome(report) == ("in place",), str(report)
        assert_as_exact(model, args, fused)


@pytest.mark.parametrize(
    ("kind", "code"), [(Narrow, "norm.low_precision"), (TokensMoved, "norm.absent")]
)
def test_near_misses(kind: type[Base], code: str) -> None:
    rejection = refused(traced_graph(kind(), *paged_args()))
    assert rejection.code == code
    assert code != "norm.low_precision" or "pow" in rejection.message
