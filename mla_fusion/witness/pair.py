"""Two values that should be equal, as numbers, and how far they are from each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fusion.meta.spec import TILE_SIZE
from mla_fusion.paging.tiles import numbers_of_rows
from mla_fusion.reference import hifloat8

_HCKV = 512  # of rows of tiles
_ROW = 64  # elements that a row has at least: a rounding of a large one weighs much among fewer


@dataclass(frozen=True)
class Pair:
    """A value of the original graph and what stands for it in the rewritten one.

    part    for messages: "query", "kv_cache"
    form    "": numbers as they are. "hifloat8": bytes of that format. "powers": e8m0 scales, which
            may differ by one step where another pair has them for ``scales``. "tiles": rows of
            tiles. "halves": the new value has the rotated halves side by side that the original one
            interleaves
    scales  of both graphs, by which their numbers are multiplied: one for each run of elements
    """

    part: str
    before: Node
    after: Node
    form: str = ""
    scales: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """What is read, of the original and of the rewritten graph."""
        return (self.before, *self.scales[:1]), (self.after, *self.scales[1:])

    def numbers(
        self, values: Mapping[Node, Any], of_original: Mapping[Node, Any] | None = None
    ) -> Tensor:
        """What the original value stands for; with ``of_original``, what the new one does, to be
        compared with the original one of these values.
        """
        is_new = of_original is not None
        value, *scales = (values[node] for node in self.nodes[is_new])
        if self.form == "hifloat8":
            value = hifloat8.decode(value)
        elif self.form == "powers":
            value = _powers(value)
        elif self.form == "tiles":
            dr = (value.shape[-1] - _HCKV - 4 * _HCKV // TILE_SIZE) // 2
            value = numbers_of_rows(value, hckv=_HCKV, dr=dr, tile=TILE_SIZE)
        value = (torch.view_as_real(value) if value.is_complex() else value).double()
        for scale in scales:
            scale = (_powers(scale) if scale.element_size() == 1 else scale).flatten()
            value = value * scale.repeat_interleave(value.numel() // scale.numel()).view(
                value.shape
            )
        if of_original is None:
            return value
        want = self.numbers(of_original)
        if self.form == "halves":
            value = value.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        if self.form == "powers":
            value = torch.where((value / want - 1.25).abs() <= 0.75, want, value)
        return value.reshape(want.shape) if value.numel() == want.numel() else value


def _powers(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu).float()


def squares(want: Tensor, got: Tensor, tokens: Collection[int]) -> tuple[Tensor, Tensor]:
    """Of each row: the squared length of the difference, and of what it should be.

    A row runs along the last axes that are not as long as an axis of ``tokens``.
    """
    along, count = list[int](), 1
    for axis in reversed(range(want.dim())):
        if want.shape[axis] not in tokens and 0 < count < _ROW:
            along.insert(0, axis)
            count *= want.shape[axis]
    order = [*(axis for axis in range(want.dim()) if axis not in along), *along]
    a, b = (
        value.permute(order).reshape(count and want.numel() // count, count)
        for value in (want, got)
    )
    difference = torch.where(a == b, 0, a - b)  # infinities too
    size = torch.where(a.isinf(), 0, a)
    return difference.square().sum(1), size.square().sum(1)


def relative(wrong: Tensor, size: Tensor) -> float:
    """Of squared lengths of all rows."""
    return math.sqrt(float(wrong.sum()) / (float(size.sum()) or 1.0))
