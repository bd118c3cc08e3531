"""The token axis, proved: in which axis of each node the tokens stand, as long as every step keeps
them apart.

A graph of 4,096 tokens, or of a symbolic number, is probed with five. What five show holds for all
where the token axis is a batch axis of every step: no step reduces, slices, joins or rolls along
it, and no literal has a value of its own for each token. Where it stands is carried from step to
step; a step for which no rule says where it goes breaks the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
from torch.fx import Node

from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import expression, sizes_of
from mla_fusion.fx.token_axis import (
    Broken,
    Crossed,
    Place,
    Shape,
    TokenAxis,
    count_of,
    divided,
    divides,
)


class Tokens:
    """The token axes of a view that are probed shorter than they are: symbolic ones, and one that
    is shrunk.

    Empty where every token is probed; then nothing needs a proof.
    """

    def __init__(self, shrink: Shrink | None, meaning: Callable[[Any], Any] = expression) -> None:
        """``meaning``: the expression of a size (``Binding.meaning``: equal sizes have one)."""
        self._shrink, self._meaning = shrink, meaning
        self._axes: dict[Any, TokenAxis] = {}
        self._of_product: dict[Node, frozenset[Any]] = {}

    @classmethod
    def of(
        cls,
        tensors: Sequence[Node],
        steps: Sequence[Node],
        meaning: Callable[[Any], Any] = expression,
    ) -> Tokens:
        """Every symbolic axis of the tensors, followed through the steps that are made of these."""
        found = cls(None, meaning)
        for tensor in tensors:
            found.start(tensor, sizes_of(tensor), range(len(sizes_of(tensor))))
        found.start_outside(tensors)
        found.follow(steps)
        return found

    def __bool__(self) -> bool:
        return bool(self._axes)

    def start(self, product: Node, lead: Shape, axes: Sequence[int]) -> None:
        """``lead``: the token axes before any were merged; ``axes``: where they stand in the
        product, in order.
        """
        shape, sizes, probed = sizes_of(product), [self._meaning(size) for size in lead], []
        for at, size in enumerate(sizes):
            if not (isinstance(size, sympy.Expr) or self._is_shrunk(lead, at)):
                continue
            after = count_of(lead[at + 1 :], self._meaning)
            key = size, sizes[at + 1 :].count(size)  # batch and length may be of one symbol
            probed.append(key)
            new = TokenAxis(lead[at], after, self._meaning, behind=key[1])
            axis = self._axes.setdefault(key, new)
            for place, standing in enumerate(axes):
                inner = divided(
                    after, count_of([shape[other] for other in axes[place + 1 :]], self._meaning)
                )
                if inner is not None and divides(axis.size * inner, self._meaning(shape[standing])):
                    axis.start(product, Place(standing, inner))
                    break
        if all(size in dict(probed) or not self._shrinks(size) for size in sizes):
            self._of_product[product] = frozenset(probed)

    def among(self, products: Iterable[Node]) -> Tokens:
        """Those of these products alone: a graph may have several kinds (rows that decode, rows
        that are prefilled).

        All of them for a product that is probed shorter than it is along an axis that nothing
        follows.
        """
        own = [self._of_product.get(product, self._axes.keys()) for product in products]
        found = Tokens(self._shrink, self._meaning)
        found._axes = {
            key: axis for key, axis in self._axes.items() if any(key in keys for keys in own)
        }
        return found

    def _is_shrunk(self, lead: Shape, at: int) -> bool:
        full = self._shrink.full if self._shrink is not None else 0
        return bool(full) and lead[at] == full and full not in lead[at + 1 :]

    def _shrinks(self, size: Any) -> bool:
        return self._shrink is not None and isinstance(size, int) and size % self._shrink.full == 0

    def start_outside(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            for axis in self._axes.values():
                axis.start_outside(node)

    def start_again(self, node: Node, is_broken: bool) -> None:
        """As of a tensor from outside, where no step says where an axis stands; or (``is_broken``)
        one does not keep the tokens apart.
        """
        for axis in self._axes.values():
            axis.start_again(node, is_broken)

    def follow(self, nodes: Sequence[Node]) -> None:
        for axis in self._axes.values():
            axis.follow(nodes)

    def copy(self, move: Mapping[Node, Node]) -> None:
        for axis in self._axes.values():
            axis.copy(move)
        self._of_product |= {
            move[node]: keys for node, keys in self._of_product.items() if node in move
        }

    def broken(self, node: Node) -> Broken | None:
        """The step above the node, or at it, that does not keep the tokens apart; along an axis
        whose pairs it has not kept apart either, if there is one.
        """
        states = [axis.state(node) for axis in self._axes.values()]
        broken = [state for state in states if isinstance(state, Broken)]
        return min(broken, key=lambda state: isinstance(state, Crossed), default=None)

    def summary(self) -> str:
        """Which axes are tokens', and through how many nodes they were followed; "" where none had
        to be.
        """
        axes = (
            f"axis of {axis.size}: followed through {axis.followed} nodes"
            for axis in self._axes.values()
        )
        return "; ".join(axes)

    def knows(self, node: Node) -> bool:
        """Is it known of every token axis where it stands in the node?"""
        return all(isinstance(axis.state(node), Place) for axis in self._axes.values())
