"""Quantisations that end in range because of the arithmetic that they are computed in:
``round(x * 127 / max|x|)`` needs no clamp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.int8_plain import PlainFull, largest, linear_of
from tests.harness import traced_graph

Quantise = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def whole(steps: Tensor) -> Tensor:
    return steps.float().round().to(torch.int8)


def of_narrow_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows themselves were rounded before: their largest is exact in bfloat16, too."""
    scale = largest(x).float() / 127
    return whole(x.float() / scale), scale


def by_wide_product(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return whole(wide * 127 / largest(wide)), largest(wide) / 127


def by_wide_reciprocal(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x.float()) / 127
    return whole(x.float() * scale.reciprocal()), scale


def by_both_ends(x: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.maximum(x.amax(-1), -x.amin(-1)).float()[:, None]
    return whole(x.float() * (127 / ends)), ends / 127


def by_reciprocal_clamped(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x) / 127
    return (x * scale.reciprocal()).float().round().clamp(-128, 127).to(torch.int8), scale


WIDE = [of_narrow_rows, by_wide_product, by_wide_reciprocal, by_both_ends, by_reciprocal_clamped]


def model_of(base: Any, quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Any:
    linear = linear_of("linear", quantise=lambda self, x: quantise(x))
    return type("Model", (base,), {"linear": linear})()


@pytest.mark.parametrize("quantise", WIDE, ids=lambda function: function.__name__)
def test_other_spellings_go_on_fusing(quantise: Any) -> None:
    gm = traced_graph(model_of(PlainFull, quantise), *paged_args())
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement == "in place"


def by_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x.float()) / 127
    steps = (x.float() / scale).round().to(torch.int32)
    return steps.clamp(-128, 127).to(torch.int8), scale


def test_steps_may_be_integers_before_the_clamp() -> None:
    gm = traced_graph(model_of(PlainFull, by_integers), *paged_args())
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement == "in place"
