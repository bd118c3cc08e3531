"""Choices that never act where inputs are drawn: floors, counts from the end, sums along tokens.

Each is refused, or the mode that it would need is: verification is off.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import ENTRIES, int8_plain
from tests.catalogue.base import Base, paged_args
from tests.harness import traced_graph


def report_of(
    model: nn.Module, *args: Tensor, dynamic: bool = False, **options: object
) -> mf.Report:
    config = mf.Config(verify="off", **options)  # type: ignore[arg-type]
    return mf.explain(traced_graph(model, *args, dynamic=dynamic), config, boundary=True)


def floored(v: Tensor) -> Tensor:
    """v above 0.01, and 1e-4 / v below."""
    square = v.float() * v.float() * 1e-7 + 1e-14
    return (v * square.clamp_min(1e-11) / square).to(v.dtype)


def of_row(v: Tensor) -> Tensor:
    """The same of the mean square of a row."""
    mean = v.float().square().mean(-1, keepdim=True) * 1e-7
    return (v * mean.clamp_min(1e-11) / mean).to(v.dtype)


@pytest.mark.parametrize("floor", [floored, of_row])
@pytest.mark.parametrize("name", ["paged", "MxFull", "HifFull"])
def test_a_floor_is_one_under_a_norm_alone(name: str, floor: Callable[[Tensor], Tensor]) -> None:
    kind = Base if name == "paged" else ENTRIES[name].model
    soc, targets = (
        ("A3", ("v3",)) if name == "paged" else (ENTRIES[name].soc, ENTRIES[name].targets)
    )
    args = paged_args() if name == "paged" else ENTRIES[name].args()

    def absorb(self: Base, q_nope: Tensor) -> Tensor:
        return torch.bmm(floor(q_nope).transpose(0, 1), self.w_uk()).transpose(0, 1)

    torch.manual_seed(0)
    changed = type("Changed", (kind,), {"absorb": absorb})()  # type: ignore[arg-type]
    assert not report_of(changed, *args, soc=soc, targets=targets).fused


@pytest.mark.parametrize(
    ("factor", "is_fused"), [(1.0, True), (2.0**-14, False), (2.0**-20, False)]
)
def test_a_floor_is_one_under_rows_that_no_factor_makes_small(
    factor: float, is_fused: bool
) -> None:
    def quantise(self: int8_plain.PlainLinear, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.float() * factor
        scale = int8_plain.largest(rows).clamp_min(1e-4) / 127
        return int8_plain.to_int8(rows / scale), scale

    def bring_back(self: int8_plain.PlainLinear, sums: Tensor, scale: Tensor) -> Tensor:
        return (sums.float() * scale * self.scale * (1 / factor)).to(torch.bfloat16)

    methods = {"quantise": quantise, "bring_back": bring_back}
    torch.manual_seed(0)
    model = int8_plain.model_of(
        int8_plain.PlainPartial, type("Changed", (int8_plain.PlainLinear,), methods)
    )
    assert bool(report_of(model, *paged_args()).fused) is is_fused
