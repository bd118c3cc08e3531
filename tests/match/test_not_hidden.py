"""A step of the query's norm that picks by values hides no projection: the reason names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.base import Base, HfNorm, paged_args
from tests.harness import refused, traced_graph

Statistic = Callable[[Tensor], Tensor]


def floored(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(min=1e-6))


def by_a_larger_floor(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=1e-6) * x.shape[-1] ** 0.5


def by_magnitudes(x: Tensor) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + 1e-6)


def with_a_residual(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) + x / 16


@pytest.mark.parametrize(
    "statistic, code, named",
    [
        (floored, "norm.absent", "takes epsilon 1e-06 as a floor"),
        (by_a_larger_floor, "norm.absent", "takes epsilon 1e-06 as a floor"),
        (by_magnitudes, "step.choice", "abs"),
        (with_a_residual, "q_lora.interrupted", "not the norm"),
    ],
)
def test_the_norm_is_named(statistic: Statistic, code: str, named: str) -> None:
    class Norm(HfNorm):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * statistic(x.float()).to(x.dtype)

    class Query(Base):
        def __init__(self) -> None:
            super().__init__()
            self.q_a_layernorm = Norm(self.q_a_proj.out_features)

    rejection = refused(traced_graph(Query(), *paged_args()))
    assert rejection.code == code and named in rejection.message
    assert "added up" not in rejection.message
