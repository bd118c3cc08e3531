"""Compares outputs of the device with the reference's, with a tolerance for each dtype.

The kernel sums its products in another order than a CPU does. A sum on the edge between two
bfloat16 or int8 values may then round the other way, and the results move a little. A step in a few
elements is expected, two steps or many elements are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fusion.reference import hifloat8
from mla_fusion.tools.by_hand.memory import bits

# the share of the elements that may be off, and the largest relative difference of the others
_FLOATS = {
    torch.bfloat16: (0.005, 2**-7),
    torch.float16: (0.005, 2**-9),
    torch.float32: (0.0, 1e-3),
}
_CODES = 0.03  # the share of codes of one byte that may be one step off


@dataclass(frozen=True)
class Comparison:
    """The comparison of one output.

    largest  the largest difference: steps of a code of one byte, or relative
    off      the share of the elements that are off
    problem  what is wrong; "" if nothing is
    """

    output: str
    largest: float
    off: float
    problem: str = ""


def compare(output: str, actual: Tensor, expected: Tensor) -> Comparison:
    """Returns the comparison of two tensors on the CPU."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        kinds = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (actual, expected)]
        return Comparison(output, float("nan"), 1.0, f"is {kinds[0]}, expected {kinds[1]}")
    if not expected.numel():
        return Comparison(output, 0.0, 0.0)
    is_code = expected.element_size() == 1
    share, least = (_CODES, 0.0) if is_code else _FLOATS[expected.dtype]
    distance = _steps(actual, expected) if is_code else _relative(actual, expected)
    off = float((~(distance <= least)).double().mean())  # a NaN is off
    largest, problem = float(distance.max()), ""
    if off > share:
        problem = f"{off:.2%} of the elements differ, allowed {share:.2%}"
    elif is_code and largest > 1:
        problem = f"off by {largest:.0f} codes, allowed 1"
    return Comparison(output, largest, off, problem)


def _steps(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns how many values of the dtype, of one byte, lie between the elements of two tensors.
    Bytes of uint8 are hifloat8.
    """
    if expected.dtype == torch.int8:
        return (actual.int() - expected.int()).abs()
    codes = torch.arange(256, dtype=torch.uint8)
    is_hifloat8 = expected.dtype == torch.uint8
    values = hifloat8.decode(codes) if is_hifloat8 else codes.view(expected.dtype).float()
    values = values.nan_to_num(float("inf"), float("inf"), float("-inf"))
    rank = torch.unique(values, return_inverse=True)[1]  # -0 and 0 are one value
    return (rank[bits(actual).long()] - rank[bits(expected).long()]).abs()


def _relative(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns the differences relative to the expected elements, or to a quarter of the largest
    element in the row, if that is larger.
    """
    size = expected.double().abs()
    scale = torch.maximum(size, size.amax(-1, keepdim=True) / 4)
    difference = (actual.double() - expected.double()).abs()
    return torch.where(difference == 0, difference, difference / scale)
