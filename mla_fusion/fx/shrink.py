"""Fewer tokens than the graph has: a static prefill of 4,096 tokens is probed with five.

The token axis is one factor of each shape. Operators that name sizes (view, expand) are given sizes
in which that factor is replaced; where it stands after a view follows from its stride. Where that
is wrong, a step fails, since shapes no longer fit. That few tokens stand for all is shown by
:mod:`mla_fusion.fx.tokens`; verification of a fusion runs at full size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

SMALL = 5
WORTHWHILE = 64  # tokens from which shrinking pays


@dataclass(frozen=True)
class Shrink:
    """``full`` tokens (the longest token axis) stand as ``small``."""

    full: int
    small: int = SMALL

    def merged(self, size: int) -> int:
        """An axis that holds the token factor, perhaps with others."""
        return size // self.full * self.small if size % self.full == 0 else size

    def lead(self, shape: Sequence[int]) -> Shape:
        """Token axes, [T] or [B, S]: the last that is the shrunk one, else the last that holds
        it.
        """
        sizes = list(shape)
        for fits in (lambda size: size == self.full, lambda size: size % self.full == 0):
            for axis, size in reversed(list(enumerate(sizes))):
                if fits(size):
                    sizes[axis] = self.merged(size)
                    return tuple(sizes)
        return tuple(sizes)

    def rows(self, shape: Sequence[int]) -> Shape:
        """A tensor with rows (a table): its last axis is never the token axis."""
        return (*self.lead(shape[:-1]), *shape[-1:])

    def viewed(self, small_in: Shape, full_in: Shape, full_out: Shape) -> Shape:
        """Sizes for a view whose input is smaller than the graph's."""
        out = list(full_out)
        for axis in self._shorter(small_in, full_in):
            after = math.prod(full_in[axis + 1 :])
            for inner in dict.fromkeys((1, full_in[axis] // self.full)):
                place = self._place(after * inner, full_out)
                if place is not None:
                    out[place] = self.merged(full_out[place])
                    break
        return tuple(out)

    def _place(self, step: int, sizes: Shape) -> int | None:
        """``step``: elements from one token to the next."""
        for place, size in enumerate(sizes):
            below = math.prod(sizes[place + 1 :])
            if below <= step < below * size and size % self.full == 0:
                return place
        return None

    def expanded(self, small_in: Shape, full_in: Shape, full_out: Shape) -> Shape:
        out = list(full_out)
        for axis in self._shorter(small_in, full_in):
            out[axis + len(full_out) - len(full_in)] = small_in[axis]
        return tuple(out)

    @staticmethod
    def _shorter(small: Shape, full: Shape) -> list[int]:
        return [axis for axis, (a, b) in enumerate(zip(small, full, strict=True)) if a != b]
