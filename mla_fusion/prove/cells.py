"""Weights that are only moved about: which element of which input each element is, never its value.

A weight of millions of elements is so not drawn. Views of one are views of a tensor without memory;
only what copies elements (a join, an index) makes their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ZERO = -1  # the number of an element that is 0


class Cells:
    """Numbers of elements: those of a view of an input, or explicit ones.

    first  the number of the input's first element
    """

    def __init__(self, tensor: Tensor, first: int = 0) -> None:
        self._tensor, self._first = tensor, first

    @classmethod
    def of_input(cls, first: int, shape: Sequence[int]) -> Cells:
        flat = torch.empty(math.prod(shape), dtype=torch.int64, device="meta")
        return cls(flat.view(tuple(shape)), first)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Cells:
        if self._tensor.is_meta:
            found = move(self._tensor)
            if found is self._tensor or found._base is self._tensor._base:
                return Cells(found, self._first)
        return Cells(move(self.numbers()))

    def numbers(self) -> Tensor:
        """Of each element."""
        tensor = self._tensor
        if not tensor.is_meta:
            return tensor
        found = torch.tensor(self._first + tensor.storage_offset(), dtype=torch.int64)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            found = found.unsqueeze(-1) + torch.arange(size, dtype=torch.int64) * stride
        return found

    def columns(self) -> tuple[Tensor, Tensor] | None:
        """Of cells [.., k, n] whose columns are elements a step apart: the first of each, and the
        step; else None.
        """
        if self.shape[-2] < 2:
            return None
        first = self.moved(lambda part: part[..., 0, :]).numbers()
        second = self.moved(lambda part: part[..., 1, :]).numbers()
        step = second - first
        if not self._tensor.is_meta:
            places = torch.arange(self.shape[-2], dtype=torch.int64).unsqueeze(-1)
            if not torch.equal(self._tensor, first.unsqueeze(-2) + places * step.unsqueeze(-2)):
                return None
        in_part_zero = (first == ZERO) & (step != 0)
        return None if bool(in_part_zero.any()) else (first, step)
