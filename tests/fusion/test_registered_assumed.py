"""What a fusion takes for granted of the user's own operators: each that it read any part of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import HCQ, Base, paged_args, rotated
from tests.harness import traced_graph

MINE = "mla_fusion_tests_assumed"


@torch.library.custom_op(f"{MINE}::turn", mutates_args=())
def turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return rotated(x, c, s)


@torch.library.custom_op(f"{MINE}::doubled", mutates_args=())
def doubled(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return rotated(x, c, s) * 2


@torch.library.custom_op(f"{MINE}::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    return x.clone()


def by_turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return turn(x, c, s) * 2  # type: ignore[no-any-return]


for own in (turn, doubled, kept):
    own.register_fake(lambda x, *_: torch.empty_like(x).contiguous())

FUNCTIONS = {turn: rotated, doubled: by_turn, kept: lambda x: x}


class Doubled(Base):
    """The kernel rotates, and the query is doubled behind it: the end of the operator's function
    stays outside of the fusion.
    """

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return doubled(q_pe, c, s)  # type: ignore[no-any-return]


class Kept(Base):
    """By an operator that gives a copy, in the prologue and outside."""

    def down(self, x: Tensor) -> Tensor:
        return kept(self.q_a_proj(x))  # type: ignore[no-any-return]

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return kept(self.q_a_proj.weight[:, : HCQ // 2])  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    for operator, function in FUNCTIONS.items():
        mf.register_operator(operator, function)
    yield
    for operator in FUNCTIONS:
        mf.register_operator(operator, None)


@pytest.mark.parametrize(
    ("kind", "named", "left"),
    [(Doubled, ("doubled", "turn"), []), (Kept, ("kept",), ["kept"]), (Base, (), [])],
)
def test_each_is_listed(kind: type[Base], named: tuple[str, ...], left: list[str]) -> None:
    torch.manual_seed(0)
    model, args = kind(), paged_args()
    gm = traced_graph(model, *args)
    (fusion,) = mf.fuse(gm, mf.Config(strict=True)).fused
    said = [line for line in fusion.assumptions if line.endswith("what was registered for it")]
    assert said == [f"{MINE}.{name}.default computes what was registered for it" for name in named]
    own = [str(node.target) for node in gm.graph.nodes if MINE in str(node.target)]
    assert own == [f"{MINE}.{name}.default" for name in left]
