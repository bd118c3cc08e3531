"""Operators as a program calls them: floats in float64, casts erased, nothing left to torch's
default dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx.kinds import is_float
from mla_fusion.operators.known import rules, value_of


def widen(dtype: torch.dtype) -> torch.dtype:
    """Numbers of one byte stay what they are: products read them by their format."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point and dtype.itemsize > 1 else dtype


def cast(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Erase a cast among the wide floats; do any other (to an integer, to bool) for real."""
    wanted = kwargs.get("dtype")
    for arg in args:
        if isinstance(arg, torch.dtype):
            wanted = arg
        elif isinstance(arg, torch.Tensor):
            wanted = arg.dtype
    if wanted is None or wanted == value.dtype:
        return value
    if is_float(value.dtype) and is_float(wanted):
        if value.is_complex() != wanted.is_complex or wanted.itemsize == 1:
            return value.to(widen(wanted))
        return value
    return value.to(widen(wanted))


def widened(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Floats in float64, from an operator that rounds whatever it is given."""

    def in_float64(*args: Any, **kwargs: Any) -> torch.Tensor:
        value = call(*args, **kwargs)
        return value.double() if value.is_floating_point() else value

    return in_float64


def takes_default_dtype(node: Node) -> bool:
    """Whether it makes floats of integers, or of no tensors: torch's default dtype, which other
    threads may change.
    """
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not isinstance(node.target, OpOverload):
        return False
    if not value.dtype.is_floating_point or value.dtype.itemsize == 1:
        return False
    for source in node.all_input_nodes:  # of most nodes the first ends this
        read = value_of(source)
        if isinstance(read, torch.Tensor) and is_float(read.dtype):
            return False
    return True


def of_floats(call: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """An operator that reads its integers as floats of this dtype."""

    def call_of_floats(*args: Any, **kwargs: Any) -> torch.Tensor:
        wide = (arg.to(dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)
        return call(*wide, **kwargs)

    return call_of_floats


def _keep_shape(value: torch.Tensor, shape: Sequence[int], *_: Any) -> torch.Tensor:
    """An erased cast keeps its input's strides, so a later view may need a copy."""
    return value.reshape(tuple(shape))


def full(shape: Sequence[int], filling: float, dtype: torch.dtype) -> torch.Tensor:
    """Integers have no NaN: memory not yet written holds a code that no element has."""
    unwritten = math.isnan(filling) and not is_float(dtype)
    return torch.full(shape, -1 if unwritten else filling, dtype=dtype)


def full_like(value: torch.Tensor, filling: float, dtype: torch.dtype) -> torch.Tensor:
    return full(value.shape, filling, dtype)


def identity(value: Any, *_: Any, **__: Any) -> Any:
    return value


RULES = rules(_keep_shape, identity)


def has_argument(node: Node, name: str) -> bool:
    """Whether the schema of the node's operator has an argument of this name."""
    target = node.target
    return isinstance(target, OpOverload) and any(
        argument.name == name for argument in schema_of(target).arguments
    )
