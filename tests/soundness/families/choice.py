"""Choice by value: operators that leave every number of magnitude 1 as it is and change an outlier.

A probe of normal numbers never reaches the bound, a trained model's outlier channel does. The step
is part of what the model computes: a fusion that drops it is wrong.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..member import ALL, Family, attacks
from ..program import FLOATS, INSIDE, OUTPUTS, TABLES, WEIGHTS, Named, Step


def _bounded(bound: float) -> dict[str, Step]:
    b = bound
    steps: dict[str, Step] = {
        "clamp": lambda v, i: v.clamp(-b, b),
        "clamp_max": lambda v, i: v.clamp_max(b),
        "clip_by_tensor": lambda v, i: torch.clamp(v, max=torch.full_like(v, b)),
        "hardtanh": lambda v, i: F.hardtanh(v, -b, b),
        "relu6_around": lambda v, i: F.relu6((v + b) * (3 / b)) * (b / 3) - b,
        "masked_product": lambda v, i: v * (v < b),
        "fmod": lambda v, i: torch.fmod(v, b),
        "remainder_around": lambda v, i: torch.remainder(v + b, 2 * b) - b,
        "minimum": lambda v, i: torch.minimum(v, torch.full_like(v, b)),
        "where": lambda v, i: torch.where(v.abs() > b, torch.zeros_like(v), v),
        "masked_fill": lambda v, i: v.masked_fill(v.abs() > b, 0.0),
        "threshold": lambda v, i: -F.threshold(-v, -b, 0.0),
        "leaky_beyond": lambda v, i: b - F.leaky_relu(b - v, 0.1),
        "elu_beyond": lambda v, i: b - F.elu(b - v),
        "prelu_beyond": lambda v, i: b - F.prelu(b - v, torch.full((1,), 0.2, dtype=v.dtype)),
        "hardsigmoid_gate": lambda v, i: v * F.hardsigmoid((b - v) * 100 / b),
        "lerp_beyond": lambda v, i: torch.lerp(v, torch.zeros_like(v), (v > b).to(v.dtype)),
        "copysign_of_min": lambda v, i: torch.copysign(v.abs().clamp(max=b), v),
        "heaviside": lambda v, i: v * torch.heaviside(b - v, torch.ones((), dtype=v.dtype)),
        "sign_gate": lambda v, i: v * (torch.sign(b - v) + 1) / 2,
        "hinge": lambda v, i: v + 0.5 * F.relu(v - b),
        "softplus_with_threshold": lambda v, i: v - F.softplus(v - 2 * b, beta=4.0, threshold=8.0),
        "absolute_difference": lambda v, i: b - (v - b).abs(),
        "root_of_square": lambda v, i: b - torch.sqrt((v - b) ** 2),
        "norm_of_pair": lambda v, i: (
            b - torch.linalg.vector_norm(torch.stack([v - b, v * 0], -1), dim=-1)
        ),
        "max_of_two": lambda v, i: torch.stack([v, v * 0 - b]).amax(0),
        "sorted_pair": lambda v, i: torch.stack([v, v * 0 + b]).sort(0).values[0],
        "median_of_three": lambda v, i: torch.stack([v, v * 0 + b, v * 0 - b]).median(0).values,
        "bucketed": lambda v, i: v * (torch.bucketize(v.float(), torch.tensor([b])) == 0),
        "nan_when_large": lambda v, i: torch.nan_to_num(
            v / (v < b).to(v.dtype), nan=0.0, posinf=b, neginf=-b
        ),
    }
    return {f"{name}_{bound:g}": step for name, step in steps.items()}


def _by_another(v: Tensor, i: Named) -> Tensor:
    """An input that an ordinary call leaves far away."""
    other = i["other"].view(-1, *[1] * (v.dim() - 1))
    return torch.maximum(v, other.to(v.dtype))


_EVERYWHERE: dict[str, Step] = {
    "relu": lambda v, i: F.relu(v),
    "abs": lambda v, i: v.abs(),
    "round": lambda v, i: torch.round(v),
    "floor_of_eighths": lambda v, i: torch.floor(v * 8) / 8,
    "trunc": lambda v, i: v.trunc() + 0.5 * v.frac(),
    "hardshrink": lambda v, i: F.hardshrink(v, 0.25),
    "softshrink": lambda v, i: F.softshrink(v, 0.25),
    "hardswish": lambda v, i: F.hardswish(v + 4) - 4,
    "sorted_columns": lambda v, i: v.sort(-1).values,
    "cummax": lambda v, i: v.cummax(-1).values,
    "largest_half": lambda v, i: torch.where(
        v >= v.kthvalue(v.shape[-1] // 2, -1, keepdim=True).values, v, 0
    ),
    "integers": lambda v, i: v.to(torch.int32).to(v.dtype) + v.frac() * 0.5,
    "through_float8": lambda v, i: v.to(torch.float8_e4m3fn).to(v.dtype),
    "softsign": lambda v, i: F.softsign(v),
    "rounding_division": lambda v, i: torch.div(v, 0.25, rounding_mode="trunc") * 0.25,
    "logit_with_epsilon": lambda v, i: torch.logit(v.sigmoid(), 1e-3),
    "amax_norm": lambda v, i: v / v.abs().amax(-1, keepdim=True).clamp(min=64.0) * 64.0,
}


def _inert(v: Tensor, i: Named) -> Tensor:
    return torch.where(torch.ones(v.shape[-1], dtype=torch.bool), v, 0.0)


FAMILIES = [
    Family(
        "choice.bounds",
        "a bound that ordinary numbers never reach",
        attacks(_bounded(12.0), FLOATS, ALL) + attacks(_bounded(40.0), FLOATS, ALL),
        attacks(
            {"all_true_mask": _inert}, ("c_q", "q_nope", "k_pe"), ("T8", "sym"), ("paged", "neox")
        ),
    ),
    Family(
        "choice.everywhere",
        "choices that show at any magnitude",
        attacks(_EVERYWHERE, (*FLOATS, "x_q", "x_kv"), ALL),
    ),
    Family(
        "choice.another_input",
        "the bound is an input",
        attacks({"maximum": _by_another}, FLOATS, ALL),
    ),
    Family(
        "choice.outputs",
        "the same steps on what is given out, on tables and weights: fused only where the step is "
        "kept",
        attacks(_bounded(12.0), OUTPUTS, ALL)
        + attacks(_bounded(0.5), TABLES, ALL)
        + attacks(_bounded(0.05), WEIGHTS[:4], ALL)
        + attacks(_bounded(1.1), WEIGHTS[4:], ALL),
    ),
    Family(
        "choice.inside_norm",
        "a bound on squares or their mean inside the norm",
        attacks(_bounded(50.0), INSIDE[:2], ALL, ("paged", "blocks"))
        + attacks(_bounded(4.0), INSIDE[2:], ALL, ("paged", "blocks"))
        + attacks({"floor": lambda v, i: v.clamp(min=1e-4)}, INSIDE[2:], ALL, ("paged", "blocks")),
        attacks(
            {
                "clamp_min_0": lambda v, i: v.clamp_min(0),
                "abs_of_square": lambda v, i: v.abs(),
                "relu_of_square": lambda v, i: F.relu(v),
                "where_all_true": _inert,
            },
            INSIDE,
            ("T8", "sym"),
            ("paged", "blocks"),
        ),
    ),
]
