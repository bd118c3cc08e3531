"""Near misses of a linear layer that quantises with plain operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import npu
from .entry import miss
from .int8_plain import PlainLinear, PlainPartial, guarded, largest, model_of, one, to_int8

FLOAT8 = torch.float8_e4m3fn


def over(scale: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Rows divided by another scale, which the product is multiplied by."""
    return {"quantise": lambda self, x: (to_int8(x.float() / scale(x.float())), scale(x.float()))}


def of_steps(values: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Other int8 values of rows brought to steps; the scale is right."""
    unit = lambda x: largest(x) / 127  # noqa: E731
    return {
        "quantise": lambda self, x: (
            values(x.float() / unit(x.float())).to(torch.int8),
            unit(x.float()),
        )
    }


def scaled_by(scale: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The right values, and another token scale, made from c_q."""
    return {
        "quantise": lambda self, x: (
            to_int8(x.float() * 127 / largest(x.float())),
            scale(x.float()),
        )
    }


def product(multiply: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    return {"multiply": lambda self, values, matrix: multiply(values, matrix)}


def back(bring_back: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Of the sums, the token scale and the scales of the columns."""
    return {
        "bring_back": lambda self, sums, scale: bring_back(
            sums.float(), scale, self.scale
        ).bfloat16()
    }


def per_group(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, 128))
    return to_int8(groups / (largest(groups) / 127)).flatten(-2), largest(x.float()) / 127


def _ones(w: Tensor) -> Tensor:
    return w.new_ones(w.shape[1]).float()


def filled(steps: Tensor) -> Tensor:
    steps = steps.clone()
    steps[steps == 0] = 1.0
    return steps


# guards against rows of zeros that are another step for other rows
OTHER_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "the other branch": lambda m: torch.where(m == 0, m, one(m)) / 127,
    "another step": lambda m: torch.where(m == 0, one(m), 2 * m) / 127,
    "of small rows": lambda m: torch.where(m <= 3.0, one(m), m) / 127,
    "of all rows": lambda m: torch.where(m >= 0, one(m), m) / 127,
    "of the row behind": lambda m: torch.where(m == 0, one(m), m.roll(1, 0)) / 127,
    "where it is 1": lambda m: torch.where(m == 1, 2 * one(m), m) / 127,
    "always": lambda m: torch.where(m * 0 == 0, one(m), m) / 127,
    "of another number": lambda m: torch.where(m - 1 == 0, one(m), m) / 127,
    "where 0 is above it": lambda m: torch.where(torch.zeros_like(m) > m, m, one(m)) / 127,
    "where it is below 0": lambda m: torch.where(m < 0, m, one(m)) / 127,
    "by a mask": lambda m: filled(m / 127),
    "of the largest, by a mask": lambda m: filled(m) / 127,
}

MISSES: dict[str, dict[str, Any]] = {
    **{f"guarded {name}": {"quantise": guarded(guard)} for name, guard in OTHER_STEPS.items()},
    # another maximum
    "128 steps": over(lambda v: largest(v) / 128),
    "whole tensor": over(lambda v: (v.abs().max() / 127).expand(v.shape[0], 1)),
    "no abs": over(lambda v: v.amax(-1, keepdim=True) / 127),
    "half of the row": over(lambda v: largest(v[:, : v.shape[1] // 2]) / 127),
    "all but the last": over(lambda v: largest(v[:, :-1]) / 127),
    "every other": over(lambda v: largest(v[:, ::2]) / 127),
    "outliers clipped": over(
        lambda v: torch.minimum(largest(v), 6 * v.std(-1, keepdim=True)) / 127
    ),
    "high floor": over(lambda v: largest(v).clamp(min=5.0) / 127),
    "floor of another row": over(lambda v: torch.maximum(largest(v), 0.05 * v.abs().max()) / 127),
    "in groups": {"quantise": per_group},
    "a fixed step": over(lambda v: v.new_full((len(v), 1), 0.05)),
    # other values
    "truncated": of_steps(lambda v: v),
    "half away from zero": of_steps(lambda v: v.sign() * (v.abs() + 0.5).floor()),
    "zero point": of_steps(lambda v: (v.round() + 1).clamp(-128, 127)),
    "clamped at 126": of_steps(lambda v: v.round().clamp(-126, 126)),
    "columns moved": of_steps(lambda v: v.round().roll(1, -1)),
    "rows moved": of_steps(lambda v: v.round().roll(1, 0)),
    "noise": of_steps(lambda v: (v + torch.rand_like(v) - 0.5).round().clamp(-128, 127)),
    "through float8": of_steps(lambda v: v.to(FLOAT8).float().round()),
    # another token scale
    "of the next row": scaled_by(lambda v: largest(v).roll(1, 0) / 127),
    "of another tensor": scaled_by(lambda v: largest(v * v) / 127),
    "in float8": scaled_by(lambda v: (largest(v) / 127).to(FLOAT8).float()),
    "in float16": scaled_by(lambda v: (largest(v) / 127).half().float()),
    # another product
    "in int8": product(lambda x, w: x @ w),
    "weight as uint8": product(lambda x, w: x.float() @ w.to(torch.uint8).float()),
    "weight in float8": product(lambda x, w: x.float() @ w.float().to(FLOAT8).float()),
    "rows padded": product(lambda x, w: torch._int_mm(F.pad(x, (0, 0, 0, 24)), w)[: len(x)]),
    "with a bias": product(lambda x, w: torch.addmm(_ones(w), x.float(), w.float())),
    "doubled in int8": product(lambda x, w: (x * 2).float() / 2 @ w.float()),
    "copied into int16": product(lambda x, w: (x @ w).short().copy_(torch._int_mm(x, w))),
    "rescaled to int8": product(
        lambda x, w: npu.npu_quant_matmul(x, w, _ones(w), output_dtype=torch.int8)
    ),
    # another way back
    "bias": back(lambda a, s, w: a * s * w + 0.5),
    "sums added to": back(lambda a, s, w: (a + 3000) * s * w),
    "token scale twice": back(lambda a, s, w: a * s * w * s * 50),
    "no token scale": back(lambda a, s, w: a * w * 0.01),
    "scales added": back(lambda a, s, w: a * (s + w)),
    "scales in float8": back(lambda a, s, w: a * (s * w).to(FLOAT8).float()),
}

# what these make of the sums is another step behind a product that is read
OTHER_CODES = {
    "in float16": "dtype.region",
    "in int8": "linear.hidden",
    "weight as uint8": "contract:dtype.weight_uq_qr",
    "weight in float8": "contract:dtype.weight_uq_qr",
    "with a bias": "linear.bias",
    "rescaled to int8": "absorb.absent",
    "bias": "linear.bias",
    "sums added to": "linear.bias",
    "guarded another step": "proof.differs",
    "128 steps": "proof.differs",
    "in groups": "proof.differs",
    "copied into int16": "step.choice",
    "a fixed step": "quant.static",
    "guarded always": "quant.static",
    "rows padded": "tokens.cut",
}
OF_SCALES = ("of the next row", "of another tensor", "in float8", "token scale twice")
OF_SCALES += ("no token scale", "scales added", "scales in float8")
OTHER_CODES |= dict.fromkeys(OF_SCALES, "quant.scale")

for name, methods in MISSES.items():
    model = partial(model_of, PlainPartial, type("Missing", (PlainLinear,), methods))
    code = OTHER_CODES.get(name, "quant.dynamic")
    miss(code, of="PlainPartial", tags="int8, plain", name=name)(model)
