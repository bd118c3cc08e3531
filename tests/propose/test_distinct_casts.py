"""Counts that a cast rounds are no distinct slots: of 257 and 256 bfloat16 makes one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import HE, Base, paged_args, tables
from tests.exhaustive import one_in
from tests.harness import outcome, traced_graph

COUNTS: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "count": (torch.arange, "in place"),
    "int32": (lambda n: torch.arange(n).int().long(), "in place"),
    "bfloat16": (lambda n: torch.arange(n).bfloat16().long(), "staged"),
    "counted in bfloat16": (lambda n: torch.arange(n, dtype=torch.bfloat16).long(), "staged"),
    "float16": (lambda n: torch.arange(n).half().long(), "staged"),
    "uint8": (lambda n: torch.arange(n).to(torch.uint8).long(), "staged"),
    "bfloat16, doubled": (lambda n: torch.arange(n).bfloat16().long() * 2, "staged"),
}


class Counted(Base):
    def __init__(self, count: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.count = count

    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return self.count(query.shape[0])


def args(tokens: int) -> tuple[Tensor, ...]:
    caches = (torch.zeros(64, 16, 1, width).bfloat16() for width in (512, 64))
    x = torch.randn(tokens, HE).bfloat16()
    return (x, *tables(tokens), *caches, paged_args()[-1])


@pytest.mark.parametrize("is_dynamic", one_in(1, [True, False]))
@pytest.mark.parametrize("name", one_in(1, COUNTS))
def test_rounded_counts(name: str, is_dynamic: bool) -> None:
    torch.manual_seed(0)
    count, placement = COUNTS[name]
    gm = traced_graph(Counted(count), *args(264), dynamic=is_dynamic)
    assert outcome(mf.fuse(gm, mf.Config(verify="off"))) == (placement,)
