"""Prologues without RoPE (Kimi-K3): the kernel's rotation by cos = 1 and sin = 0 hands the columns
on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base
from tests.catalogue.unrotated import NoRope

npu = torch.ops.npu


def test_layers_share_one_pair_of_tables() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(NoRope() for _ in range(3))

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *caches: Tensor) -> Tensor:
            *pools, slots = caches
            for layer, kv, kr in zip(self.layers, pools[0::2], pools[1::2], strict=True):
                x = x + layer(x, cos, sin, kv, kr, slots)[0].mean().to(x.dtype)
            return x

    x, cos, sin, kv, kr, slots = base.paged_args()
    pools = [cache.clone() for _ in range(3) for cache in (kv, kr)]
    gm, _ = capture(Layers(), x, cos, sin, *pools, slots, device="npu")
    assert len(mf.fuse(gm).fused) == 3
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)) == 2


# -- the same by hand


def test_the_report_says_that_nothing_rotates() -> None:
    gm, _ = capture(NoRope(), *base.paged_args())
    report: Any = mf.fuse(gm)
    (fusion,) = report.fused
    assert "no rotation: cos is 1 and sin is 0" in fusion.proof
