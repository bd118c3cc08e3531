"""int8 prologues of plain operators: fused no less exact, and with one thing wrong never fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.int8_plain import PlainFull, PlainLinear, PlainPartial, largest, model_of
from tests.catalogue.int8_plain_misses import MISSES, back, product
from tests.catalogue.int8_plain_models import one_token
from tests.harness import clones, distance, eager, flat, traced


def fused(model: nn.Module, given: tuple[Tensor, ...], mode: int) -> list[Tensor]:
    """Outputs and arguments of the graph, its prologue one kernel of mode ``weight_quant_mode``."""
    gm, weights = traced(model, given)
    report = mf.fuse(gm, mf.Config(verify="off"))
    assert [(f.placement, f.attributes["weight_quant_mode"]) for f in report.fused] == [
        ("in place", mode)
    ], str(report)
    given = clones(given)
    with torch.no_grad():
        return [*flat(gm(*weights, *given)), *given]


# -- one thing wrong


def outcome(model: nn.Module, given: tuple[Tensor, ...]) -> list[str]:
    gm, _ = traced(model, given)
    before = str(gm.graph)
    report = mf.fuse(gm, mf.Config(verify="off"))
    assert report.fused == [] and str(gm.graph) == before, str(report)
    return [rejection.code for rejection in report.rejected]


@pytest.mark.parametrize("name", ["no abs", "all but the last", "high floor"])
def test_a_miss_of_one_row_is_refused(name: str) -> None:
    linear = type("Missing", (PlainLinear,), MISSES[name])
    assert outcome(model_of(PlainPartial, linear), one_token()) == ["quant.dynamic"]


def test_float16_is_refused() -> None:
    linear = type("Missing", (PlainLinear,), back(lambda a, s, w: (a * s * w).half()))
    assert outcome(model_of(PlainFull, linear), paged_args()) == ["dtype.region"]


def test_values_that_are_moved_are_not_looked_through() -> None:
    linear = type("Missing", (PlainLinear,), product(lambda x, w: (x.int() - 1) @ w.int()))
    assert outcome(model_of(PlainPartial, linear), paged_args())


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda c_q: c_q * 2,
    "its steps": lambda c_q: (c_q.float() / (largest(c_q.float()) / 127)).round(),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_not_given_out_may_not_be_read(name: str) -> None:
    class Model(PlainFull):
        def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
            return READERS[name](c_q)

    assert outcome(Model(), paged_args()) == ["reader.latent"]


@pytest.mark.portable
def test_scales_and_weights_may_be_computed() -> None:
    """The kernel is handed the results. (Without VNNI, torch._int_mm saturates its sums.)"""

    def computed(multiply: Callable[[Tensor, Tensor], Tensor]) -> Any:
        torch.manual_seed(0)
        methods = product(lambda x, w: multiply(x, w.flip(0)))
        methods["bring_back"] = lambda self, sums, scale: (
            sums.float() * scale * self.scale.roll(1)
        ).bfloat16()
        return model_of(PlainFull, type("Computed", (PlainLinear,), methods))

    model, exactly = computed(torch._int_mm), computed(lambda x, w: (x.long() @ w.long()).int())
    given = paged_args()
    unfused = eager(exactly, clones(given))
    assert distance(fused(model, given, 2)[0], unfused[0]) < 2e-2
