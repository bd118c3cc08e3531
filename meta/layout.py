"""Answers questions about the memory of tensors, and compares sizes that may be symbolic."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, sym_not

from mla_fusion.compat import FakeTensor

FRACTAL_NZ = 29


def npu_format(tensor: Tensor) -> int | None:
    """Returns the storage format of a tensor on an NPU (29 is FRACTAL_NZ), else None."""
    torch_npu: Any = sys.modules.get("torch_npu")
    if torch_npu is None or tensor.device.type != "npu" or isinstance(tensor, FakeTensor):
        return None
    return int(torch_npu.get_npu_format(tensor))


def shares_memory(tensor: Tensor) -> bool:
    """Returns True if elements of an expanded tensor share memory, so that no write is defined."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(known(size > 1) and known(stride == 0) for size, stride in axes)


def writable(tensor: Tensor, *, first_axis_free: bool, ones_free: bool) -> bool:
    """Returns True if a tensor that is written in place is laid out contiguously.

    A symbolic stride counts as contiguous unless it is known to differ. A fake tensor needs the
    layout too: it stands for a tensor of the caller.

    first_axis_free  True if the first stride may be larger
    ones_free        True if an axis of size 1 may have any stride, as in torch, and so may every
                     axis of a tensor without elements. Otherwise such a tensor has the strides that
                     torch gives it, or the products of its sizes
    """

    def is_dense(sizes: list[Any]) -> bool:
        expected: Any = 1
        for axis in reversed(range(len(sizes))):
            size, stride = sizes[axis], tensor.stride(axis)
            is_free = ones_free and known(size == 1)
            may_be_larger = axis == 0 and first_axis_free and not known(stride < expected)
            if different(stride, expected) and not is_free and not may_be_larger:
                return False
            expected = expected * size
        return True

    sizes = list(tensor.shape)
    empty_axes = [known(size == 0) for size in sizes]
    # torch computes strides as if an axis of size 0 had size 1
    as_ones = [1 if is_empty else size for is_empty, size in zip(empty_axes, sizes, strict=True)]
    return is_dense(sizes) or (any(empty_axes) and (ones_free or is_dense(as_ones)))


def different(a: Any, b: Any) -> bool:
    """Returns True if two sizes are known to differ. It adds no guard on them."""
    return known(a != b)


def known(condition: Any) -> bool:
    """Returns True if a condition, a bool or a SymBool, holds for all sizes."""
    if type(condition) is bool:
        return condition
    from mla_fusion.compat import statically_known_true  # loads sympy

    return statically_known_true(condition)


def not_(condition: Any) -> Any:
    """Returns the negation of a condition, a bool or a SymBool."""
    return not condition if type(condition) is bool else sym_not(condition)
