"""Vectors that are parts of a longer one: the weights of both norms in one, the tables of one
position.
"""

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, HCQ, Base, paged_args
from tests.harness import assert_as_exact, compiled, graph_of, refused, traced_graph


class OneVector(Base):
    """The weights of both norms lie in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.q_a_layernorm.weight, self.kv_a_layernorm.weight
        self.gammas = nn.Parameter((1 + 0.1 * torch.randn(HCQ + HCKV)).bfloat16())

    def parts(self) -> tuple[Tensor, Tensor]:
        of_q, of_kv = self.gammas.split([HCQ, HCKV])
        return of_q, of_kv

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.q_a_layernorm.weight, self.kv_a_layernorm.weight = self.parts()
        result = super().forward(*args)
        del self.q_a_layernorm.weight, self.kv_a_layernorm.weight
        return result


class Overlapping(OneVector):
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.gammas[:HCQ], self.gammas[7 : 7 + HCKV]


class EveryThird(OneVector):
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.gammas[:HCQ], self.gammas[:HCQ:3]


@pytest.mark.parametrize("kind", [OneVector, Overlapping, EveryThird])
def test_part_of_a_vector_is_a_norm_weight(kind: type[OneVector]) -> None:
    model, args = kind(), paged_args()
    assert_as_exact(model, args, compiled(model, args, mf.backend(mf.Config(verify="all"))))
    assert mf.reports()[-1].fused


class Whole(OneVector):
    """Near miss: one number of the part weighs the whole row."""

    def parts(self) -> tuple[Tensor, Tensor]:
        return self.gammas[:HCQ], self.gammas[HCQ : HCQ + 1]


def test_one_number_of_a_vector_is_no_norm_weight() -> None:
    assert refused(traced_graph(Whole(), *paged_args())).code == "norm.gamma_absent"


class OnePosition(Base):
    """Tables of one position, [Dr], for every token."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        c, s = c.reshape(-1)[: DR // 2], s.reshape(-1)[: DR // 2]
        return torch.cat([first * c - second * s, second * c + first * s], -1)


def test_tables_of_one_position() -> None:
    args = paged_args(1)
    assert mf.fuse(graph_of(OnePosition(), *args)).fused
