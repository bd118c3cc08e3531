"""Prologues without RoPE (Kimi-K3): the kernel's rotation by cos = 1 and sin = 0 hands the columns
on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base
from tests.catalogue.base import DR, HCKV, HCQ, D
from tests.catalogue.unrotated import NoRope
from tests.harness import assert_same_but_for_rounding, clones, exact, run_fused

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


class ByHand(nn.Module):
    """12 heads on a release that takes powers of two, as one writes it with the operator alone."""

    def __init__(self, model: NoRope) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        m = self.model
        pairs = torch.arange(DR).view(2, -1).T.reshape(-1)
        up = m.q_b_proj.weight.view(m.heads, D + DR, HCQ)
        up = torch.cat([up[:, :D], up[:, D:][:, pairs]], 1)
        up = torch.cat([up, up.new_zeros(16 - m.heads, D + DR, HCQ)]).flatten(0, 1).T
        w_uk = torch.cat([m.w_uk(), up.new_zeros(16 - m.heads, D, HCKV)])
        down = m.kv_a_proj_with_mqa.weight
        down = torch.cat([down[:HCKV], down[HCKV:][pairs]]).T
        query, query_rope, _, _, _, *caches = npu.npu_mla_prolog_v3_functional(
            x,
            m.q_a_proj.weight.T.contiguous(),
            up.contiguous(),
            w_uk,
            down.contiguous(),
            m.q_a_layernorm.weight,
            m.kv_a_layernorm.weight,
            torch.zeros_like(sin),
            torch.ones_like(cos),
            kv_cache,
            kr_cache,
            cache_index=slots,
            rmsnorm_epsilon_cq=m.q_a_layernorm.eps,
            rmsnorm_epsilon_ckv=m.kv_a_layernorm.eps,
            cache_mode="PA_BSND",
        )
        kv_cache.copy_(caches[0])
        kr_cache.copy_(caches[1])
        rows = kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        return base.attend(query[:, : m.heads], query_rope[:, : m.heads], *rows)


@pytest.mark.portable
def test_equal_to_the_handwritten_padded_call() -> None:
    torch.manual_seed(0)
    model, given = NoRope(12), base.paged_args()
    fused = run_fused(model, clones(given), mf.Config(cann="9.1"))
    with torch.no_grad():
        by_hand = [ByHand(model)(*(ours := clones(given))), *ours]
    del fused[1]  # nothing of the prologue's
    wanted = exact(model, given)
    del wanted[1]
    for got, want, wide in zip(fused, by_hand, wanted, strict=True):
        if want.is_floating_point():
            assert_same_but_for_rounding(got, want, wide)
        else:
            assert torch.equal(got, want)


def test_the_report_says_that_nothing_rotates() -> None:
    gm, _ = capture(NoRope(), *base.paged_args())
    report: Any = mf.fuse(gm)
    (fusion,) = report.fused
    assert "no rotation: cos is 1 and sin is 0" in fusion.proof
