"""Weights at a random point of the field, without a tensor of their elements.

``exact/evaluate.py`` uses them for the weights of products. An element is a sum of ``RANK`` powers
of random numbers, and its exponent is its place. A product with a 7168 x 24576 matrix is six dot
products and six outer products. It is linear in the weight. No polynomial of a degree below
``RANK`` vanishes on all such weights.

Moves change the places along each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from mla_fusion.exact import field
from mla_fusion.graph.form import with_axis
from mla_fusion.graph.layout import Mixed

RANK = 6
_ZERO = -1 << 48  # the place of an element 0: sums with it are below 0, too

Places = tuple[Tensor, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a weight: one leaf, or the element-wise product of several leaves.

    The element of a leaf is the one at the sum of its places along the axes, or 0 if that is below
    0.

    leaves  the hashes of the leaves
    places  by leaf, the places along each axis
    factor  multiplies all elements
    """

    leaves: tuple[int, ...]
    places: tuple[Places, ...]
    factor: int = 1

    def factors(self, p: int) -> list[Tensor]:
        """By axis, a tensor [ranks, n].

        The product over the axes, summed over the ranks, is the element.
        """
        factors = [torch.ones(1, 1, dtype=torch.int64)] * len(self.places[0])
        factors[0] = factors[0] * (self.factor % p)
        for leaf, places in zip(self.leaves, self.places, strict=True):
            pairs = enumerate(zip(factors, places, strict=True))
            factors = [
                (factor.unsqueeze(1) * _axis_powers(leaf, axis, axis_places, p) % p).flatten(0, 1)
                for axis, (factor, axis_places) in pairs
            ]
        return factors


def _axis_powers(leaf: int, axis: int, places: Tensor, p: int) -> Tensor:
    """[RANK, n]: the powers of a leaf's random numbers along one axis."""
    bases, fronts = (
        torch.tensor([[field.word(leaf, what, rank) % p] for rank in range(RANK)])
        for what in ("base", "front")
    )
    rows = field.powers(bases, places.clamp_min(0), p)
    rows = rows * fronts % p if axis == 0 else rows
    return torch.where(places < 0, 0, rows)


@dataclass(frozen=True)
class Weight:
    """A sum of pieces of one shape."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.pieces[0].places[0]))

    @classmethod
    def of_leaf(cls, leaf: int, shape: Sequence[int]) -> Weight:
        """A weight with random elements."""
        places, stride = list[Tensor](), prod(shape)
        for size in shape:
            stride //= max(size, 1)
            places.append(torch.arange(size) * stride)
        return cls((Piece((leaf,), (tuple(places),)),))

    def scaled(self, factor: int) -> Weight:
        """All elements times a factor."""
        pieces = (replace(piece, factor=piece.factor * factor) for piece in self.pieces)
        return Weight(tuple(pieces))

    def times(self, other: Weight) -> Weight:
        """The product with a weight of the same shape, element by element."""
        return Weight(
            tuple(
                Piece(
                    piece.leaves + other_piece.leaves,
                    piece.places + other_piece.places,
                    piece.factor * other_piece.factor,
                )
                for piece in self.pieces
                for other_piece in other.pieces
            )
        )

    # moves have the names that they have on a Tensor

    def permute(self, order: Sequence[int]) -> Weight:
        """The axes in another order."""
        return self._map_places(lambda places: tuple(places[axis] for axis in order))

    def index_select(self, axis: int, index: Tensor) -> Weight:
        """The elements of an axis at an index."""
        return self._map_places(lambda places: with_axis(places, axis, places[axis][index]))

    def expand(self, shape: Sequence[int]) -> Weight:
        """The weight broadcast to a shape."""
        lead = len(shape) - len(self.shape)

        def move(places: Places) -> Places:
            new_axes = [torch.zeros(1, dtype=torch.int64)] * lead
            return tuple(
                axis_places.expand(size)
                for axis_places, size in zip((*new_axes, *places), shape, strict=True)
            )

        return self._map_places(move)

    def _map_places(self, move: Callable[[Places], Places]) -> Weight:
        """The weight after a move of the places of every leaf."""
        pieces = (replace(piece, places=tuple(map(move, piece.places))) for piece in self.pieces)
        return Weight(tuple(pieces))

    def reshape(self, shape: Sequence[int]) -> Weight:
        """The weight in another shape. Raises Mixed if the places along a new axis are not sums."""
        return self._map_places(lambda places: _reshape_places(places, shape))

    @classmethod
    def joined(cls, weights: Sequence[Weight], axis: int) -> Weight:
        """Weights side by side along an axis."""
        pieces, sizes = list[Piece](), [weight.shape[axis] for weight in weights]
        for weight_number, weight in enumerate(weights):
            ends = sum(sizes[:weight_number]), sum(sizes[weight_number + 1 :])

            def padded(places: Places, ends: tuple[int, int] = ends) -> Places:
                axis_places = torch.nn.functional.pad(places[axis], ends, value=_ZERO)
                return with_axis(places, axis, axis_places)

            pieces += weight._map_places(padded).pieces
        return cls(tuple(pieces))

    def dense(self, p: int) -> Tensor:
        """The elements as a tensor."""
        elements = torch.zeros(self.shape, dtype=torch.int64)
        for piece in self.pieces:
            factors = piece.factors(p)
            for rank in range(len(factors[0])):
                part = torch.ones((), dtype=torch.int64)
                for axis_factors in factors:
                    part = part.unsqueeze(-1) * axis_factors[rank] % p
                elements += part
        return elements % p

    def product(self, left: Tensor, p: int) -> Tensor:
        """``left`` [.., t, k] times this weight [k, m] or [.., k, m]."""
        total = torch.zeros((), dtype=torch.int64)
        for piece in self.pieces:
            *lead, rows, columns = piece.factors(p)
            inner = field.product(left, rows.T, p)
            for axis, axis_factors in enumerate(lead):
                broadcast_shape = [1] * (inner.dim() - 1)
                broadcast_shape[axis] = -1
                inner = inner * axis_factors.T.reshape(*broadcast_shape, len(rows)) % p
            total = total + field.product(inner, columns, p)
        return total % p


def _reshape_places(places: Places, shape: Sequence[int]) -> Places:
    """The places along the axes of another shape. Raises Mixed if they are not sums along the new
    axes, or if there are no axes.
    """
    if not shape:
        raise Mixed(None)
    old_axes, axes = [old_axis for old_axis in places if len(old_axis) > 1][::-1], list[Tensor]()
    start = sum(int(old_axis[0]) for old_axis in places if len(old_axis) == 1)
    for size in shape:
        axis = torch.zeros(1, dtype=torch.int64)
        while len(axis) < size:
            old_axis, missing_size = old_axes.pop(), size // len(axis)
            if missing_size % len(old_axis):
                old_axis, inner = _split_axis(old_axis, missing_size)
                old_axes.append(inner)
            axis = (axis.unsqueeze(1) + old_axis).flatten().clamp_min(_ZERO)
        axes.append(axis)
    return axes[0] + start, *axes[1:]


def _split_axis(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The places along one axis as two axes, the first of ``size``. Raises Mixed if they are not
    sums.
    """
    if len(places) % size:
        raise Mixed(None)
    rows = places.view(size, -1)
    first = int(rows.masked_fill(rows < 0, -_ZERO).argmin())
    row, column = divmod(first, rows.shape[1])
    outer, inner = rows[:, column], rows[row] - places[first]
    sums = outer.unsqueeze(1) + inner
    if not bool(((sums == rows) | (sums.maximum(rows) < 0)).all()):
        raise Mixed(None)
    return outer, inner
