"""Halves and pairs of columns, taken as windows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests import harness
from tests.catalogue.base import DR, Base, H, half, paged_args


class HalvesAsWindows(Base):
    """Two windows of 32 columns."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.unfold(-1, H, H).unbind(-2)
        c, s = half(c), half(s)
        return torch.cat((first * c - second * s, second * c + first * s), -1)


class PairsAsWindows(Base):
    """32 windows of two columns."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.unfold(-1, 2, 2).unbind(-1)
        c, s = half(c), half(s)
        return torch.cat((first * c - second * s, second * c + first * s), -1)


class OverlappingWindows(Base):
    """Each column meets its neighbour, not its pair."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        first, second = x.unfold(-1, 2, 1).unbind(-1)
        c, s = half(c), half(s)
        first, second = first[..., :H], second[..., :H]
        return torch.cat((first * c - second * s, second * c + first * s), -1)


class WindowsOfTokens(Base):
    """Each token meets the one behind it."""

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        behind = torch.cat((x, x[:1]))
        _, x = behind.unfold(0, 2, 1).unbind(-1)
        return super().rotate(x, c, s)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("model", [HalvesAsWindows, PairsAsWindows])
def test_windows_of_columns_fuse(model: type[Base], dynamic: bool) -> None:
    torch.manual_seed(0)
    module, args = model(), paged_args()
    wanted = harness.eager(module, harness.clones(args))
    found = harness.compiled(module, harness.clones(args), mf.backend(), dynamic)
    report = mf.reports()[-1]
    assert harness.outcome(report) == ("in place",), str(report)
    assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("model", [OverlappingWindows, WindowsOfTokens])
def test_other_windows_do_not(model: type[Base], dynamic: bool) -> None:
    gm, _ = harness.traced(model(), paged_args(), dynamic)
    report = mf.explain(gm)
    assert not report.fused, str(report)


assert DR == 2 * H
