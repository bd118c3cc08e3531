"""Layers traced once and called, and bodies under a switched-off mode: they fuse as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.catalogue.base import Base
from tests.harness import assert_as_exact, both_ways, clones, eager, graph_of


class Region(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.heads = layer.heads

    @torch.compiler.nested_compile_region
    def forward(self, *args: Any) -> Any:
        return self.layer(*args)


class Regions(prologues.Layers):
    """Layers of one body: the second is a call of what was traced for the first."""

    def __init__(self, layer: type[nn.Module] = prologues.PagedRotateHalf, count: int = 2) -> None:
        super().__init__(layer, count)
        self.layers = nn.ModuleList(Region(layer) for layer in self.layers)


class Computed(Base):
    """The region writes nothing, and holds a number of its own; the caches are its caller's."""

    @torch.compiler.nested_compile_region
    def values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q_nope, q_pe = self.split(
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)) * torch.tensor(1.0))
        )
        c_kv, k_pe = self.latent(x)
        return (
            self.absorb(q_nope),
            self.rotate(q_pe, cos, sin),
            c_kv,
            self.rotate(k_pe.unsqueeze(1), cos, sin),
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_nope, q_pe, c_kv, k_pe = self.values(x, cos.unsqueeze(1), sin.unsqueeze(1))
        self.write(kv_cache, kr_cache, slots, c_kv, k_pe.squeeze(1))
        return q_nope, q_pe


class Nested(Computed):
    """A region in a region. (torch 2.13 loses what an inner one writes, with any backend.)"""

    @torch.compiler.nested_compile_region
    def values(self, *args: Tensor) -> tuple[Tensor, ...]:
        return super().values(*args)


class Pools(Regions):
    """What the regions write is a part of an argument: a call names the whole, and which part."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *pools: Tensor) -> Tensor:
        return super().forward(
            x, cos, sin, slots, *(layer for pair in zip(*pools, strict=True) for layer in pair)
        )


class WithBias(prologues.PagedRotateHalf):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = nn.Linear(base.HE, base.HCQ, bias=True, dtype=torch.bfloat16)


MODELS = {
    "layers": (Regions, lambda: prologues.layers_args(count=2), ["layers.0", "layers.1"]),
    "computed": (Computed, base.paged_args, ["Computed"]),
    "nested": (Nested, base.paged_args, ["Computed"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_fuses_as_exactly(name: str) -> None:
    torch.manual_seed(0)
    model, args, layers = MODELS[name]
    module, given = model(), args()
    for report, fused in both_ways(module, given):
        assert [f.placement for f in report.fused] == ["in place"] * len(layers), str(report)
        assert [f.layer for f in report.fused] == layers
        assert_as_exact(module, given, fused, slack=1.2)


def test_ge_graph_of_the_real_torchair() -> None:
    lowered = mf.lower(Regions(), *prologues.layers_args(count=2))
    assert (
        lowered.ge_ops["MlaPrologV3"] == 2
        and not lowered.ge_ops["TensorMove"] + lowered.ge_ops["Assign"]
    )


def pooled(join: Any = torch.stack) -> tuple[Tensor, ...]:
    args = prologues.layers_args(count=2)
    return *args[:4], join(args[4::2]), join(args[5::2])


def test_regions_that_write_an_entry_of_a_pool() -> None:
    torch.manual_seed(0)
    model, args = Pools(), pooled()
    for report, fused in both_ways(model, args):
        assert len(report.fused) == 2 and not report.rejected, str(report)
        assert_as_exact(model, args, fused, slack=1.2)
    assert [f.placement for f in both_ways(model, args)[0][0].fused] == ["in place"] * 2


class OtherWayRound(Pools):
    """The last layer has the first entry."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *pools: Tensor) -> Tensor:
        return super().forward(x, cos, sin, slots, *(list(pool.unbind())[::-1] for pool in pools))


class OneEntry(Pools):
    """Both layers write one entry."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *pools: Tensor) -> Tensor:
        return super().forward(x, cos, sin, slots, *([pool[1], pool[1]] for pool in pools))


@pytest.mark.parametrize("kind", [OtherWayRound, OneEntry])
def test_each_region_writes_the_entry_that_it_is_given(kind: type[Pools]) -> None:
    torch.manual_seed(0)
    model, args = kind(), pooled()
    for _, run in both_ways(model, args):
        assert_as_exact(model, args, run, slack=1.2)


class Blocks(Pools):
    """Layers have some of the blocks of a pool, which is no entry of it."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *pools: Tensor) -> Tensor:
        return super().forward(x, cos, sin, slots, *(pool.split(base.BLOCKS) for pool in pools))


def test_regions_that_write_into_other_parts_stay_closed() -> None:
    torch.manual_seed(0)
    model, args = Blocks(), pooled(torch.cat)
    for report, run in both_ways(model, args):
        assert not report.fused
        for plain, value in zip(eager(model, clones(args)), run, strict=True):
            assert torch.equal(plain, value)


def test_a_near_miss_is_named_and_the_graph_keeps_its_regions() -> None:
    gm = graph_of(Regions(WithBias), *prologues.layers_args(count=2))
    kept, before = gm.graph, str(gm.graph)
    for judge in (mf.explain, mf.fuse):
        report = judge(gm)
        assert [(item.code, item.layer) for item in report.rejected] == [
            ("linear.bias", f"layers.{i}") for i in (0, 1)
        ]
        assert gm.graph is kept and str(gm.graph) == before
