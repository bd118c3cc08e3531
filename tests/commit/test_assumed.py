"""Assumptions of numbers: each is listed on the fusion that rests on it, and on no other."""

from __future__ import annotations

import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import ENTRIES, base, prologues
from tests.catalogue.base import Base
from tests.harness import traced_graph


def assumptions(model: torch.nn.Module, *args: Tensor) -> tuple[str, ...]:
    report = mf.explain(
        traced_graph(model, *(args or base.paged_args())), mf.Config(verify="off"), boundary=True
    )
    (fusion,) = report.fused
    return fusion.assumptions


def test_slots_that_come_in() -> None:
    (only,) = assumptions(prologues.PagedRotateHalf())
    assert (
        "(input slots, trusted to hold numbers from 0 to 2**24 - 1)" in only and "distinct" in only
    )


class Floor(base.HfNorm):
    """As F.normalize: a floor of 1e-12 under the norm of a row."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = wide.shape[-1] ** 0.5
        root = (
            (wide.pow(2).sum(-1, keepdim=True) + self.eps * wide.shape[-1]).sqrt().clamp_min(2e-12)
        )
        return self.weight * (wide * scale / root).to(x.dtype)


class LowFloor(base.HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        root = wide.pow(2).sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
        return self.weight * (wide * wide.shape[-1] ** 0.5 / root).to(x.dtype)


class WithLowFloor(Base):
    norm = LowFloor


class WithFloor(Base):
    norm = Floor


def test_a_floor_that_no_row_comes_near() -> None:
    lines = [text for text in assumptions(WithLowFloor()) if "floor" in text]
    assert lines and all("no row comes near the floor of 1e-12 at " in text for text in lines)


def test_a_floor_below_all_rows_is_no_assumption() -> None:
    """Epsilon alone keeps the root above it."""
    assert not any("floor" in text for text in assumptions(WithFloor()))


def test_a_floor_under_the_largest_of_a_row() -> None:
    """PackedClipped: no scale of a tile below 1e-8."""
    found = ENTRIES["PackedClipped"]
    report = mf.explain(
        traced_graph(found.model(), *found.args()), found.config(verify="off"), boundary=True
    )
    assert any(
        "no row comes near the floor of 1e-08" in text for text in report.fused[0].assumptions
    )


def test_an_int8_cast_that_nothing_clamps() -> None:
    for name, count in (("linear by_wide_product", 1), ("linear plain", 0)):
        found = ENTRIES[name]
        gm = traced_graph(found.model(), *found.args())
        (fusion,) = mf.explain(gm, found.config(verify="off"), boundary=True).fused
        lines = [text for text in fusion.assumptions if "not rounded beyond 127" in text]
        assert len(lines) == count, fusion.assumptions


class TwoWidths(Base):
    """One cache is written by int64 slots, the other by the same in int32."""

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, base.HCKV)[slots] = c_kv
        kr_cache.view(-1, base.DR)[slots.int()] = k_pe


def test_an_input_cast_to_int32() -> None:
    assert any("input slots holds numbers below 2**31" in text for text in assumptions(TwoWidths()))


class ByInt32(ENTRIES["PlainCache"].model):  # type: ignore[name-defined]
    """Rows of an int8 cache that are integers before they are bounded."""

    def quantise(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.float() * scale).round().to(torch.int32).clamp(-128, 127).to(torch.int8)


def test_rounded_rows_that_an_int32_holds() -> None:
    entry = ENTRIES["PlainCache"]
    for model, count in ((ByInt32(), 2), (entry.model(), 0)):
        gm = traced_graph(model, *entry.args())
        (fusion,) = mf.explain(gm, entry.config(verify="off"), boundary=True).fused
        lines = [text for text in fusion.assumptions if "below 2**31" in text]
        assert fusion.placement == "in place" and len(lines) == count, fusion.assumptions
