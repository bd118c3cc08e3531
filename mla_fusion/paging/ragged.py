"""Sequences of different lengths side by side, and the checks that the other files share."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from mla_fusion.meta import ContractError

_INTEGERS = (torch.int32, torch.int64)


def refuse(argument: str, expected: str, found: object) -> NoReturn:
    """Raises ContractError ``paging.<argument>``."""
    raise ContractError(f"paging.{argument}", argument, expected, str(found))


def integers(name: str, tensor: Tensor, dim: int = 1) -> Tensor:
    """Returns an int32 or int64 tensor of ``dim`` axes, as int64."""
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
    """Raises ContractError with the first of ``values`` whose element of ``holds`` is False."""
    if not holds.all():
        refuse(name, expected, int(values.expand_as(holds)[~holds][0]))


def offsets(name: str, tensor: Tensor) -> Tensor:
    """Returns where sequences start, and where the last one ends, as int64 [B+1]."""
    starts = integers(name, tensor)
    if len(starts) < 1:
        refuse(name, "at least one entry", 0)
    return starts


def prefix_sums(name: str, starts: Tensor, end: int) -> None:
    """Raises ContractError unless ``starts`` never decreases from 0 to ``end``."""
    if int(starts[0]) != 0 or int(starts[-1]) != end or (starts.diff() < 0).any():
        refuse(name, f"prefix sums from 0 to {end}", starts.tolist())


def positions(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``(sequence, position)`` of each element of sequences that follow each other."""
    sequence = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return sequence, torch.arange(len(sequence), device=lengths.device) - starts[sequence]


def starts_of(lengths: Tensor) -> Tensor:
    """Returns where each sequence starts, and the end of the last one."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def ceil_div(a: Tensor, b: int) -> Tensor:
    return (a + b - 1) // b


def padded(slots: Tensor, pad_to: int | None) -> Tensor:
    """Returns the slots for a graph of ``pad_to`` tokens: -1, which the kernel skips, fills up."""
    missing = 0 if pad_to is None else pad_to - len(slots)
    if missing < 0:
        refuse("pad_to", f"at least the {len(slots)} tokens", pad_to)
    return torch.cat((slots, slots.new_full((missing,), -1))) if missing else slots
