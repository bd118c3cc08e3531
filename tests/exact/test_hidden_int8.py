"""Functions of later tokens, and floors, between rows and the int8 of caches, queries and tiles:
refused, or staged.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import int8_caches, int8_plain
from tests.catalogue.base import paged_args
from tests.harness import traced_graph

UNVERIFIED = mf.Config(verify="off")


def late(rows: Tensor, first: int = 600) -> Tensor:
    """1 for the first tokens."""
    count = torch.arange(rows.shape[0], device=rows.device).reshape(-1, *(1,) * (rows.dim() - 1))
    return 1 + torch.relu(count - first).float()


def power(rows: Tensor) -> Tensor:
    count = torch.arange(rows.shape[0], device=rows.device).reshape(-1, *(1,) * (rows.dim() - 1))
    return 1 + (count.float() / 600) ** 40


class LateRows(int8_caches.PlainCache):
    """A factor of later tokens on the latent's rows, on their way into an int8 cache."""

    factor: Callable[[Tensor], Tensor] = staticmethod(late)

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        super().write(kv_cache, kr_cache, slots, (c_kv * self.factor(c_kv)).to(c_kv.dtype), k_pe)


class LatePacked(int8_caches.PackedRows):
    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        tiles = c_kv.float().view(-1, 4, 128)
        scale = tiles.abs().amax(-1, keepdim=True) / 127
        values = torch.round(tiles / scale).clamp(-128, 127).to(torch.int8).flatten(1)
        steps = (scale * late(scale)).squeeze(-1).contiguous()
        parts = [values, k_pe.contiguous().view(torch.int8), steps.view(torch.int8)]
        kv_cache.view(-1, 656)[slots] = torch.cat(parts, -1)


def late_scale(self: int8_plain.PlainLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The token scale is ``max|row|``, and 127 is divided by later: nothing follows it as a
    scale.
    """
    largest = int8_plain.largest(x.float())
    return int8_plain.to_int8(x.float() * 127 / largest), largest * power(x)


def over_127(self: int8_plain.PlainLinear, sums: Tensor, scale: Tensor) -> Tensor:
    return (sums.float() * (scale / 127) * self.scale).to(torch.bfloat16)


def high_floor(self: int8_plain.PlainLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """1e-4 under the scale is 0.0127 under the largest of a row."""
    scale = (int8_plain.largest(x.float()) / 127).clamp_min(1e-4)
    return int8_plain.to_int8(x.float() / scale), scale


def low_floor(self: int8_plain.PlainLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (int8_plain.largest(x.float()) / 127).clamp_min(1e-9)
    return int8_plain.to_int8(x.float() / scale), scale


def fused(model: torch.nn.Module, args: tuple[Tensor, ...], dynamic: bool = True) -> mf.Report:
    return mf.explain(traced_graph(model, *args, dynamic=dynamic), UNVERIFIED, boundary=True)


@pytest.mark.parametrize("factor", [late, power])
def test_rows_of_later_tokens_are_not_the_kernels(factor: Callable[[Tensor], Tensor]) -> None:
    model = LateRows()
    model.factor = factor
    report = fused(model, int8_caches.int8_cache_args())
    assert all(not item.attributes.get("kv_cache_quant_mode") for item in report.fused), str(report)


def test_steps_of_later_tokens_are_not_the_kernels() -> None:
    report = fused(LatePacked(), int8_caches.packed_args())
    assert all(not item.attributes.get("kv_cache_quant_mode") for item in report.fused), str(report)


@pytest.mark.parametrize(
    ("methods", "is_fused"),
    [
        ({"quantise": late_scale, "bring_back": over_127}, False),
        ({"quantise": high_floor}, False),
        ({"quantise": low_floor}, True),
        ({}, True),
    ],
)
def test_scales_of_c_q(methods: dict[str, object], is_fused: bool) -> None:
    linear = type("Changed", (int8_plain.PlainLinear,), methods)
    torch.manual_seed(0)
    model = int8_plain.model_of(int8_plain.PlainPartial, linear)
    report = fused(model, paged_args())
    assert bool(report.fused) is is_fused, str(report)
    floors = [line for item in report.fused for line in item.assumptions if "floor" in line]
    assert bool(floors) is (methods.get("quantise") is low_floor)
