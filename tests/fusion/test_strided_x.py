"""Hidden states that are not contiguous: torch repeats the weight of a linear layer for each row of
the batch, and multiplies by ``bmm``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.fx.kinds import word
from tests.catalogue.base import HCKV, HCQ, HE, Base, D, paged_args
from tests.catalogue.layouts import Sequences, sequence_args
from tests.harness import assert_as_exact, both_ways, graph_of


class SequenceFirst(Sequences):
    """Hidden states are [S, B, He], as Megatron lays them out."""

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1), *args)


class LastOnes(Sequences):
    """Of a longer sequence."""

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(x[:, -3:], *args)


class ForEachSequence(nn.Module):
    """Each sequence has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, HE, HCQ).bfloat16() * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


class OwnWeights(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = ForEachSequence()  # type: ignore[assignment]


class OneForAllHeads(Base):
    """One W_uk, repeated for each head: what is repeated along heads stays head by head."""

    def w_uk(self) -> Tensor:
        return self.kv_b_proj.weight[:D].expand(self.heads, D, HCKV)


def transposed() -> tuple[Tensor, ...]:
    x, *rest = sequence_args()
    return (x.transpose(0, 1).contiguous(), *rest)


def longer() -> tuple[Tensor, ...]:
    _, *rest = sequence_args()
    return (torch.randn(2, 8, HE).bfloat16(), *rest)


def repeats_the_weight(model: Sequences, args: tuple[Tensor, ...]) -> bool:
    return any(word(node) == "bmm" for node in graph_of(model, *args).graph.nodes)


@pytest.mark.parametrize("model, args", [(SequenceFirst, transposed), (LastOnes, longer)])
def test_a_repeated_weight_is_one(model: type[Sequences], args: object) -> None:
    assert callable(args)
    one, given = model(), args()
    assert repeats_the_weight(one, given)
    for report, values in both_ways(one, given):
        assert [item.placement for item in report.fused] == ["in place"], str(report)
        assert_as_exact(one, given, values)


def test_a_weight_that_is_repeated_for_each_head() -> None:
    one, given = OneForAllHeads(), paged_args()
    for report, values in both_ways(one, given):
        assert [item.placement for item in report.fused] == ["in place"], str(report)
        assert_as_exact(one, given, values)


def test_a_weight_for_each_sequence_is_none() -> None:
    gm = graph_of(OwnWeights(), *sequence_args())
    before = str(gm.graph)
    assert not mf.fuse(gm).fused
    assert str(gm.graph) == before
