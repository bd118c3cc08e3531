"""What the operators ask of a tensor's strides."""

from __future__ import annotations

from mla_fusion.meta.symbolic import different
from torch import Tensor


def first_axis_free(tensor: Tensor) -> bool:
    """Whether every axis but the first is contiguous; an axis of size 1 may have any stride.

    Symbolic strides count as what they should be unless they are known to differ.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if type(size) is int and size == 1:
            continue
        if different(stride, expected):
            return False
        expected = expected * size
    return True
