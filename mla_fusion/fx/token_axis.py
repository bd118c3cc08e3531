"""One axis of tokens: where it stands in each node, and the rules by which it passes each kind of
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import sympy
from torch.fx import Node

from mla_fusion.fx import contraction
from mla_fusion.fx.kinds import (
    argument,
    called,
    diagonal_axes,
    filled_with,
    is_cast,
    is_getitem,
    is_reshape,
    named_axes,
    word,
)
from mla_fusion.fx.sizes import expression, has_symbols, is_size, sizes_of
from mla_fusion.fx.walk import input_of, repeats, upward
from mla_fusion.operators.forms import drops, join_of, order_of
from mla_fusion.operators.known import (
    ELEMENTWISE,
    ELEMENTWISE_SCALING,
    EXPANDS,
    SELECTIONS,
    rule_of,
    rules,
)

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


class TokenAxis:
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
        shape = sizes_of(node)
        lead = shape if has_symbols(shape[-1:]) else shape[:-1]  # positions are no rows
        found = [axis for axis, size in enumerate(lead) if self._is_ours(size)]
        if found:
            self._states[node] = Place(found[~self._behind]) if len(found) > self._behind else SAME
        else:
            self._states[node] = self._merged(lead)

    def start_again(self, node: Node, is_broken: bool) -> None:
        state = self._states.get(node)
        if state is SAME or (is_broken and isinstance(state, Broken)):
            self._states.pop(node, None)
            self.start_outside(node)

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
        if filled_with(node) is not None or is_size(node):
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
            sizes = [self.meaning(sizes_of(node.args[0])[at.axis]) for at in first.places]
            if equal(*sizes):
                return Place(len(sizes_of(node)) - 1, one.inner)
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
        rank = len(sizes_of(node))
        found: Place | None = None
        for operand in operands:
            state = self._states.get(operand)
            if isinstance(state, Place):
                here = replace(state, axis=state.axis + rank - len(sizes_of(operand)))
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
                    node, operand, replace(found, axis=found.axis - rank + len(sizes_of(operand)))
                )
        return found

    def _check_same(self, node: Node, operand: Node, place: Place) -> None:
        """A value without tokens must be one for all of them."""
        if place.axis < 0 or is_one(sizes_of(operand)[place.axis]) or is_uniform(operand):
            return
        if self._is_spread(operand, place):
            return
        raise Break(
            f"{operand.name} has a value of its own for each token at {node.name} ({node.target})"
        )

    def _is_spread(self, node: Node, place: Place) -> bool:
        """Was the axis made by an expand of one that is 1 long?"""
        for step, source in pairwise(upward(node, repeats)):
            before, after = sizes_of(source), sizes_of(step)
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

    def _written_rows(self, node: Node) -> Place:
        """npu_kv_rmsnorm_rope_cache: rows [B, 1, S, ..] of the latents and of both tables."""
        return self._elementwise(node, [argument(node, name) for name in ("kv", "cos", "sin")])

    def _rule(self, node: Node) -> State:
        if is_getitem(node):
            state = self._states.get(node.args[0])  # type: ignore[arg-type]
            return state
        rule = rule_of(node, "token", RULES)
        if rule is not None:
            return rule(self, node)
        if is_reshape(node):
            return self._viewed(node)
        if word(node) == "view":  # memory read as another dtype, of another width maybe
            return self._of_pairs(node)
        order = order_of(node)
        if order is not None:
            place = self._place(node.args[0])
            return replace(place, axis=order.index(place.axis))
        if word(node) in SELECTIONS:
            return self._taken(node)
        if word(node) in ELEMENTWISE or is_cast(node):
            return self._elementwise(node, node.all_input_nodes)
        product = contraction.read(node)
        if product is not None:
            return self._contracted(node, product)
        raise Break(f"{node.name} ({called(node)}) is not known to keep the tokens apart")

    def _viewed(self, node: Node) -> Place:
        source = node.args[0]
        before, after = sizes_of(source), sizes_of(node)
        place = self._reshaped(self._place(source), before, after)
        if place is not None:
            return place
        raise Break(
            f"{node.name} ({node.target}) takes {list(before)} for {list(after)}, across tokens"
        )

    def _expanded(self, node: Node) -> State:
        source, after = node.args[0], sizes_of(node)
        state = self._states.get(source)  # type: ignore[arg-type]
        if isinstance(state, Place):
            return replace(state, axis=state.axis + len(after) - len(sizes_of(source)))
        return SAME

    def _quantised(self, node: Node) -> Place:
        """Values, and scales of each row's own: of a whole row, or of blocks along an ``axis``."""
        place, rank = self._place(node.args[0]), len(sizes_of(node))
        per_row = (
            argument(node, "quant_mode", "pertoken") == "pertoken"
            and argument(node, "group_index") is None
        )
        if place.axis == int(argument(node, "axis", -1)) % rank or not per_row:
            raise Break(f"{node.name} ({node.target}) has one scale for many tokens")
        return place

    def _taken(self, node: Node) -> Place:
        """Of slices, splits and selections: along another axis, or all of it."""
        place, before = self._place(node.args[0]), sizes_of(node.args[0])
        axis, selects = int(argument(node, "dim", 0)) % len(before), drops(word(node))
        if axis == place.axis and (selects or not self._keeps_all(node, before[axis])):
            raise Break(f"{node.name} ({node.target}) takes some of the tokens")
        return replace(place, axis=place.axis - (selects and axis < place.axis))

    def _keeps_all(self, node: Node, size: Size) -> bool:
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            return len(value) == 1
        axis = int(argument(node, "dim", 0))
        return equal(self.meaning(value.shape[axis]), self.meaning(size)) and argument(
            node, "step", 1
        ) in (1, None)

    def _diagonal(self, node: Node) -> Place:
        place, axes = self._place(node.args[0]), diagonal_axes(node)
        if axes is None or place.axis in axes:
            raise Break(f"{node.name} ({node.target}) takes some of the tokens")
        return replace(place, axis=place.axis - sum(axis < place.axis for axis in axes))

    @staticmethod
    def _along(node: Node) -> list[int]:
        return named_axes(node, len(sizes_of(node.args[0])))

    def _reduced(self, node: Node) -> Place:
        place, axes = self._place(node.args[0]), self._along(node)
        if place.axis in axes:
            raise Break(f"{node.name} ({node.target}) reduces along the tokens")
        kept = bool(argument(node, "keepdim", False))
        return (
            place
            if kept
            else replace(place, axis=place.axis - sum(axis < place.axis for axis in axes))
        )

    def _within_rows(self, node: Node) -> Place:
        """Of softmax, cumsum, flip and the like: along other axes, the shape stays. Windows add
        one behind all.
        """
        place = self._place(node.args[0])
        if place.axis in self._along(node):
            raise Break(f"{node.name} ({node.target}) goes along the tokens")
        return place

    def _normed(self, node: Node) -> Place:
        """Norms of the last axes: as many as the weight has, or as their sizes are given."""
        place, rank = self._place(node.args[0]), len(sizes_of(node.args[0]))
        shape = argument(node, "normalized_shape")
        weight = argument(node, "weight") or argument(node, "gamma")
        last = (
            len(shape)
            if shape is not None
            else max(1, len(sizes_of(weight)) if isinstance(weight, Node) else 1)
        )
        if place.axis >= rank - last:
            raise Break(f"{node.name} ({node.target}) is a norm along the tokens")
        for operand in node.all_input_nodes[1:]:
            state = self._states.get(operand)
            if isinstance(state, Place) and state.axis != place.axis:
                raise Break(f"{node.name} ({node.target}) meets tokens at two axes")
        return place

    def _joined(self, node: Node) -> Place:
        axis, parts = join_of(node, word(node)) or (0, ())
        stacks = word(node) == "stack"
        full = [part for part in parts if isinstance(part, Node) and not is_empty(part)]
        places = {state for part in full if isinstance(state := self._states.get(part), Place)}
        if len(places) != 1:
            raise Break(f"{node.name} ({node.target}) joins tokens at several axes")
        place = places.pop()
        if not stacks and axis == place.axis and len(full) > 1:
            raise Break(f"{node.name} ({node.target}) joins tokens one after the other")
        for part in full:
            if not isinstance(self._states.get(part), Place):
                self._check_same(node, part, place)
        return replace(place, axis=place.axis + (stacks and axis <= place.axis))

    def _repeated(self, node: Node) -> Place:
        place, before, after = self._place(node.args[0]), sizes_of(node.args[0]), sizes_of(node)
        axis = place.axis + len(after) - len(before)
        if not equal(self.meaning(after[axis]), self.meaning(before[place.axis])):
            raise Break(f"{node.name} ({node.target}) repeats tokens")
        return replace(place, axis=axis)

    def _padded(self, node: Node) -> Place:
        place, before, after = self._place(node.args[0]), sizes_of(node.args[0]), sizes_of(node)
        pads = argument(node, "pad")
        at = 2 * (len(before) - 1 - place.axis)
        if any(pad != 0 for pad in pads[at : at + 2]) or len(before) != len(after):
            raise Break(f"{node.name} ({node.target}) adds tokens")
        return place

    def _of_pairs(self, node: Node) -> Place:
        """view_as_complex, view_as_real, view.dtype: what happens on the last axis."""
        place, last = self._place(node.args[0]), len(sizes_of(node.args[0])) - 1
        if place.axis >= len(sizes_of(node)) or (word(node) == "view" and place.axis == last):
            raise Break(f"{node.name} ({node.target}) pairs tokens")
        return place

    def _indexed(self, node: Node) -> Place:
        """One axis, another than the tokens', by a row of literals."""
        place, indices = self._place(node.args[0]), node.args[1]
        given = [axis for axis, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
        flat = [len(sizes_of(indices[axis])) for axis in given]  # type: ignore[index]
        if flat != [1] or given[0] == place.axis:
            raise Break(f"{node.name} ({node.target}) takes tokens by an index")
        return place

    def _index_selected(self, node: Node) -> Place:
        place = self._place(node.args[0])
        if int(argument(node, "dim", 0)) % len(sizes_of(node)) == place.axis:
            raise Break(f"{node.name} ({node.target}) takes tokens by an index")
        return place

    def _written(self, node: Node) -> Place:
        """slice_scatter and select_scatter along another axis; copy."""
        base, source = node.args[:2]
        assert isinstance(base, Node) and isinstance(source, Node)
        if word(node) == "copy":
            return self._elementwise(
                node, [source, *([base] if isinstance(self._states.get(base), Place) else [])]
            )
        rank = len(sizes_of(node))
        axis = int(argument(node, "dim", 0)) % rank
        selects = word(node) == "select_scatter"
        found = set()
        for operand, shift in ((base, 0), (source, int(selects))):
            state = self._states.get(operand)
            if isinstance(state, Place):
                found.add(
                    replace(state, axis=state.axis + (shift if shift and axis <= state.axis else 0))
                )
        if len(found) != 1:
            raise Break(f"{node.name} ({node.target}) meets tokens at several axes")
        place = found.pop()
        if axis == place.axis and not (not selects and self._keeps_slice(node, base)):
            raise Break(f"{node.name} ({node.target}) overwrites some of the tokens")
        for operand in (base, source):
            if not isinstance(self._states.get(operand), Place) and not is_uniform(operand):
                raise Break(
                    f"{operand.name} has a value of its own for each token at {node.name} "
                    f"({node.target})"
                )
        return place

    def _keeps_slice(self, node: Node, base: Node) -> bool:
        axis, source = int(argument(node, "dim", 0)), node.args[1]
        return equal(self.meaning(sizes_of(source)[axis]), self.meaning(sizes_of(base)[axis]))

    def _contracted(self, node: Node, product: contraction.Contraction) -> State:
        found: dict[int, Place] = {}  # by label
        sides = ((product.left, product.left_labels), (product.right, product.right_labels))
        for operand, labels in sides:
            state = self._states.get(operand)
            if isinstance(state, Place):
                label = labels[state.axis]
                if label not in product.out_labels:
                    raise Break(f"{node.name} ({node.target}) sums over the tokens")
                found[label] = Place(product.out_labels.index(label), state.inner)
        if len(found) != 1:
            reason = f"{node.name} ({node.target}) meets tokens at several axes"
            if len(found) != 2 or product.bias is not None or product.scales is not None:
                raise Break(reason)
            one, other = found.values()
            return Crossed(node, reason, (one, other))
        ((label, place),) = found.items()
        for operand, labels in sides:
            if label in labels and not isinstance(self._states.get(operand), Place):
                self._check_same(node, operand, replace(place, axis=labels.index(label)))
        return place


# -- sizes as expressions


def count_of(sizes: Shape, meaning: Callable[[Size], Any] = expression) -> Any:
    if not has_symbols(sizes):
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


def is_empty(node: Node) -> bool:
    return any(isinstance(size, int) and size == 0 for size in sizes_of(node))


def is_uniform(node: Node) -> bool:
    """Is every element the same number: a fill, views of one, or multiples?"""
    *views, base = upward(
        node, lambda step: input_of(step) if word(step) == "slice" else repeats(step)
    )
    if filled_with(base) is not None or word(base) in _FILLS:
        return True
    if word(base) in ELEMENTWISE_SCALING and (operands := base.all_input_nodes):
        return all(is_size(operand) or is_uniform(operand) for operand in operands)
    return any(
        all(is_one(size) for size in sizes_of(source))
        for source in (*views[1:], *([base] if views else ()))
    )


_FILLS = frozenset("zeros ones full scalar_tensor new_full".split())


Rule = Callable[[TokenAxis, Node], State]
# By the names that rows of the operator table give.
RULES: dict[str, Rule] = rules(
    TokenAxis._diagonal,
    TokenAxis._expanded,
    TokenAxis._index_selected,
    TokenAxis._indexed,
    TokenAxis._joined,
    TokenAxis._normed,
    TokenAxis._of_pairs,
    TokenAxis._padded,
    TokenAxis._quantised,
    TokenAxis._reduced,
    TokenAxis._repeated,
    TokenAxis._written_rows,
    TokenAxis._within_rows,
    TokenAxis._written,
)
