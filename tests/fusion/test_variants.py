"""Every variant fuses, with the boundary and without, in the CPU form and in the device's, as exactly as before."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture

from .harness import assert_as_exact, clones, compiled, fuse_only
from .variants import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, args, placement = VARIANTS[name]
    module, given = model(), args()
    for backend in (mf.backend(), fuse_only()):
        fused = compiled(module, clones(given), backend)
        report = mf.reports()[-1]
        assert [f.placement.partition(":")[0] for f in report.fused] == [placement], str(report)
        assert_as_exact(module, given, fused, slack=1.2)


@pytest.mark.parametrize("name", VARIANTS)
def test_device_form(name: str) -> None:
    model, args, placement = VARIANTS[name]
    gm, _ = capture(model(), *args(), device="npu")
    report = mf.fuse(gm)
    assert [f.placement.partition(":")[0] for f in report.fused] == [placement], str(report)
