"""Found against wanted, output by output, with a tolerance for each dtype.

The kernel sums its products in another order than a CPU does. A sum on the edge between two
bfloat16 or int8 values may then round the other way, and what is computed from it moves a little. A
step in a few elements is expected, two steps or many elements are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fusion.reference import hifloat8

# the share of the elements that may be off, and by how much more than this each counts as off: of
# the value, or of a quarter of the largest in its row
_FLOATS = {
    torch.bfloat16: (0.005, 2**-7),
    torch.float16: (0.005, 2**-9),
    torch.float32: (0.0, 1e-3),
}
_CODES = 0.03  # the share of codes of one byte that may be one step off


@dataclass(frozen=True)
class Comparison:
    """One output: the largest difference (in steps of one byte, or relative), the share of elements
    that are off, and what is wrong, empty where it passed.
    """

    output: str
    largest: float
    off: float
    problem: str = ""


def compare(output: str, found: Tensor, wanted: Tensor) -> Comparison:
    """``found`` against ``wanted``, both on the CPU."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        kinds = [f"{one.dtype} {list(one.shape)}".removeprefix("torch.") for one in (found, wanted)]
        return Comparison(output, float("nan"), 1.0, f"is {kinds[0]}, expected {kinds[1]}")
    if not wanted.numel():
        return Comparison(output, 0.0, 0.0)
    is_code = wanted.element_size() == 1
    share, least = (_CODES, 0.0) if is_code else _FLOATS[wanted.dtype]
    distance = _steps(found, wanted) if is_code else _relative(found, wanted)
    off = float((~(distance <= least)).double().mean())  # a NaN is off
    largest, problem = float(distance.max()), ""
    if off > share:
        problem = f"{off:.2%} of the elements differ, allowed {share:.2%}"
    elif is_code and largest > 1:
        problem = f"off by {largest:.0f} codes, allowed 1"
    return Comparison(output, largest, off, problem)


def _steps(found: Tensor, wanted: Tensor) -> Tensor:
    """How many representable values lie between two tensors of one byte (uint8: hifloat8)."""
    if wanted.dtype == torch.int8:
        return (found.int() - wanted.int()).abs()
    codes = torch.arange(256, dtype=torch.uint8)
    is_hifloat8 = wanted.dtype == torch.uint8
    values = hifloat8.decode(codes) if is_hifloat8 else codes.view(wanted.dtype).float()
    values = values.nan_to_num(float("inf"), float("inf"), float("-inf"))
    rank = torch.unique(values, return_inverse=True)[1]  # -0 and 0 are one value
    first, second = (rank[one.contiguous().view(torch.uint8).long()] for one in (found, wanted))
    return (first - second).abs()


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    size = wanted.double().abs()
    scale = torch.maximum(size, size.amax(-1, keepdim=True) / 4)
    difference = (found.double() - wanted.double()).abs()
    return torch.where(difference == 0, difference, difference / scale)
