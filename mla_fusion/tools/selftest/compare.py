"""Found against wanted, output by output, with a tolerance for each dtype.

The kernel sums its products in another order than a CPU does. A sum that lies on the edge between
two bfloat16 or int8 values may then round the other way, and what is computed from it moves a
little: a step in a few elements is expected, two steps or many elements are not. The tolerances
follow op_semantics (section 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fusion.reference import hifloat8


@dataclass(frozen=True)
class Tolerance:
    """``steps``: how far a code may be off (8-bit dtypes); ``relative``: of the value, and a
    quarter of that of the largest value in its row (wider floats). ``share``: of the elements that
    may be off at all (8-bit), or off by more than ``relative`` (floats).
    """

    share: float
    steps: int = 0
    relative: float = 0.0


_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8)  # uint8: hifloat8
TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.bfloat16: Tolerance(share=0.005, relative=2**-7),
    torch.float16: Tolerance(share=0.005, relative=2**-9),
    torch.float32: Tolerance(share=0.0, relative=1e-3),
    **dict.fromkeys(_CODES, Tolerance(share=0.03, steps=1)),
}


@dataclass(frozen=True)
class Comparison:
    """One output: the largest difference (in steps of its dtype, or relative to the row's largest
    value), and the share of elements outside the tolerance. ``problem`` is empty where it passed.
    """

    output: str
    dtype: str
    shape: tuple[int, ...]
    largest: float
    differing: float
    problem: str = ""


def compare(output: str, found: Tensor, wanted: Tensor) -> Comparison:
    """``found`` against ``wanted``, both on the CPU."""
    kind, dtype = (str(tensor.dtype).removeprefix("torch.") for tensor in (found, wanted))
    largest, differing, problem = 0.0, 0.0, ""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        largest, differing = float("nan"), 1.0
        problem = f"is {kind} {list(found.shape)}, expected {dtype} {list(wanted.shape)}"
    elif wanted.numel():
        tolerance, narrow = TOLERANCES[wanted.dtype], wanted.element_size() == 1
        distance = _steps(found, wanted) if narrow else _relative(found, wanted)
        # a NaN differs
        differing = float((~(distance <= tolerance.relative)).double().mean())
        largest = float(distance.max())
        if differing > tolerance.share:
            allowed = f"allowed {tolerance.share:.2%}"
            problem = f"{differing:.2%} of the elements differ, {allowed}"
        elif narrow and largest > tolerance.steps:
            problem = f"off by {largest:.0f} codes, allowed {tolerance.steps}"
    return Comparison(output, dtype, tuple(wanted.shape), largest, differing, problem)


def _steps(found: Tensor, wanted: Tensor) -> Tensor:
    """How many representable values lie between two tensors of an 8-bit dtype."""
    if wanted.dtype == torch.int8:
        return (found.int() - wanted.int()).abs()
    codes = torch.arange(256, dtype=torch.uint8)
    values = (
        hifloat8.decode(codes) if wanted.dtype == torch.uint8 else codes.view(wanted.dtype).float()
    )
    values = values.nan_to_num(float("inf"), float("inf"), float("-inf"))
    rank = torch.unique(values, return_inverse=True)[1]  # -0 and 0 are one value
    first, second = (
        rank[tensor.contiguous().view(torch.uint8).long()] for tensor in (found, wanted)
    )
    return (first - second).abs()


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    """|found - wanted| over the larger of |wanted| and a quarter of its row's largest value."""
    scale = wanted.double().abs()
    if wanted.dim():
        scale = torch.maximum(scale, scale.amax(-1, keepdim=True) / 4)
    difference = (found.double() - wanted.double()).abs()
    return torch.where(difference == 0, difference, difference / scale)
