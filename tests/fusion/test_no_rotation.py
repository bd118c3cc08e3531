"""Prologues without RoPE (Kimi-K3): the kernel's rotation by cos = 1 and sin = 0 hands the columns
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base, int8
from tests.catalogue.base import DR, HCKV, HCQ, HE, Base, D
from tests.exhaustive import one_in
from tests.harness import (
    assert_as_exact,
    assert_same_but_for_rounding,
    both_ways,
    clones,
    compiled,
    exact,
    outcome,
)

npu = torch.ops.npu


class NoRope(Base):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


class KeyApart(NoRope):
    """W_kr is a layer of its own."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.kv_a_proj_with_mqa = base.linear(HE, HCKV)
        self.k_proj = base.linear(HE, DR)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kv_a_layernorm(self.kv_a_proj_with_mqa(x)), self.k_proj(x)


class QueryApart(NoRope):
    """W_uq and W_qr are layers of their own."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.q_b_proj = nn.Identity()  # type: ignore[assignment]
        self.q_nope_proj = base.linear(HCQ, heads * D)
        self.q_rope_proj = base.linear(HCQ, heads * DR)

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_nope_proj(q).view(-1, self.heads, D), self.q_rope_proj(q).view(
            -1, self.heads, DR
        )


class ScaledQuery(NoRope):
    """The softmax scale on the whole query."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return super().split(q * 0.07)


class RopeFirst(NoRope):
    """Heads laid out [Dr | D]."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_pe, q_nope = q.view(*q.shape[:-1], self.heads, D + DR).split([DR, D], -1)
        return q_nope, q_pe


class Joined(NoRope):
    """Query and key as one row of 576, as attention over latents reads them."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        kv_cache.view(-1, HCKV)[slots], kr_cache.view(-1, DR)[slots] = c_kv, k_pe
        rows = torch.cat([kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)], -1)
        return torch.cat([self.absorb(q_nope), q_pe], -1).float() @ rows.float().T


class Int8(int8.Full):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x


class Prefill(NoRope):
    """The new rows are read beside their caches."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        return base.attend(self.absorb(q_nope), q_pe, c_kv, k_pe)


IN_PLACE, STAGED = "in place", "staged"
FUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (NoRope, IN_PLACE),
    "key_apart": (KeyApart, IN_PLACE),
    "query_apart": (QueryApart, IN_PLACE),
    "scaled_query": (ScaledQuery, IN_PLACE),
    "rope_first": (RopeFirst, IN_PLACE),
    "joined": (Joined, IN_PLACE),
    "int8": (Int8, IN_PLACE),
    "twelve_heads": (lambda: NoRope(12), IN_PLACE),
    "prefill": (Prefill, STAGED),
}


@pytest.mark.parametrize("name", one_in(2, FUSED))
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, placement = FUSED[name]
    module, given = model(), base.paged_args()
    for report, fused in both_ways(module, given, mf.Config(cann="9.1")):
        assert outcome(report) == (placement,), str(report)
        assert report.fused[0].rope.startswith("none")
        assert_as_exact(module, given, fused, slack=1.2)


@pytest.mark.parametrize("name", one_in(2, FUSED, first=1))
def test_device_form(name: str) -> None:
    model, placement = FUSED[name]
    gm, _ = capture(model(), *base.paged_args(), device="npu")
    assert outcome(mf.fuse(gm)) == (placement,)


@pytest.mark.parametrize("name", one_in(2, ["plain", "key_apart", "joined", "prefill"]))
def test_symbolic_sizes(name: str) -> None:
    torch.manual_seed(0)
    model, placement = FUSED[name]
    module, given = model(), base.paged_args()
    fused = compiled(module, clones(given), mf.backend(), dynamic=True)
    assert outcome(mf.reports()[-1]) == (placement,), str(mf.reports()[-1])
    assert_as_exact(module, given, fused, slack=1.2)


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
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.new_full.default)) == 2


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
    fused = compiled(model, clones(given), mf.backend(mf.Config(cann="9.1")))
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


# -- one thing wrong


class OnlyQueryRotated(Base):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return k_pe


class OnlyKeyRotated(Base):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return q_pe


class OnlyRopeScaled(NoRope):
    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return q_pe * 0.5


class OnlyNopeScaled(NoRope):
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = super().split(q)
        return q_nope * 0.5, q_pe


class Biased(NoRope):
    """A bias for each column is no rotation, and no product either."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DR).bfloat16())

    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x + self.bias


class Clamped(NoRope):
    def rotate(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x.clamp(-1, 1)


class TokensShifted(NoRope):
    def rotate_k(self, k_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return k_pe.roll(1, 0)


MISSES: dict[str, tuple[type[nn.Module], set[str]]] = {
    "only_query_rotated": (OnlyQueryRotated, {"kv_latent.absent", "rope.absent"}),
    "only_key_rotated": (OnlyKeyRotated, {"rope.absent", "q_lora.absent"}),
    # what reads the columns scales them, as attention may
    "only_rope_scaled": (OnlyRopeScaled, {IN_PLACE}),
    "only_nope_scaled": (OnlyNopeScaled, {"scale.unequal"}),
    "biased": (Biased, {"linear.bias"}),
    "clamped": (Clamped, {"rope.absent", "step.choice"}),
    "tokens_shifted": (TokensShifted, {"rope.absent", "tokens.mixed", STAGED}),
}


@pytest.mark.parametrize("name", one_in(2, MISSES))
def test_a_miss_is_never_wrong(name: str) -> None:
    torch.manual_seed(0)
    model, expected = MISSES[name]
    module, given = model(), base.paged_args()
    got = compiled(module, clones(given), mf.backend(mf.Config(verify="off")))
    (found,) = outcome(mf.reports()[-1])
    assert found in expected, str(mf.reports()[-1])
    assert_as_exact(module, given, got, slack=1.2)


def test_the_report_says_that_nothing_rotates() -> None:
    gm, _ = capture(NoRope(), *base.paged_args())
    report: Any = mf.fuse(gm)
    (fusion,) = report.fused
    assert "tables: cos is 1 and sin is 0" in fusion.proof
    assert any(line.startswith("no rotation of 2 heads") for line in fusion.proof)
