"""Rows on their way into an int8 cache: round(rows * scale), saturated at both ends of int8, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mla_fusion.meta.number_formats import FP8
from torch import Tensor

from mla_fusion.facts import row_quant
from mla_fusion.facts.row_quant import RowQuant
from tests.fx.tracing import calls, floats, view

T, WIDTH = 5, 8
Quantise = Callable[[Tensor, Tensor], Tensor]  # of rows and a scale


def saturated(steps: Tensor) -> Tensor:
    return steps.round().clamp(-128, 127).to(torch.int8)


def read(quantise: Quantise, scale: Tensor) -> RowQuant | None:
    """Of rows that are the cosines of an input."""
    graph = view(lambda v, s: quantise(v.cos(), s), floats(T, WIDTH), scale)
    (rows,) = calls(graph, "cos")
    return row_quant.find(graph, rows)


ONE, EACH = floats(1), floats(WIDTH)


@pytest.mark.parametrize("scale", [ONE, EACH, floats(1, WIDTH)], ids=["one", "each", "row"])
@pytest.mark.parametrize(
    "quantise, inverse",
    [
        (lambda v, s: saturated(v * s), False),
        (lambda v, s: saturated(s * v), False),
        (lambda v, s: saturated(v / s), True),
        (lambda v, s: (v * s).clamp(-128, 127).round().to(torch.int8), False),
        (lambda v, s: (v.double() * s.double()).round().clamp(-128.0, 127.0).to(torch.int8), False),
    ],
)
def test_spelling(quantise: Quantise, inverse: bool, scale: Tensor) -> None:
    found = read(quantise, scale)
    assert found is not None and found.scale.node is not None
    assert (found.scale.inverse, found.scale.factor, found.scale.node.op) == (
        inverse,
        1.0,
        "placeholder",
    )


def test_a_literal_scale() -> None:
    found = read(lambda v, s: saturated(v * 42.0), ONE)
    assert found is not None and found.scale.node is None and found.scale.factor == 42.0


@pytest.mark.parametrize(
    "make", [torch.reciprocal, torch.sqrt, torch.abs, lambda s: s.clamp(min=1.0)]
)
def test_what_is_made_of_a_scale_is_the_scale(make: Callable[[Tensor], Tensor]) -> None:
    found = read(lambda v, s: saturated(v * make(s)), EACH)
    assert (
        found is not None
        and found.scale.node is not None
        and found.scale.node.op == "call_function"
    )
    assert not found.scale.inverse


MISSES: dict[str, Quantise] = {
    "no -128": lambda v, s: (v * s).round().clamp(-127, 127).to(torch.int8),
    "7 bits": lambda v, s: (v * s).round().clamp(-64, 63).to(torch.int8),
    "not saturated": lambda v, s: (v * s).round().to(torch.int8),
    "above alone": lambda v, s: (v * s).round().clamp(max=127).to(torch.int8),
    "truncated": lambda v, s: (v * s).clamp(-128, 127).to(torch.int8),
    "floored": lambda v, s: (v * s).floor().clamp(-128, 127).to(torch.int8),
    "a zero point": lambda v, s: ((v * s).round() + 3).clamp(-128, 127).to(torch.int8),
    "an offset": lambda v, s: saturated(v * s + 0.25),
    "the scale twice": lambda v, s: saturated(v * s * s),
    "sizes": lambda v, s: saturated(v.abs() * s),
    "outliers dropped": lambda v, s: saturated((v * s).masked_fill((v * s).abs() > 1e4, 0.0)),
    "in another order": lambda v, s: saturated((v * s).flip(-1)),
    "tokens flipped": lambda v, s: saturated((v * s).flip(0)),
    "in uint8": lambda v, s: (v * s).round().clamp(0, 255).to(torch.uint8),
    "noise": lambda v, s: saturated(v * s + torch.randn(T, WIDTH)),
}


@pytest.mark.parametrize("name", MISSES)
def test_miss(name: str) -> None:
    assert read(MISSES[name], EACH) is None


def test_a_scale_for_each_token_is_none_for_each_channel() -> None:
    assert read(lambda v, s: saturated(v * s), floats(T, 1)) is None


def test_rows_that_somebody_else_reads_on_the_way() -> None:
    graph = view(lambda v, s: (saturated(v.cos() * s), v.cos() * s + 1), floats(T, WIDTH), EACH)
    rows, *_ = calls(graph, "cos")
    assert row_quant.find(graph, rows) is not None  # each cosine is a node of its own

    def both(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scaled = v.cos() * s
        return saturated(scaled), scaled + 1

    graph = view(both, floats(T, WIDTH), EACH)
    (rows,) = calls(graph, "cos")
    assert row_quant.find(graph, rows) is None


def in_float8(numbers: Tensor) -> Tensor:
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("scale", [ONE, EACH], ids=["one", "each"])
def test_float8(scale: Tensor) -> None:
    found = read(lambda v, s: in_float8(v.float() / s), scale)
    assert found is not None and found.scale.format is FP8 and found.scale.inverse


@pytest.mark.parametrize(
    "quantise",
    [
        lambda v, s: (v * s).to(torch.float8_e4m3fn),  # saturation is the cast's own
        lambda v, s: (v * s).clamp(-440, 440).to(torch.float8_e4m3fn),
        lambda v, s: (v * s).clamp(-448, 448).to(torch.float8_e5m2),
        lambda v, s: in_float8((v * s).round()),
        lambda v, s: in_float8(v * s + 1.0),
        lambda v, s: in_float8((v * s).to(torch.float8_e4m3fn).float() * 2),
    ],
)
def test_another_way_to_float8(quantise: Quantise) -> None:
    assert read(quantise, ONE) is None
