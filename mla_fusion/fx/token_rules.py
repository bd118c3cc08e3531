"""The rules by which the token axis passes each kind of step: a method for each, which rows of the
operator table name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from mla_fusion.fx import contraction
from mla_fusion.fx.kinds import (
    argument,
    diagonal_axes,
    is_cast,
    is_getitem,
    is_reshape,
    named_axes,
    word,
)
from mla_fusion.fx.token_axis import (
    SAME,
    Break,
    Crossed,
    Place,
    Size,
    State,
    TokenAxis,
    equal,
    is_empty,
    is_uniform,
    shape_of,
)
from mla_fusion.operators.forms import drops, join_of, order_of
from mla_fusion.operators.known import ELEMENTWISE, SELECTIONS, rule_of, rules


class RuledAxis(TokenAxis):
    """The token axis, as the table below carries it from step to step."""

    def _rule(self, node: Node) -> State:
        if is_getitem(node):
            state = self._states.get(node.args[0])  # type: ignore[arg-type]
            return state
        rule = rule_of(node, "token", RULES)
        if rule is not None:
            return rule(self, node)
        if is_reshape(node):
            return self._viewed(node)
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
        raise Break(f"{node.name} ({node.target}) is not known to keep the tokens apart")

    def _viewed(self, node: Node) -> Place:
        source = node.args[0]
        before, after = shape_of(source), shape_of(node)
        place = self._reshaped(self._place(source), before, after)
        if place is not None:
            return place
        raise Break(
            f"{node.name} ({node.target}) takes {list(before)} for {list(after)}, across tokens"
        )

    def _expanded(self, node: Node) -> State:
        source, after = node.args[0], shape_of(node)
        state = self._states.get(source)  # type: ignore[arg-type]
        if isinstance(state, Place):
            return replace(state, axis=state.axis + len(after) - len(shape_of(source)))
        return SAME

    def _quantised(self, node: Node) -> Place:
        """Values, and scales of each row's own: of a whole row, or of blocks along an ``axis``."""
        place, rank = self._place(node.args[0]), len(shape_of(node))
        per_row = (
            argument(node, "quant_mode", "pertoken") == "pertoken"
            and argument(node, "group_index") is None
        )
        if place.axis == int(argument(node, "axis", -1)) % rank or not per_row:
            raise Break(f"{node.name} ({node.target}) has one scale for many tokens")
        return place

    def _taken(self, node: Node) -> Place:
        """Of slices, splits and selections: along another axis, or all of it."""
        place, before = self._place(node.args[0]), shape_of(node.args[0])
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
    def _along(node: Node, name: str = "dim") -> list[int]:
        return named_axes(node, len(shape_of(node.args[0])), name)

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
        """Of softmax, cumsum, flip and the like: along other axes, the shape stays."""
        place = self._place(node.args[0])
        if place.axis in self._along(node, "dims" if word(node) in ("flip", "roll") else "dim"):
            raise Break(f"{node.name} ({node.target}) goes along the tokens")
        return place

    def _normed(self, node: Node) -> Place:
        """Norms of the last axes: as many as the weight has, or as their sizes are given."""
        place, rank = self._place(node.args[0]), len(shape_of(node.args[0]))
        shape = argument(node, "normalized_shape")
        weight = argument(node, "weight") or argument(node, "gamma")
        last = (
            len(shape)
            if shape is not None
            else max(1, len(shape_of(weight)) if isinstance(weight, Node) else 1)
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
        place, before, after = self._place(node.args[0]), shape_of(node.args[0]), shape_of(node)
        axis = place.axis + len(after) - len(before)
        if not equal(self.meaning(after[axis]), self.meaning(before[place.axis])):
            raise Break(f"{node.name} ({node.target}) repeats tokens")
        return replace(place, axis=axis)

    def _padded(self, node: Node) -> Place:
        place, before, after = self._place(node.args[0]), shape_of(node.args[0]), shape_of(node)
        pads = argument(node, "pad")
        at = 2 * (len(before) - 1 - place.axis)
        if any(pad != 0 for pad in pads[at : at + 2]) or len(before) != len(after):
            raise Break(f"{node.name} ({node.target}) adds tokens")
        return place

    def _of_pairs(self, node: Node) -> Place:
        """view_as_complex, view_as_real: what happens on the last axis."""
        place = self._place(node.args[0])
        if place.axis >= len(shape_of(node)):
            raise Break(f"{node.name} ({node.target}) pairs tokens")
        return place

    def _indexed(self, node: Node) -> Place:
        """One axis, another than the tokens', by a row of literals."""
        place, indices = self._place(node.args[0]), node.args[1]
        given = [axis for axis, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
        flat = [len(shape_of(indices[axis])) for axis in given]  # type: ignore[index]
        if flat != [1] or given[0] == place.axis:
            raise Break(f"{node.name} ({node.target}) takes tokens by an index")
        return place

    def _index_selected(self, node: Node) -> Place:
        place = self._place(node.args[0])
        if int(argument(node, "dim", 0)) % len(shape_of(node)) == place.axis:
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
        rank = len(shape_of(node))
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
        return equal(self.meaning(shape_of(source)[axis]), self.meaning(shape_of(base)[axis]))

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


Rule = Callable[[RuledAxis, Node], State]
# By the names that rows of the operator table give.
RULES: dict[str, Rule] = rules(
    RuledAxis._diagonal,
    RuledAxis._expanded,
    RuledAxis._index_selected,
    RuledAxis._indexed,
    RuledAxis._joined,
    RuledAxis._normed,
    RuledAxis._of_pairs,
    RuledAxis._padded,
    RuledAxis._quantised,
    RuledAxis._reduced,
    RuledAxis._repeated,
    RuledAxis._within_rows,
    RuledAxis._written,
)
