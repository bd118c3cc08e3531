"""Weights that are never listed: an element is a sum of powers of a few random numbers by its place.

So a product with a matrix of 7168 x 24576 is six dot products and six outer ones, and is linear in
the weight as it should be. No polynomial of a degree below ``RANK`` vanishes on such weights.
Moves change the places along each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mla_fusion.exact import field
from mla_fusion.exact.field import P

RANK = 6
_ZERO = -1  # the place of an element that is 0


@dataclass(frozen=True)
class Piece:
    """What a weight has of one leaf: the element is that at the sum of ``places`` along each axis,
    times ``factor``; 0 where a place is ``_ZERO``.
    """

    leaf: int
    places: tuple[Tensor, ...]
    factor: int = 1

    def factors(self) -> list[Tensor]:
        """Of each axis [RANK, n]; the product over the axes, added up over RANK, is the element."""
        found = []
        for axis, places in enumerate(self.places):
            rows = []
            for rank in range(RANK):
                base = field.word(self.leaf, "base", rank) % P
                row = field.powers(base, places.clamp_min(0))
                if axis == 0:
                    front = field.word(self.leaf, "front", rank) % P * self.factor % P
                    row = row * front % P
                rows.append(torch.where(places == _ZERO, 0, row))
            found.append(torch.stack(rows))
        return found


@dataclass(frozen=True)
class Weight:
    """A sum of pieces of one shape."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(places) for places in self.pieces[0].places)

    @classmethod
    def of_leaf(cls, leaf: int, shape: Sequence[int]) -> Weight:
        places, stride = list[Tensor](), prod(shape)
        for size in shape:
            stride //= max(size, 1)
            places.append(torch.arange(size) * stride)
        return cls((Piece(leaf, tuple(places)),))

    def scaled(self, factor: int) -> Weight:
        return Weight(
            tuple(Piece(one.leaf, one.places, one.factor * factor % P) for one in self.pieces)
        )

    def permuted(self, order: Sequence[int]) -> Weight:
        return self._each(lambda places: tuple(places[axis] for axis in order))

    def taken(self, axis: int, index: Tensor) -> Weight:
        return self._each(
            lambda places: (*places[:axis], places[axis][index], *places[axis + 1 :])
        )

    def _each(self, move) -> Weight:  # type: ignore[no-untyped-def]
        return Weight(
            tuple(Piece(one.leaf, move(one.places), one.factor) for one in self.pieces)
        )

    def expanded(self, shape: Sequence[int]) -> Weight:
        lead = len(shape) - len(self.shape)

        def move(places: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            new = [torch.zeros(1, dtype=torch.int64)] * lead
            return tuple(
                one.expand(size) for one, size in zip((*new, *places), shape, strict=True)
            )

        return self._each(move)

    def reshaped(self, shape: Sequence[int]) -> Weight | None:
        """None where the places along a new axis are no sum."""
        pieces = [_reshaped(one.places, shape) for one in self.pieces]
        if any(places is None for places in pieces):
            return None
        return Weight(
            tuple(
                Piece(one.leaf, places, one.factor)
                for one, places in zip(self.pieces, pieces, strict=True)
                if places is not None
            )
        )

    @classmethod
    def joined(cls, weights: Sequence[Weight], axis: int) -> Weight:
        pieces, sizes = list[Piece](), [weight.shape[axis] for weight in weights]
        for number, weight in enumerate(weights):
            before, after = sum(sizes[:number]), sum(sizes[number + 1 :])
            for piece in weight.pieces:
                places = list(piece.places)
                places[axis] = torch.nn.functional.pad(places[axis], (before, after), value=_ZERO)
                pieces.append(Piece(piece.leaf, tuple(places), piece.factor))
        return cls(_united(pieces))

    def dense(self) -> Tensor:
        found = torch.zeros(self.shape, dtype=torch.int64)
        for piece in self.pieces:
            factors = piece.factors()
            for rank in range(RANK):
                part = torch.ones((), dtype=torch.int64)
                for of_axis in factors:
                    part = part.unsqueeze(-1) * of_axis[rank] % P
                found += part
        return found % P

    def product(self, left: Tensor) -> Tensor:
        """``left`` [.., t, k] times this, [k, m] or [.., k, m]."""
        found = None
        for piece in self.pieces:
            *lead, rows, columns = piece.factors()
            for rank in range(RANK):
                inner = (left * rows[rank] % P).sum(-1) % P
                for axis, of_axis in enumerate(lead):
                    size = [1] * inner.dim()
                    size[axis] = -1
                    inner = inner * of_axis[rank].view(size) % P
                part = inner.unsqueeze(-1) * columns[rank] % P
                found = part if found is None else found + part
        assert found is not None
        return found % P


def _united(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces of one leaf that differ along one axis, where one is 0 or the other, as one."""
    found: list[Piece] = []
    for piece in pieces:
        for at, other in enumerate(found):
            if (other.leaf, other.factor) != (piece.leaf, piece.factor):
                continue
            differ = [
                axis
                for axis, (one, two) in enumerate(zip(other.places, piece.places, strict=True))
                if not torch.equal(one, two)
            ]
            if len(differ) == 1:
                one, two = other.places[differ[0]], piece.places[differ[0]]
                if bool(((one == _ZERO) | (two == _ZERO)).all()):
                    places = list(piece.places)
                    places[differ[0]] = torch.where(one == _ZERO, two, one)
                    found[at] = Piece(piece.leaf, tuple(places), piece.factor)
                    break
        else:
            found.append(piece)
    return tuple(found)


def _reshaped(places: tuple[Tensor, ...], shape: Sequence[int]) -> tuple[Tensor, ...] | None:
    left, found = [one for one in places if len(one) > 1][::-1], list[Tensor]()
    start = sum(int(one[0]) for one in places if len(one) == 1)
    for size in shape:
        axis = torch.zeros(1, dtype=torch.int64)
        while len(axis) < size:
            if not left:
                return None
            one = left.pop()
            wanted = size // len(axis)
            if wanted % len(one) == 0:
                axis = _outer(axis, one)
            elif len(one) % wanted == 0:
                parts = _split(one, wanted)
                if parts is None:
                    return None
                axis = _outer(axis, parts[0])
                left.append(parts[1])
            else:
                return None
        found.append(axis)
    if left:
        return None
    if start > 0:
        found = [torch.where(found[0] == _ZERO, _ZERO, found[0] + start), *found[1:]]
    elif start < 0:
        found = [torch.full_like(found[0], _ZERO), *found[1:]]
    return tuple(found)


def _outer(one: Tensor, other: Tensor) -> Tensor:
    found = one.unsqueeze(-1) + other
    is_zero = (one == _ZERO).unsqueeze(-1) | (other == _ZERO)
    return torch.where(is_zero, _ZERO, found).reshape(-1)


def _split(places: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """An axis as two, where places are sums."""
    rows = places.view(size, -1)
    if bool((rows == _ZERO).any()):
        zero_rows, zero_columns = (rows == _ZERO).all(1), (rows == _ZERO).all(0)
        if not torch.equal(rows == _ZERO, zero_rows.unsqueeze(1) | zero_columns):
            return None
        if bool(zero_rows.all()):
            return torch.full((size,), _ZERO), torch.full((rows.shape[1],), _ZERO)
        row = int((~zero_rows).nonzero()[0])
        column = int((~zero_columns).nonzero()[0])
    else:
        zero_rows = torch.zeros(size, dtype=torch.bool)
        zero_columns = torch.zeros(rows.shape[1], dtype=torch.bool)
        row = column = 0
    least = rows[row, column]
    outer, inner = rows[:, column], rows[row] - least
    fits = (outer.unsqueeze(1) + inner == rows) | zero_rows.unsqueeze(1) | zero_columns
    if not bool(fits.all()) or bool((inner < 0)[~zero_columns].any()):
        return None
    return torch.where(zero_rows, _ZERO, outer), torch.where(zero_columns, _ZERO, inner)
