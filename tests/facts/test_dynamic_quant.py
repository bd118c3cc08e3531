"""Per-token quantisation to int8 in plain operators: whatever spells round(rows * 127 / max|row|),
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mla_fusion.meta.number_formats import FP8, HIFLOAT8, INT8, MXFP8, NumberFormat
from torch import Tensor

from mla_fusion.facts import dynamic_quant, projection
from mla_fusion.facts.dynamic_quant import DynamicQuant
from tests.fx.tracing import TOKENS, floats, integers, view

npu = torch.ops.npu
T, HE, WIDTH = TOKENS, 16, 8
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]  # values in int8, and what a row is scaled by


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def to_int8(steps: Tensor) -> Tensor:
    return steps.round().clamp(-128, 127).to(torch.int8)


def by(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return to_int8(x / scale), scale


def read(quantise: Quantise) -> DynamicQuant | None:
    """As the activation of a product with an int8 weight."""

    def fn(x: Tensor, w: Tensor, columns: Tensor) -> Tensor:
        values, scale = quantise(x)
        return (values.float() @ w.float()) * scale * columns

    graph = view(fn, floats(T, HE), integers(HE, WIDTH, dtype=torch.int8), floats(WIDTH))
    quantised = [item.quantised for item in projection.find(graph) if item.quantised is not None]
    return quantised[0].dynamic if quantised else None


SPELLINGS: dict[str, Quantise] = {
    "usual": lambda x: by(largest(x) / 127, x),
    "by max": lambda x: by(x.abs().max(-1, keepdim=True).values / 127, x),
    "times the inverse": lambda x: (to_int8(x * (127 / largest(x))), largest(x) / 127),
    "times 127": lambda x: (to_int8(x * 127 / largest(x)), largest(x) / 127),
    "a floor under it": lambda x: by(largest(x).clamp(min=1e-8) / 127, x),
    "a floor under the scale": lambda x: by((largest(x) / 127).clamp_min(1e-10), x),
    "both ends": lambda x: by(torch.maximum(x.amax(-1, True), -x.amin(-1, True)) / 127, x),
    "symmetric": lambda x: (
        (x / (largest(x) / 127)).round().clamp(-127, 127).to(torch.int8),
        largest(x) / 127,
    ),
    "clamped before it is rounded": lambda x: (
        (x / (largest(x) / 127)).clamp(-128, 127).round().to(torch.int8),
        largest(x) / 127,
    ),
    "infinity norm": lambda x: by(torch.linalg.vector_norm(x, float("inf"), -1, True) / 127, x),
}

MISSES: dict[str, Quantise] = {
    "128 steps": lambda x: by(largest(x) / 128, x),
    "truncated": lambda x: ((x / (largest(x) / 127)).trunc().to(torch.int8), largest(x) / 127),
    "floored": lambda x: ((x / (largest(x) / 127)).floor().to(torch.int8), largest(x) / 127),
    "largest of all rows": lambda x: by((x.abs().amax() / 127).expand(T, 1), x),
    "largest of half a row": lambda x: by(largest(x[:, :8]) / 127, x),
    "largest without sizes": lambda x: by(x.amax(-1, keepdim=True) / 127, x),
    "a ceiling over it": lambda x: by(largest(x).clamp(max=1e4) / 127, x),
    "a high floor": lambda x: by(largest(x).clamp(min=1e-2) / 127, x),
    "7 bits": lambda x: (
        (x / (largest(x) / 127)).round().clamp(-64, 63).to(torch.int8),
        largest(x) / 127,
    ),
    "rounded to tens": lambda x: (
        (x / (largest(x) / 127)).round(decimals=-1).to(torch.int8),
        largest(x) / 127,
    ),
    "scale of the next token": lambda x: (
        to_int8(x / (largest(x) / 127)),
        (largest(x) / 127).roll(1, 0),
    ),
    "scale in another order": lambda x: (
        to_int8(x / (largest(x) / 127)),
        (largest(x) / 127).flip(0),
    ),
    "scale of the first token": lambda x: (
        to_int8(x / (largest(x) / 127)),
        (largest(x) / 127)[:1].expand(T, 1),
    ),
    "a zero point": lambda x: (
        (x / (largest(x) / 127) + 1).round().clamp(-128, 127).to(torch.int8),
        largest(x) / 127,
    ),
    "outliers cut off": lambda x: (to_int8(x.clamp(-8, 8) / (largest(x) / 127)), largest(x) / 127),
    "scale times two": lambda x: (to_int8(x / (largest(x) / 127)), largest(x) / 64),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    found = read(SPELLINGS[name])
    assert found is not None and found.by_nodes and found.smooth is None
    assert found.source.op == "placeholder"
    assert found.node.meta["val"].dtype == torch.int8


@pytest.mark.parametrize("name", MISSES)
def test_miss(name: str) -> None:
    """What was done before the rows may be a step of its own: then the rows are what came out of
    it.
    """
    found = read(MISSES[name])
    assert found is None or found.source.op != "placeholder"


OF_OPERATORS: dict[str, tuple[NumberFormat | None, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "int8": (INT8, lambda x: npu.npu_dynamic_quant(x)),
    "fp8": (FP8, lambda x: npu.npu_dynamic_quant(x, dst_type=torch.float8_e4m3fn)),
    "fp8 by torch_npu's number": (FP8, lambda x: npu.npu_dynamic_quant(x, dst_type=292)),
    "hifloat8": (HIFLOAT8, lambda x: npu.npu_dynamic_quant(x, dst_type=290)),
    "mxfp8": (MXFP8, lambda x: npu.npu_dynamic_mx_quant(x, dst_type=24)),
    "mxfp8, the axis by its number": (
        MXFP8,
        lambda x: npu.npu_dynamic_mx_quant(x, axis=1, dst_type=292),
    ),
    "another float8": (None, lambda x: npu.npu_dynamic_quant(x, dst_type=torch.float8_e5m2)),
    "another largest number": (
        None,
        lambda x: npu.npu_dynamic_quant(x, dst_type=24, dst_type_max=240.0),
    ),
    "per tensor": (None, lambda x: npu.npu_dynamic_quant(x, dst_type=24, quant_mode="pertensor")),
    "mxfp8 along the tokens": (None, lambda x: npu.npu_dynamic_mx_quant(x, axis=0, dst_type=24)),
    "mxfp8 rounded down": (
        None,
        lambda x: npu.npu_dynamic_mx_quant(x, round_mode="floor", dst_type=24),
    ),
    "mxfp8 in larger blocks": (
        None,
        lambda x: npu.npu_dynamic_mx_quant(x, block_size=64, dst_type=24),
    ),
    "mxfp8 by another scale": (
        None,
        lambda x: npu.npu_dynamic_mx_quant(x, scale_alg=1, dst_type=24),
    ),
    "mxfp8 of another largest": (
        None,
        lambda x: npu.npu_dynamic_mx_quant(x, dst_type=24, dst_type_max=6.0),
    ),
    "mxfp8 with a bound": (
        None,
        lambda x: npu.npu_dynamic_mx_quant(x, dst_type=24, max_low_bound=0.1),
    ),
    "another mx format": (None, lambda x: npu.npu_dynamic_mx_quant(x, dst_type=23)),
}


@pytest.mark.parametrize("name", OF_OPERATORS)
def test_by_operators(name: str) -> None:
    """By its arguments alone; every other is none of the kernel's."""
    wanted, quantise = OF_OPERATORS[name]
    graph = view(
        lambda x: quantise(x)[0], torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    )
    (operator,) = (node for node in graph.nodes if "quant" in str(node.target))
    found = dynamic_quant.by_operator(operator)
    assert (found.format if found is not None else None) == wanted
