"""How far a fused and an unfused bfloat16 run are from the same maths in float64."""

from __future__ import annotations

import math

from torch import Tensor

# The kernel rounds at fewer places than the usual eager code, so its error should not be the larger
# one. Models that round at fewer places than usual are left a tenth.
LARGEST_RATIO = 1.1
# Which way a sum is rounded depends on the order of its terms, which differs between processors, so
# both errors are samples. An error is the root of the mean of n squared roundings: it scatters by 1
# / sqrt(2 n) of itself, the ratio of two by 1 / sqrt(n). So many of these deviations are chance.
DEVIATIONS = 4


def largest_ratio(numbers: int, largest: float = LARGEST_RATIO) -> float:
    """By how much the fused error of so many numbers may exceed the unfused one: ``largest``, and
    chance.
    """
    return largest + DEVIATIONS / math.sqrt(numbers)


def error_ratio(unfused: Tensor, fused: Tensor, exact: Tensor) -> tuple[float, str]:
    """The fused relative L2 error over the unfused one, and why that is too much; "" where it is
    not.
    """
    ours, theirs = distance(fused, exact), distance(unfused, exact)
    ratio = ours / theirs if theirs else 1.0 if ours == 0.0 else math.inf
    allowed = largest_ratio(exact.numel())
    if ratio <= allowed:  # what is no number is not
        return ratio, ""
    return ratio, (
        f"fused error is {ratio:.2f} x the unfused error ({theirs:.2e}), allowed {allowed:.2f}"
    )


def distance(found: Tensor, wanted: Tensor) -> float:
    """The relative L2 distance."""
    return float((found.double() - wanted).norm() / wanted.double().norm())
