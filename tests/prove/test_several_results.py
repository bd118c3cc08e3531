"""Operators of several results of which nothing is known (sort, var_mean), and random ones."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args
from tests.harness import assert_as_exact, compiled, refused, traced_graph


class Sorted(Base):
    """Tokens by their slots."""

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, cos, sin, kv_cache, kr_cache, slots = args
        order = slots.argsort()
        return super().forward(x[order], cos[order], sin[order], kv_cache, kr_cache, slots)


class SortedTables(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, c[c[:, 0, 0].sort()[1]], s)


class Spread(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, c + torch.var_mean(c, -1, keepdim=True)[0], s)


@pytest.mark.parametrize("kind", [Sorted, SortedTables, Spread])
def test_one_of_several_results(kind: type[Base]) -> None:
    model, args = kind(), paged_args()
    assert_as_exact(model, args, compiled(model, args, mf.backend(mf.Config(verify="all"))))
    assert mf.reports()[-1].fused


class SortedOtherwise(SortedTables):
    def rotate_k(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return Base.rotate(self, x, c[c[:, 0, 0].sort(descending=True)[1]], s)


class OtherResult(Spread):
    def rotate_k(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return Base.rotate(self, x, c + torch.var_mean(c, -1, keepdim=True)[1], s)


class Random(Base):
    """Query and key draw noise of their own."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, c + torch.randn_like(c), s)


class Dropped(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate(x, dropout(c, 0.3), s)


@pytest.mark.parametrize("kind", [SortedOtherwise, OtherResult, Random, Dropped])
def test_other_tables(kind: type[Base]) -> None:
    rejection = refused(traced_graph(kind(), *paged_args()))
    assert rejection.code == "rope.tables_differ"
    assert "built-in" not in rejection.message
