"""How a tensor lies in memory: format, strides, and whether there is memory at all; and comparing
sizes that may be symbolic.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, sym_not

from mla_fusion.compat import FakeTensor

FRACTAL_NZ = 29


def npu_format(tensor: Tensor) -> int | None:
    """The storage format of a tensor on an NPU (29 is FRACTAL_NZ); None where there is no such
    thing to ask.
    """
    if tensor.device.type != "npu" or isinstance(tensor, FakeTensor):
        return None
    torch_npu: Any = sys.modules.get("torch_npu")
    return None if torch_npu is None else int(torch_npu.get_npu_format(tensor))


def holds_data(tensor: Tensor) -> bool:
    """Whether a tensor's elements can be read: it is neither meta nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous; a fake one counts as what its compiler will make it.

    Inside a compiled graph a tensor has the layout that the compiler gives it: GE lays every one
    out contiguously.
    """
    return isinstance(tensor, FakeTensor) or tensor.is_contiguous()


def shares_memory(tensor: Tensor) -> bool:
    """Whether several elements of an expanded tensor are one, so that writing it means nothing."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(known(size > 1) and known(stride == 0) for size, stride in axes)


def writable(tensor: Tensor, *, first_axis_free: bool, ones_free: bool) -> bool:
    """Whether a tensor that is written in place is laid out contiguously.

    ``first_axis_free``: its first stride may be larger than that. ``ones_free``: an axis of size 1
    may have any stride, as in torch, and so may every axis of a tensor without elements; otherwise
    such a tensor has the strides that torch gives it, or those that its sizes multiply to. Symbolic
    strides count as what they should be unless they are known to differ. Fake tensors are looked at
    too: what is written in place belongs to the caller.
    """
    sizes, strides = list(tensor.shape), tensor.stride()

    def as_of(sizes: list[Any]) -> bool:
        expected: Any = 1
        for axis in reversed(range(len(sizes))):
            size, stride = sizes[axis], strides[axis]
            one = ones_free and known(size == 1)
            larger = axis == 0 and first_axis_free and not known(stride < expected)
            if different(stride, expected) and not one and not larger:
                return False
            expected = expected * size
        return True

    # torch counts an axis of size 0 as one of size 1
    of_new = [1 if known(size == 0) else size for size in sizes]
    empty = any(known(size == 0) for size in sizes)
    return as_of(sizes) or (empty and (ones_free or as_of(of_new)))


def different(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ; none is guarded on or specialised."""
    return known(a != b)


def known(condition: Any) -> bool:
    """Whether a condition, a bool or a SymBool, holds for every size that there can be."""
    if type(condition) is bool:
        return condition
    from mla_fusion.compat import statically_known_true  # loads sympy

    return statically_known_true(condition)


def not_(condition: Any) -> Any:
    return not condition if type(condition) is bool else sym_not(condition)
