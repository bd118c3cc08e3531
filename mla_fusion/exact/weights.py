"""Weights that are never listed: an element is a sum of powers of random numbers by its place.

So a product with a matrix of 7168 x 24576 is six dot products and six outer ones, and is linear in
the weight as it should be. No polynomial of a degree below ``RANK`` vanishes on such weights.
Moves change the places along each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.exact import field

RANK = 6
_ZERO = -1  # the place of an element that is 0


Places = tuple[Tensor, ...]


@dataclass(frozen=True)
class Piece:
    """What a weight has of one leaf, or of a product of several: the element of each is that at the
    sum of its places along each axis; 0 where a place is ``_ZERO``. All of it times ``factor``.
    """

    leaves: tuple[int, ...]
    places: tuple[Places, ...]
    factor: int = 1

    def moved(self, move: Callable[[Places], Places | None]) -> Piece | None:
        moved = [move(one) for one in self.places]
        if any(one is None for one in moved):
            return None
        return Piece(self.leaves, tuple(moved), self.factor)  # type: ignore[arg-type]

    def factors(self, p: int) -> list[Tensor]:
        """Of each axis [ranks, n]; the product over the axes, added up over ranks, is the
        element.
        """
        found: list[Tensor] | None = None
        for leaf, places in zip(self.leaves, self.places, strict=True):
            own = [_of_axis(leaf, axis, one, p) for axis, one in enumerate(places)]
            if found is None:
                found = [own[0] * (self.factor % p) % p, *own[1:]]
            else:
                pairs = zip(found, own, strict=True)
                found = [(a.unsqueeze(1) * b % p).flatten(0, 1) for a, b in pairs]
        assert found is not None
        return found


def _of_axis(leaf: int, axis: int, places: Tensor, p: int) -> Tensor:
    rows = []
    for rank in range(RANK):
        row = field.powers(field.word(leaf, "base", rank) % p, places.clamp_min(0), p)
        if axis == 0:
            row = row * (field.word(leaf, "front", rank) % p) % p
        rows.append(torch.where(places == _ZERO, 0, row))
    return torch.stack(rows)


@dataclass(frozen=True)
class Weight:
    """A sum of pieces of one shape."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.pieces[0].places[0]))

    @classmethod
    def of_leaf(cls, leaf: int, shape: Sequence[int]) -> Weight:
        places, stride = list[Tensor](), prod(shape)
        for size in shape:
            stride //= max(size, 1)
            places.append(torch.arange(size) * stride)
        return cls((Piece((leaf,), (tuple(places),)),))

    def scaled(self, factor: int) -> Weight:
        return Weight(
            tuple(Piece(one.leaves, one.places, one.factor * factor) for one in self.pieces)
        )

    def times(self, other: Weight) -> Weight:
        """Element by element, of one shape."""
        return Weight(
            tuple(
                Piece(
                    one.leaves + two.leaves,
                    one.places + two.places,
                    one.factor * two.factor,
                )
                for one in self.pieces
                for two in other.pieces
            )
        )

    def permuted(self, order: Sequence[int]) -> Weight:
        return self._each(lambda places: tuple(places[axis] for axis in order))

    def taken(self, axis: int, index: Tensor) -> Weight:
        return self._each(lambda places: (*places[:axis], places[axis][index], *places[axis + 1 :]))

    def expanded(self, shape: Sequence[int]) -> Weight:
        lead = len(shape) - len(self.shape)

        def move(places: Places) -> Places:
            new = [torch.zeros(1, dtype=torch.int64)] * lead
            return tuple(one.expand(size) for one, size in zip((*new, *places), shape, strict=True))

        return self._each(move)

    def _each(self, move: Callable[[Places], Places]) -> Weight:
        return Weight(tuple(one.moved(move) for one in self.pieces))  # type: ignore[misc]

    def reshaped(self, shape: Sequence[int]) -> Weight | None:
        """None where the places along a new axis are no sum."""
        pieces = [one.moved(lambda places: _reshaped(places, shape)) for one in self.pieces]
        if any(one is None for one in pieces):
            return None
        return Weight(tuple(one for one in pieces if one is not None))

    @classmethod
    def joined(cls, weights: Sequence[Weight], axis: int) -> Weight:
        pieces, sizes = list[Any](), [weight.shape[axis] for weight in weights]
        for number, weight in enumerate(weights):
            before, after = sum(sizes[:number]), sum(sizes[number + 1 :])
            for piece in weight.pieces:

                def padded(places: Places, before: int = before, after: int = after) -> Places:
                    one = torch.nn.functional.pad(places[axis], (before, after), value=_ZERO)
                    return (*places[:axis], one, *places[axis + 1 :])

                pieces.append(piece.moved(padded))
        return cls(_united(pieces))

    def dense(self, p: int) -> Tensor:
        found = torch.zeros(self.shape, dtype=torch.int64)
        for piece in self.pieces:
            factors = piece.factors(p)
            for rank in range(len(factors[0])):
                part = torch.ones((), dtype=torch.int64)
                for of_axis in factors:
                    part = part.unsqueeze(-1) * of_axis[rank] % p
                found += part
        return found % p

    def product(self, left: Tensor, p: int) -> Tensor:
        """``left`` [.., t, k] times this, [k, m] or [.., k, m]."""
        found = None
        for piece in self.pieces:
            *lead, rows, columns = piece.factors(p)
            for rank in range(len(rows)):
                inner = (left * rows[rank] % p).sum(-1) % p
                for axis, of_axis in enumerate(lead):
                    size = [1] * inner.dim()
                    size[axis] = -1
                    inner = inner * of_axis[rank].view(size) % p
                part = inner.unsqueeze(-1) * columns[rank] % p
                found = part if found is None else found + part
        assert found is not None
        return found % p


def _united(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces of one leaf that differ along one axis, where one is 0 or the other, as one."""
    found: list[Piece] = []
    for piece in pieces:
        for at, other in enumerate(found):
            if other.leaves == piece.leaves and other.factor == piece.factor:
                pairs = zip(other.places, piece.places, strict=True)
                places = [_together(one, two) for one, two in pairs]
                if all(one is not None for one in places):
                    found[at] = Piece(piece.leaves, tuple(places), piece.factor)  # type: ignore[arg-type]
                    break
        else:
            found.append(piece)
    return tuple(found)


def _together(one: Places, two: Places) -> Places | None:
    differ = [axis for axis in range(len(one)) if not torch.equal(one[axis], two[axis])]
    if len(differ) != 1:
        return None
    first, second = one[differ[0]], two[differ[0]]
    if not bool(((first == _ZERO) | (second == _ZERO)).all()):
        return None
    places = list(one)
    places[differ[0]] = torch.where(first == _ZERO, second, first)
    return tuple(places)


def _reshaped(places: Places, shape: Sequence[int]) -> Places | None:
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
            return torch.full((size,), _ZERO, dtype=torch.int64), torch.full(
                (rows.shape[1],), _ZERO, dtype=torch.int64
            )
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
