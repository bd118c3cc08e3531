"""One axis of tokens: where it stands in each node, and what the rules of the operators ask of
it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch.fx import Node

from mla_fusion.fx.kinds import diagonal_axes, filled_with, is_reshape, word
from mla_fusion.fx.sizes import expression, is_symbolic
from mla_fusion.fx.walk import input_of, repeats, upward
from mla_fusion.operators.known import ELEMENTWISE_SCALING, EXPANDS

Size = Any  # int or SymInt
Shape = Sequence[Size]


@dataclass(frozen=True)
class Place:
    """The tokens are in ``axis``, which may also hold ``inner`` other elements for each token (as
    rows of [T * N]).
    """

    axis: int
    inner: Any = 1  # int, or a sympy expression


@dataclass(frozen=True)
class Broken:
    """A step that does not keep the tokens apart."""

    node: Node
    reason: str


@dataclass(frozen=True)
class Crossed(Broken):
    """A value for each pair of tokens (``v @ v.T``): none of a token's own, but on its diagonal.

    places  where the one tokens are, and where the others
    """

    places: tuple[Place, Place]


SAME = None  # of a value that is the same for every token, or the same in all of its elements
State = Place | Broken | None


class Break(Exception):
    pass


class TokenAxis(ABC):
    """One axis of tokens (all of them, or the sequences, or the positions of each) through the
    nodes of a view.
    """

    def __init__(
        self,
        size: Size,
        inner: Any = 1,
        meaning: Callable[[Size], Any] = expression,
        behind: int = 0,
    ) -> None:
        """
        inner    how many tokens stand between two of this axis where all token axes are one
        meaning  the expression of a size, equal for sizes that are equal whenever the graph runs
        behind   how many token axes of the same size stand behind this one
        """
        self.meaning, self._behind = meaning, behind
        self.size, self.inner = meaning(size), inner
        self._states: dict[Node, State] = {}

    def start(self, node: Node, place: Place) -> None:
        self._states.setdefault(node, place)

    def start_outside(self, node: Node) -> None:
        """A tensor from outside with rows: its last axis but one that is as long as the tokens are
        many, if any.

        Where it has fewer axes of that size than the tokens have, they are the last of the tokens'
        (a row for each position). A wrong guess breaks the proof, and proves nothing.
        """
        if node in self._states:
            return
        shape = shape_of(node)
        lead = shape[:-1] if len(shape) > 1 or not any(map(is_symbolic, shape)) else shape
        found = [axis for axis, size in enumerate(lead) if self._is_ours(size)]
        if found:
            self._states[node] = Place(found[~self._behind]) if len(found) > self._behind else SAME
        else:
            self._states[node] = self._merged(lead)

    def _merged(self, lead: Shape) -> State:
        """Tokens of all sequences in one axis."""
        for inner in dict.fromkeys((self.inner, 1)):
            for axis, size in enumerate(lead):
                if not is_one(size) and divides(self.size * inner, self.meaning(size)):
                    return Place(axis, inner)
        return SAME

    def _is_ours(self, size: Size) -> bool:
        return equal(self.meaning(size), self.size)

    def state(self, node: Node) -> State:
        return self._states.get(node)

    @property
    def followed(self) -> int:
        """In how many nodes it is known where the tokens stand."""
        return sum(isinstance(state, Place) for state in self._states.values())

    def follow(self, nodes: Iterable[Node]) -> None:
        """Carry the axis through nodes in graph order; what comes in from elsewhere has been
        started.
        """
        for node in nodes:
            if node not in self._states:
                self._states[node] = self._after(node)

    def copy(self, move: Mapping[Node, Node]) -> None:
        """What holds of the nodes on the left holds of those on the right (an equal layer)."""
        for node, other in move.items():
            if node in self._states:
                self._states.setdefault(other, self._states[node])

    def _after(self, node: Node) -> State:
        if filled_with(node) is not None or is_symbolic(node.meta.get("val")):
            return SAME  # a size is one for all tokens
        states = [self._states.get(arg) for arg in node.all_input_nodes]
        for state in states:
            if isinstance(state, Broken) and not isinstance(state, Crossed):
                return state
        if any(isinstance(state, Crossed) for state in states):
            return self._after_pairs(node)
        if not any(isinstance(state, Place) for state in states):
            return SAME
        try:
            return self._rule(node)
        except Break as broken:
            return Broken(node, str(broken))

    def _after_pairs(self, node: Node) -> State:
        """Of a step on values of pairs of tokens: on their diagonal the two tokens are one; any
        other step keeps the pairs apart where it keeps either tokens apart for each of the others.
        """
        crossed = {
            arg: state
            for arg in node.all_input_nodes
            if isinstance(state := self._states.get(arg), Crossed)
        }
        first = next(iter(crossed.values()))
        one, other = first.places
        if diagonal_axes(node) == {one.axis, other.axis} and equal(one.inner, other.inner):
            sizes = [self.meaning(shape_of(node.args[0])[at.axis]) for at in first.places]
            if equal(*sizes):
                return Place(len(shape_of(node)) - 1, one.inner)
        found: list[State] = []
        try:
            for side in (0, 1):
                self._states.update({arg: state.places[side] for arg, state in crossed.items()})
                found.append(self._rule(node))
        except Break:
            found = [SAME, SAME]
        finally:
            self._states.update(crossed)
        left, right = found
        if isinstance(left, Place) and isinstance(right, Place) and left != right:
            return replace(first, places=(left, right))
        return Broken(first.node, first.reason)

    @abstractmethod
    def _rule(self, node: Node) -> State:
        """Where the node's own rule says that the tokens are."""

    # -- operands

    def _place(self, value: Any) -> Place:
        state = self._states.get(value) if isinstance(value, Node) else None
        if not isinstance(state, Place):
            raise Break(f"{value} has no axis of tokens")
        return state

    def _elementwise(self, node: Node, operands: Sequence[Node]) -> Place:
        """Operands are aligned at their last axes; all that have the tokens have them in one
        axis.
        """
        rank = len(shape_of(node))
        found: Place | None = None
        for operand in operands:
            state = self._states.get(operand)
            if isinstance(state, Place):
                here = replace(state, axis=state.axis + rank - len(shape_of(operand)))
                if found is not None and found != here:
                    raise Break(
                        f"{node.name} ({node.target}) meets tokens at axes {found.axis} "
                        f"and {here.axis}"
                    )
                found = here
        if found is None:
            raise Break(f"{node.name} has no axis of tokens")
        for operand in operands:
            if not isinstance(self._states.get(operand), Place):
                self._check_same(
                    node, operand, replace(found, axis=found.axis - rank + len(shape_of(operand)))
                )
        return found

    def _check_same(self, node: Node, operand: Node, place: Place) -> None:
        """A value without tokens must be one for all of them."""
        if place.axis < 0 or is_one(shape_of(operand)[place.axis]) or is_uniform(operand):
            return
        if self._is_spread(operand, place):
            return
        raise Break(
            f"{operand.name} has a value of its own for each token at {node.name} ({node.target})"
        )

    def _is_spread(self, node: Node, place: Place) -> bool:
        """Was the axis made by an expand of one that is 1 long?"""
        for step, source in pairwise(upward(node, repeats)):
            before, after = shape_of(source), shape_of(step)
            if word(step) in EXPANDS:
                axis = place.axis - len(after) + len(before)
                if axis < 0 or (is_one(before[axis]) and not is_one(after[place.axis])):
                    return True
                place = replace(place, axis=axis)
            elif is_reshape(step):
                found = self._reshaped(place, after, before)
                if found is None:
                    return False
                place = found
        return False

    def _reshaped(self, place: Place, before: Shape, after: Shape) -> Place | None:
        """Where the tokens stand once a value of one shape has another."""
        # elements from one token to the next
        step = place.inner * count_of(before[place.axis + 1 :], self.meaning)
        for axis, size in enumerate(after):
            inner = divided(step, count_of(after[axis + 1 :], self.meaning))
            if (
                inner is not None
                and not is_one(size)
                and divides(self.size * inner, self.meaning(size))
            ):
                return Place(axis, inner)
        return None

    # -- rules


# -- sizes as expressions


def count_of(sizes: Shape, meaning: Callable[[Size], Any] = expression) -> Any:
    if not any(map(is_symbolic, sizes)):
        return math.prod(sizes)
    return sympy.prod([meaning(size) for size in sizes])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or bool(sympy.expand(a - b) == 0)


def divided(a: Any, b: Any) -> Any | None:
    """``a / b`` where that is a whole number whatever the symbols are."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def divides(a: Any, b: Any) -> bool:
    return divided(b, a) is not None


def is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def shape_of(node: Any) -> Shape:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor):
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def is_empty(node: Node) -> bool:
    return any(isinstance(size, int) and size == 0 for size in shape_of(node))


def is_uniform(node: Node) -> bool:
    """Is every element the same number: a fill, views of one, or multiples?"""
    *views, base = upward(
        node, lambda step: input_of(step) if word(step) == "slice" else repeats(step)
    )
    if filled_with(base) is not None or word(base) in _FILLS:
        return True
    if word(base) in ELEMENTWISE_SCALING and (operands := base.all_input_nodes):
        return all(
            is_symbolic(operand.meta.get("val")) or is_uniform(operand) for operand in operands
        )
    return any(
        all(is_one(size) for size in shape_of(source))
        for source in (*views[1:], *([base] if views else ()))
    )


_FILLS = frozenset("zeros ones full scalar_tensor new_full".split())
