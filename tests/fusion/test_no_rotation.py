"""Prologues without RoPE (Kimi-K3): the kernel's rotation by cos = 1, sin = 0 changes nothing."""

from __future__ import annotations

from typing import Any

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base
from tests.catalogue.unrotated import NoRope


def test_the_report_says_that_nothing_rotates() -> None:
    gm, _ = capture(NoRope(), *base.paged_args())
    report: Any = mf.fuse(gm)
    (fusion,) = report.fused
    assert "no rotation: cos is 1 and sin is 0" in fusion.proof
