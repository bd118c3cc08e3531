"""Beside a query a key whose latent has another norm: what stands in RMSNorm's place is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.catalogue.base import HCKV, Base, paged_args
from tests.harness import graph_of, refused


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HCKV).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x.float()).bfloat16()

    def normed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Outside(Norm):
    def normed(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)


class LayerNorm(Norm):
    def normed(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-6)


class OfMagnitudes(Norm):
    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)


SAYS = {
    Outside: "kv_a_layernorm's add (aten.add.Tensor) adds epsilon 1e-06 outside the root; the "
    "kernel adds it under the root",
    LayerNorm: "kv_a_layernorm's mul, made with kv_a_layernorm's var_mean of kv_a_proj_with_mqa's "
    "mm, is no RMSNorm",
    OfMagnitudes: "kv_a_layernorm's mul, made with kv_a_layernorm's mean of kv_a_proj_with_mqa's "
    "mm, is no RMSNorm",
}


@pytest.mark.parametrize("norm", SAYS)
def test_what_stands_for_the_norm_is_named(norm: type[Norm]) -> None:
    model = Base()
    model.kv_a_layernorm = norm()
    left = refused(graph_of(model, *paged_args()))
    assert left.code == "kv_latent.absent" and SAYS[norm] in left.message, left.message


def test_where_nothing_stands_there_nothing_is_said() -> None:
    model = Base()
    model.kv_a_layernorm = nn.Identity()
    left = refused(graph_of(model, *paged_args()))
    assert left.code == "kv_latent.absent" and "is no RMSNorm" not in left.message, left.message
