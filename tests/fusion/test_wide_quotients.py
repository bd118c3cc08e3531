"""Quantisations that end in range because of the arithmetic that they are computed in.

``round(x * 127 / max|x|)`` needs no clamp where it is computed in float32. Where the scale or the
quotient is rounded to bfloat16, 127 may become 127.5, which a cast to int8 turns into -128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.int8_plain import PlainFull, PlainPartial, largest, linear_of
from tests.harness import refused, traced_graph

Quantise = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def whole(steps: Tensor) -> Tensor:
    return steps.float().round().to(torch.int8)


def by_reciprocal(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x) / 127
    return whole(x * scale.reciprocal()), scale


def by_reciprocal_of_the_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    return whole(x * (1 / largest(x)) * 127), largest(x) / 127


def by_narrow_product(x: Tensor) -> tuple[Tensor, Tensor]:
    return whole(x * 127 / largest(x)), largest(x.float()) / 127


def by_twice_rounded_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (largest(x) / 127).reciprocal()
    return whole(x.float() * scale.float()), largest(x.float()) / 127


def by_rounded_quotient(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x.float()) / 127
    return whole((x.float() / (1.0 * scale.bfloat16())).bfloat16()), scale


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


NARROW = [
    by_reciprocal,
    by_reciprocal_of_the_largest,
    by_narrow_product,
    by_twice_rounded_scale,
    by_rounded_quotient,
]
WIDE = [of_narrow_rows, by_wide_product, by_wide_reciprocal, by_both_ends, by_reciprocal_clamped]


def model_of(base: Any, quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Any:
    linear = linear_of("linear", quantise=lambda self, x: quantise(x))
    return type("Model", (base,), {"linear": linear})()


@pytest.mark.parametrize("quantise", NARROW, ids=lambda function: function.__name__)
@pytest.mark.parametrize("base", [PlainPartial, PlainFull])
def test_no_clamp_needs_wide_arithmetic(base: Any, quantise: Any) -> None:
    gm = traced_graph(model_of(base, quantise), *paged_args())
    assert refused(gm, mf.Config(verify="off")).code == "quant.dynamic"


@pytest.mark.parametrize("quantise", WIDE, ids=lambda function: function.__name__)
def test_other_spellings_go_on_fusing(quantise: Any) -> None:
    gm = traced_graph(model_of(PlainFull, quantise), *paged_args())
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement == "in place"


def test_a_largest_may_wrap_in_bfloat16() -> None:
    """What the rule is about: a row's largest element changes its sign."""
    torch.manual_seed(0)
    rows = torch.randn(2000, 64).bfloat16()
    at = rows.abs().argmax(-1, keepdim=True)
    values, _ = by_reciprocal(rows)
    signs = values.gather(-1, at).sign().int() * rows.gather(-1, at).sign().int()
    assert signs.eq(-1).any()
    assert by_wide_reciprocal(rows)[0].gather(-1, at).abs().eq(127).all()


def by_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest(x.float()) / 127
    steps = (x.float() / scale).round().to(torch.int32)
    return steps.clamp(-128, 127).to(torch.int8), scale


def test_steps_may_be_integers_before_the_clamp() -> None:
    gm = traced_graph(model_of(PlainFull, by_integers), *paged_args())
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement == "in place"
