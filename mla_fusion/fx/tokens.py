"""The token axis, proved: in which axis of each node the tokens stand, as long as every step keeps them apart.

A graph of 4,096 tokens, or of a symbolic number, is probed with five. What five show holds for all where the token
axis is a batch axis of every step: no step reduces, slices, joins or rolls along it, and no literal has a value of its
own for each token. Where it stands is carried from step to step; a step for which no rule says where it goes breaks
the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch.fx import Node

from mla_fusion.fx import contraction
from mla_fusion.fx.kinds import argument, filled_with, is_cast, is_getitem, is_reshape, op_name
from mla_fusion.fx.operators import CASTS, ELEMENTWISE, SELECTIONS
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import is_symbolic
from mla_fusion.fx.walk import EXPANDS, input_of, repeats, upward

Size = Any  # int or SymInt
Shape = Sequence[Size]


@dataclass(frozen=True)
class Place:
    """The tokens are in ``axis``, which may also hold ``inner`` other elements for each token (as rows of [T * N])."""

    axis: int
    inner: Any = 1  # int, or a sympy expression


@dataclass(frozen=True)
class Broken:
    """A step that does not keep the tokens apart."""

    node: Node
    reason: str


SAME = None  # of a value that is the same for every token, or the same in all of its elements
_State = Place | Broken | None


class _Break(Exception):
    pass


class TokenAxis:
    """One axis of tokens (all of them, or the sequences, or the positions of each) through the nodes of a view."""

    def __init__(self, size: Size, inner: Any = 1) -> None:
        """``inner``: how many tokens stand between two of this axis where all token axes are one."""
        self.size, self.inner = _expression(size), inner
        self._states: dict[Node, _State] = {}

    def start(self, node: Node, place: Place) -> None:
        self._states.setdefault(node, place)

    def start_outside(self, node: Node) -> None:
        """A tensor from outside with rows: its last axis but one that is as long as the tokens are many, if any."""
        if node in self._states:
            return
        shape = _shape(node)
        lead = shape[:-1] if len(shape) > 1 or not any(map(is_symbolic, shape)) else shape
        found = [axis for axis, size in enumerate(lead) if self._is_ours(size)]
        self._states[node] = Place(found[-1]) if found else self._merged(lead)

    def _merged(self, lead: Shape) -> _State:
        """Tokens of all sequences in one axis."""
        for inner in dict.fromkeys((self.inner, 1)):
            for axis, size in enumerate(lead):
                if not _is_one(size) and _divides(self.size * inner, _expression(size)):
                    return Place(axis, inner)
        return SAME

    def _is_ours(self, size: Size) -> bool:
        return _equal(_expression(size), self.size)

    def state(self, node: Node) -> _State:
        return self._states.get(node)

    @property
    def followed(self) -> int:
        """In how many nodes it is known where the tokens stand."""
        return sum(isinstance(state, Place) for state in self._states.values())

    def follow(self, nodes: Iterable[Node]) -> None:
        """Carry the axis through nodes in graph order; what comes in from elsewhere has been started."""
        for node in nodes:
            if node not in self._states:
                self._states[node] = self._after(node)

    def copy(self, move: Mapping[Node, Node]) -> None:
        """What holds of the nodes on the left holds of those on the right (an equal layer)."""
        for node, other in move.items():
            if node in self._states:
                self._states.setdefault(other, self._states[node])

    def _after(self, node: Node) -> _State:
        if filled_with(node) is not None or is_symbolic(node.meta.get("val")):
            return SAME  # a size is one for all tokens
        states = [self._states.get(arg) for arg in node.all_input_nodes]
        for state in states:
            if isinstance(state, Broken):
                return state
        if not any(isinstance(state, Place) for state in states):
            return SAME
        try:
            return self._rule(node)
        except _Break as broken:
            return Broken(node, str(broken))

    def _rule(self, node: Node) -> _State:
        name = op_name(node)
        if is_getitem(node):
            state = self._states.get(node.args[0])  # type: ignore[arg-type]
            return state
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, node)
        if is_reshape(node):
            return self._viewed(node)
        if name in ELEMENTWISE or is_cast(node) or name in CASTS:
            return self._elementwise(node, node.all_input_nodes)
        product = contraction.read(node)
        if product is not None:
            return self._contracted(node, product)
        raise _Break(f"{node.name} ({node.target}) is not known to keep the tokens apart")

    # -- operands

    def _place(self, value: Any) -> Place:
        state = self._states.get(value) if isinstance(value, Node) else None
        if not isinstance(state, Place):
            raise _Break(f"{value} has no axis of tokens")
        return state

    def _elementwise(self, node: Node, operands: Sequence[Node]) -> Place:
        """Operands are aligned at their last axes; all that have the tokens have them in one axis."""
        rank = len(_shape(node))
        found: Place | None = None
        for operand in operands:
            state = self._states.get(operand)
            if isinstance(state, Place):
                here = replace(state, axis=state.axis + rank - len(_shape(operand)))
                if found is not None and found != here:
                    raise _Break(f"{node.name} ({node.target}) meets tokens at axes {found.axis} and {here.axis}")
                found = here
        if found is None:
            raise _Break(f"{node.name} has no axis of tokens")
        for operand in operands:
            if not isinstance(self._states.get(operand), Place):
                self._check_same(node, operand, replace(found, axis=found.axis - rank + len(_shape(operand))))
        return found

    def _check_same(self, node: Node, operand: Node, place: Place) -> None:
        """A value without tokens must be one for all of them."""
        if place.axis < 0 or _is_one(_shape(operand)[place.axis]) or is_uniform(operand):
            return
        if self._is_spread(operand, place):
            return
        raise _Break(f"{operand.name} has a value of its own for each token at {node.name} ({node.target})")

    def _is_spread(self, node: Node, place: Place) -> bool:
        """Was the axis made by an expand of one that is 1 long?"""
        for step, source in pairwise(upward(node, repeats)):
            before, after = _shape(source), _shape(step)
            if op_name(step) in EXPANDS:
                axis = place.axis - len(after) + len(before)
                if axis < 0 or (_is_one(before[axis]) and not _is_one(after[place.axis])):
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
        step = place.inner * _count(before[place.axis + 1 :])  # elements from one token to the next
        for axis, size in enumerate(after):
            inner = _divided(step, _count(after[axis + 1 :]))
            if inner is not None and not _is_one(size) and _divides(self.size * inner, _expression(size)):
                return Place(axis, inner)
        return None

    # -- rules

    def _viewed(self, node: Node) -> Place:
        source = node.args[0]
        before, after = _shape(source), _shape(node)
        place = self._reshaped(self._place(source), before, after)
        if place is not None:
            return place
        raise _Break(f"{node.name} ({node.target}) takes {list(before)} for {list(after)}, across tokens")

    def _permuted(self, node: Node) -> Place:
        place, rank = self._place(node.args[0]), len(_shape(node))
        order = [axis % rank for axis in argument(node, "dims")]
        return replace(place, axis=order.index(place.axis))

    def _transposed(self, node: Node) -> Place:
        place, rank = self._place(node.args[0]), len(_shape(node))
        a, b = (0, rank - 1) if rank < 2 else (0, 1)
        if op_name(node) not in ("aten::t", "aten::t_copy", "aten::numpy_T"):
            a, b = (int(axis) % rank for axis in node.args[1:3])  # type: ignore[arg-type]
        return replace(place, axis={a: b, b: a}.get(place.axis, place.axis))

    def _expanded(self, node: Node) -> _State:
        source, after = node.args[0], _shape(node)
        state = self._states.get(source)  # type: ignore[arg-type]
        if isinstance(state, Place):
            return replace(state, axis=state.axis + len(after) - len(_shape(source)))
        return SAME

    def _selected(self, node: Node) -> Place:
        """Of select and unbind, which take an axis away."""
        place, rank = self._place(node.args[0]), len(_shape(node.args[0]))
        axis = int(argument(node, "dim", 0)) % rank
        if axis == place.axis:
            raise _Break(f"{node.name} ({node.target}) takes some of the tokens")
        return replace(place, axis=place.axis - (axis < place.axis))

    def _quantised(self, node: Node) -> Place:
        """npu_dynamic_quant: values, and a scale for each row."""
        place = self._place(node.args[0])
        if place.axis == len(_shape(node)) - 1:
            raise _Break(f"{node.name} ({node.target}) has one scale for many tokens")
        return place

    def _sliced(self, node: Node) -> Place:
        """Of slices, splits and the like: along another axis, or all of it."""
        place, before = self._place(node.args[0]), _shape(node.args[0])
        axis = int(argument(node, "dim", 0)) % len(before)
        if axis == place.axis and not self._keeps_all(node, before[axis]):
            raise _Break(f"{node.name} ({node.target}) takes some of the tokens")
        return place

    def _keeps_all(self, node: Node, size: Size) -> bool:
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            return len(value) == 1
        axis = int(argument(node, "dim", 0))
        return _equal(_expression(value.shape[axis]), _expression(size)) and argument(node, "step", 1) in (1, None)

    @staticmethod
    def _along(node: Node, name: str = "dim") -> list[int]:
        """The axes that an operator names, counted from the first; all of them where it names none."""
        rank = len(_shape(node.args[0]))
        axes = argument(node, name)
        axes = [] if axes is None else axes if isinstance(axes, (list, tuple)) else [axes]
        return [axis % rank for axis in axes] or list(range(rank))

    def _reduced(self, node: Node) -> Place:
        place, axes = self._place(node.args[0]), self._along(node)
        if place.axis in axes:
            raise _Break(f"{node.name} ({node.target}) reduces along the tokens")
        kept = bool(argument(node, "keepdim", False))
        return place if kept else replace(place, axis=place.axis - sum(axis < place.axis for axis in axes))

    def _within_rows(self, node: Node) -> Place:
        """Of softmax, cumsum, flip and the like: along other axes, the shape stays."""
        place = self._place(node.args[0])
        if place.axis in self._along(node, "dims" if op_name(node) in ("aten::flip", "aten::roll") else "dim"):
            raise _Break(f"{node.name} ({node.target}) goes along the tokens")
        return place

    def _normed(self, node: Node) -> Place:
        """Norms of the last axes: as many as the weight has, or as their sizes are given."""
        place, rank = self._place(node.args[0]), len(_shape(node.args[0]))
        shape = argument(node, "normalized_shape")
        weight = argument(node, "weight") or argument(node, "gamma")
        last = len(shape) if shape is not None else max(1, len(_shape(weight)) if isinstance(weight, Node) else 1)
        if place.axis >= rank - last:
            raise _Break(f"{node.name} ({node.target}) is a norm along the tokens")
        for operand in node.all_input_nodes[1:]:
            state = self._states.get(operand)
            if isinstance(state, Place) and state.axis != place.axis:
                raise _Break(f"{node.name} ({node.target}) meets tokens at two axes")
        return place

    def _joined(self, node: Node) -> Place:
        parts = [part for part in node.args[0] if isinstance(part, Node)]  # type: ignore[union-attr]
        rank = len(_shape(node))
        axis = int(argument(node, "dim", 0)) % rank
        stacks = op_name(node) == "aten::stack"
        full = [part for part in parts if not _is_empty(part)]
        places = {state for part in full if isinstance(state := self._states.get(part), Place)}
        if len(places) != 1:
            raise _Break(f"{node.name} ({node.target}) joins tokens at several axes")
        place = places.pop()
        if not stacks and axis == place.axis and len(full) > 1:
            raise _Break(f"{node.name} ({node.target}) joins tokens one after the other")
        for part in full:
            if not isinstance(self._states.get(part), Place):
                self._check_same(node, part, place)
        return replace(place, axis=place.axis + (stacks and axis <= place.axis))

    def _repeated(self, node: Node) -> Place:
        place, before, after = self._place(node.args[0]), _shape(node.args[0]), _shape(node)
        axis = place.axis + len(after) - len(before)
        if not _equal(_expression(after[axis]), _expression(before[place.axis])):
            raise _Break(f"{node.name} ({node.target}) repeats tokens")
        return replace(place, axis=axis)

    def _padded(self, node: Node) -> Place:
        place, before, after = self._place(node.args[0]), _shape(node.args[0]), _shape(node)
        pads = argument(node, "pad")
        at = 2 * (len(before) - 1 - place.axis)
        if any(pad != 0 for pad in pads[at : at + 2]) or len(before) != len(after):
            raise _Break(f"{node.name} ({node.target}) adds tokens")
        return place

    def _of_pairs(self, node: Node) -> Place:
        """view_as_complex, view_as_real: what happens on the last axis."""
        place = self._place(node.args[0])
        if place.axis >= len(_shape(node)):
            raise _Break(f"{node.name} ({node.target}) pairs tokens")
        return place

    def _indexed(self, node: Node) -> Place:
        """One axis, another than the tokens', by a row of literals."""
        place, indices = self._place(node.args[0]), node.args[1]
        given = [axis for axis, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
        flat = [len(_shape(indices[axis])) for axis in given]  # type: ignore[index]
        if flat != [1] or given[0] == place.axis:
            raise _Break(f"{node.name} ({node.target}) takes tokens by an index")
        return place

    def _index_selected(self, node: Node) -> Place:
        place = self._place(node.args[0])
        if int(argument(node, "dim", 0)) % len(_shape(node)) == place.axis:
            raise _Break(f"{node.name} ({node.target}) takes tokens by an index")
        return place

    def _written(self, node: Node) -> Place:
        """slice_scatter and select_scatter along another axis; copy."""
        base, source = node.args[:2]
        assert isinstance(base, Node) and isinstance(source, Node)
        if op_name(node) == "aten::copy":
            return self._elementwise(node, [source, *([base] if isinstance(self._states.get(base), Place) else [])])
        rank = len(_shape(node))
        axis = int(argument(node, "dim", 0)) % rank
        selects = op_name(node) == "aten::select_scatter"
        found = set()
        for operand, shift in ((base, 0), (source, int(selects))):
            state = self._states.get(operand)
            if isinstance(state, Place):
                found.add(replace(state, axis=state.axis + (shift if shift and axis <= state.axis else 0)))
        if len(found) != 1:
            raise _Break(f"{node.name} ({node.target}) meets tokens at several axes")
        place = found.pop()
        if axis == place.axis and not (not selects and self._keeps_slice(node, base)):
            raise _Break(f"{node.name} ({node.target}) overwrites some of the tokens")
        for operand in (base, source):
            if not isinstance(self._states.get(operand), Place) and not is_uniform(operand):
                raise _Break(f"{operand.name} has a value of its own for each token at {node.name} ({node.target})")
        return place

    def _keeps_slice(self, node: Node, base: Node) -> bool:
        axis, source = int(argument(node, "dim", 0)), node.args[1]
        return _equal(_expression(_shape(source)[axis]), _expression(_shape(base)[axis]))

    def _contracted(self, node: Node, product: contraction.Contraction) -> Place:
        found: dict[int, Place] = {}  # by label
        sides = ((product.left, product.left_labels), (product.right, product.right_labels))
        for operand, labels in sides:
            state = self._states.get(operand)
            if isinstance(state, Place):
                label = labels[state.axis]
                if label not in product.out_labels:
                    raise _Break(f"{node.name} ({node.target}) sums over the tokens")
                found[label] = Place(product.out_labels.index(label), state.inner)
        if len(found) != 1:
            raise _Break(f"{node.name} ({node.target}) meets tokens at several axes")
        ((label, place),) = found.items()
        for operand, labels in sides:
            if label in labels and not isinstance(self._states.get(operand), Place):
                self._check_same(node, operand, replace(place, axis=labels.index(label)))
        return place


class Tokens:
    """The token axes of a view that are probed shorter than they are: symbolic ones, and one that is shrunk.

    Empty where every token is probed; then nothing needs a proof.
    """

    def __init__(self, shrink: Shrink | None) -> None:
        self._shrink = shrink
        self._axes: dict[Any, TokenAxis] = {}

    @classmethod
    def of(cls, tensors: Sequence[Node], steps: Sequence[Node]) -> Tokens:
        """Every symbolic axis of the tensors, followed through the steps that are made of these."""
        found = cls(None)
        for tensor in tensors:
            found.start(tensor, _shape(tensor), range(len(_shape(tensor))))
        found.start_outside(tensors)
        found.follow(steps)
        return found

    def __bool__(self) -> bool:
        return bool(self._axes)

    def start(self, product: Node, lead: Shape, axes: Sequence[int]) -> None:
        """``lead``: the token axes before any were merged; ``axes``: where they stand in the product, in order."""
        shape = _shape(product)
        for at, size in enumerate(lead):
            if not (is_symbolic(size) or self._is_shrunk(lead, at)):
                continue
            after = _count(lead[at + 1 :])
            key = _expression(size)
            axis = self._axes.setdefault(key, TokenAxis(size, after))
            for place, standing in enumerate(axes):
                inner = _divided(after, _count([shape[other] for other in axes[place + 1 :]]))
                if inner is not None and _divides(axis.size * inner, _expression(shape[standing])):
                    axis.start(product, Place(standing, inner))
                    break

    def _is_shrunk(self, lead: Shape, at: int) -> bool:
        full = self._shrink.full if self._shrink is not None else 0
        return bool(full) and lead[at] == full and full not in lead[at + 1 :]

    def start_outside(self, nodes: Iterable[Node]) -> None:
        for axis in self._axes.values():
            for node in nodes:
                axis.start_outside(node)

    def follow(self, nodes: Sequence[Node]) -> None:
        for axis in self._axes.values():
            axis.follow(nodes)

    def copy(self, move: Mapping[Node, Node]) -> None:
        for axis in self._axes.values():
            axis.copy(move)

    def broken(self, node: Node) -> Broken | None:
        """The step above the node, or at it, that does not keep the tokens apart."""
        states = (axis.state(node) for axis in self._axes.values())
        return next((state for state in states if isinstance(state, Broken)), None)

    def summary(self) -> str:
        """Which axes are tokens', and through how many nodes they were followed; "" where none had to be."""
        axes = (f"axis of {axis.size}: followed through {axis.followed} nodes" for axis in self._axes.values())
        return "; ".join(axes)

    def knows(self, node: Node) -> bool:
        """Is it known of every token axis where it stands in the node?"""
        return all(isinstance(axis.state(node), Place) for axis in self._axes.values())


Rule = Callable[[TokenAxis, Node], _State]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten::permute", "aten::permute_copy"), TokenAxis._permuted),
    **dict.fromkeys(
        ("aten::transpose", "aten::transpose_copy", "aten::t", "aten::t_copy", "aten::swapaxes", "aten::swapdims"),
        TokenAxis._transposed,
    ),
    **dict.fromkeys(("aten::expand", "aten::expand_copy"), TokenAxis._expanded),
    **dict.fromkeys(SELECTIONS, TokenAxis._sliced),
    **dict.fromkeys(("aten::select", "aten::select_copy", "aten::unbind", "aten::unbind_copy"), TokenAxis._selected),
    **dict.fromkeys(
        "aten::sum aten::mean aten::var aten::std aten::linalg_vector_norm aten::norm aten::logsumexp aten::prod "
        "aten::amax aten::amin".split(),
        TokenAxis._reduced,
    ),
    **dict.fromkeys(
        "aten::_softmax aten::softmax aten::_log_softmax aten::log_softmax aten::cumsum aten::flip aten::roll".split(),
        TokenAxis._within_rows,
    ),
    **dict.fromkeys(
        "aten::rms_norm aten::_fused_rms_norm aten::layer_norm aten::native_layer_norm npu::npu_rms_norm "
        "npu::npu_add_rms_norm".split(),
        TokenAxis._normed,
    ),
    **dict.fromkeys(("aten::cat", "aten::stack"), TokenAxis._joined),
    **dict.fromkeys(("aten::repeat", "aten::repeat_interleave", "aten::tile"), TokenAxis._repeated),
    **dict.fromkeys(("aten::pad", "aten::constant_pad_nd"), TokenAxis._padded),
    **dict.fromkeys(("aten::view_as_complex", "aten::view_as_real"), TokenAxis._of_pairs),
    **dict.fromkeys(("aten::index", "aten::_unsafe_index"), TokenAxis._indexed),
    "aten::index_select": TokenAxis._index_selected,
    "npu::npu_dynamic_quant": TokenAxis._quantised,
    **dict.fromkeys(("aten::slice_scatter", "aten::select_scatter", "aten::copy"), TokenAxis._written),
}


# -- sizes as expressions


def _expression(size: Size) -> Any:
    return size.node.expr if is_symbolic(size) else size


def _count(sizes: Shape) -> Any:
    if not any(map(is_symbolic, sizes)):
        return math.prod(sizes)
    return sympy.prod([_expression(size) for size in sizes])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or bool(sympy.expand(a - b) == 0)


def _divided(a: Any, b: Any) -> Any | None:
    """``a / b`` where that is a whole number whatever the symbols are."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    return quotient if sympy.fraction(quotient)[1] == 1 else None


def _divides(a: Any, b: Any) -> bool:
    return _divided(b, a) is not None


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _shape(node: Any) -> Shape:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor):
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _is_empty(node: Node) -> bool:
    return any(isinstance(size, int) and size == 0 for size in _shape(node))


def is_uniform(node: Node) -> bool:
    """Is every element the same number: a fill, or views of one?"""
    *views, base = upward(node, lambda step: input_of(step) if op_name(step) == "aten::slice" else repeats(step))
    if filled_with(base) is not None or op_name(base) in _FILLS:
        return True
    return any(all(_is_one(size) for size in _shape(source)) for source in (*views[1:], *([base] if views else ())))


_FILLS = frozenset("aten::zeros aten::ones aten::full aten::empty aten::scalar_tensor aten::new_full".split())
