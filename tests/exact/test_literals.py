"""A literal is the fraction that was written, also where a prime of the proof makes it 0 or 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

import mla_fusion as mf
from mla_fusion.exact.field import POINTS
from tests.catalogue.base import Base, paged_args
from tests.harness import traced_graph

ONES = [at.p + 1 for at in POINTS]


class Changed(Base):
    """Of the key, before it is rotated."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return super().rotate_k(self.change(k_pe), c, s)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda k, times=times: k * times for times in (2**31, 2**-31, 2**32 - 1, *ONES)),
        *(lambda k, more=one - 1: k + k.flip(-1) * more for one in ONES),
        lambda k: k + k.flip(-1) * (2**31 - 1),
        lambda k: k * 1.1999998091720046,  # (2 ** 21 + n * (2 ** 31 - 1)) / 2 ** 52
        lambda k: k * (1 + (ONES[0] - 1) * (ONES[1] - 1)),
    ],
)
def test_it_is_no_other_number(change: Callable[[Tensor], Tensor]) -> None:
    gm = traced_graph(Changed(change), *paged_args())
    fusions = mf.explain(gm, mf.Config(verify="off")).fused
    assert all(fusion.placement != "in place" for fusion in fusions)
