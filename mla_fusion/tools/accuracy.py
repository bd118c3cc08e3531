"""Measures how far a fused and an unfused bfloat16 run are from the same maths in float64."""

from __future__ import annotations

import math

from torch import Tensor

# The kernel rounds at fewer places than the usual eager code, so its error should not be larger.
# A tenth is allowed for models that round at fewer places than usual.
LARGEST_RATIO = 1.1
# Which way a sum is rounded depends on the order of its terms, which differs between processors, so
# both errors are samples. An error is the root of the mean of n squared roundings: it scatters by 1
# / sqrt(2 n) of itself, the ratio of two by 1 / sqrt(n). So many of these deviations are chance.
DEVIATIONS = 4


def largest_ratio(numbers: int, largest: float = LARGEST_RATIO) -> float:
    """Returns the largest ratio of the fused error to the unfused error of so many numbers:
    ``largest``, and chance.
    """
    return largest + DEVIATIONS / math.sqrt(numbers)


def excess_error(unfused: Tensor, fused: Tensor, exact: Tensor) -> str:
    """Returns why the fused relative L2 error is too large beside the unfused error; "" if it is
    not.
    """
    fused_error, unfused_error = distance(fused, exact), distance(unfused, exact)
    ratio = fused_error / unfused_error if unfused_error else math.inf if fused_error else 1.0
    allowed = largest_ratio(exact.numel())
    if ratio <= allowed:  # NaN is not
        return ""
    return (
        f"fused error is {ratio:.2f} x the unfused error ({unfused_error:.2e}), "
        f"allowed {allowed:.2f}"
    )


def distance(actual: Tensor, expected: Tensor) -> float:
    """Returns the relative L2 distance."""
    return float((actual.double() - expected).norm() / expected.double().norm())
