"""Sequences of different lengths side by side, and the checks that the builders share."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from mla_fusion.meta import ContractError

_INTEGERS = (torch.int32, torch.int64)


def refuse(argument: str, expected: str, found: object) -> NoReturn:
    """Raise ContractError ``paging.<argument>``."""
    raise ContractError(f"paging.{argument}", argument, expected, str(found))


def integers(name: str, tensor: Tensor, dim: int = 1) -> Tensor:
    """An int32 or int64 tensor of ``dim`` axes, as int64."""
    if not isinstance(tensor, Tensor):
        refuse(name, "a tensor", type(tensor).__name__)
    if tensor.dtype not in _INTEGERS:
        refuse(name, "int32 or int64", tensor.dtype)
    if tensor.dim() != dim:
        refuse(name, f"{dim}-D", f"{tensor.dim()}-D {list(tensor.shape)}")
    return tensor.to(torch.int64)


def same_length(name: str, tensor: Tensor, length: int, what: str) -> None:
    if tensor.shape[0] != length:
        refuse(name, f"{length} entries, {what}", tensor.shape[0])


def positive_size(name: str, size: int) -> None:
    if not isinstance(size, int) or size < 1:
        refuse(name, "an int of at least 1", repr(size))


def require(name: str, holds: Tensor, expected: str, values: Tensor) -> None:
    """Every element of ``holds`` is true, or ContractError with the first of ``values`` where it is
    not.
    """
    if not bool(holds.all()):
        refuse(name, expected, int(values.expand_as(holds)[~holds][0]))


def prefix_sums(name: str, starts: Tensor, end: int) -> None:
    """``starts`` is non-decreasing from 0 to ``end``."""
    if starts.shape[0] < 1:
        refuse(name, "at least one entry", 0)
    expected = f"prefix sums from 0 to {end}"
    if int(starts[0]) != 0 or int(starts[-1]) != end or bool((starts.diff() < 0).any()):
        refuse(name, expected, starts.tolist())


def positions(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """``(sequence, position)`` of every element of sequences that lie one after the other."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return sequence, torch.arange(len(sequence), device=lengths.device) - starts[sequence]


def starts_of(lengths: Tensor) -> Tensor:
    """Where each sequence starts, and the end of the last one."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def ceil_div(a: Tensor, b: int) -> Tensor:
    return (a + b - 1) // b


def padded(slots: Tensor, pad_to: int | None) -> Tensor:
    """Fill up with -1, which the kernel skips, for graphs of a fixed number of tokens."""
    if pad_to is None or pad_to == len(slots):
        return slots
    if pad_to < len(slots):
        refuse("pad_to", f"at least the {len(slots)} tokens", pad_to)
    return torch.cat((slots, slots.new_full((pad_to - len(slots),), -1)))
