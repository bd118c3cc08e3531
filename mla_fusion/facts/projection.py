"""Projections: products of an activation with a weight that no other product has touched."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.facts import dynamic_quant, quant, static_quant
from mla_fusion.facts.dynamic_quant import DynamicQuantReader
from mla_fusion.facts.quant import Quantised
from mla_fusion.fx.contraction import Contraction, Labels
from mla_fusion.fx.kinds import is_cast, is_reshape
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.sizes import is_symbolic, same
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import peel, reshapes_and_casts, upward, views_and_model_casts
from mla_fusion.operators.known import shape_of


@dataclass(frozen=True, kw_only=True)
class Projection:
    """``product.node = activation @ weight``, as one einsum.

    activation, weight   operands of the product
    origin               what the activation re-indexes, casts or quantises: equal for projections
                         of one x
    quantised            of a quantised product, None of any other
    pieces               projections whose columns stand side by side in this one (a weight in
                         chunks); weight, scales and labels are then the first one's
    """

    product: Contraction
    activation: Node
    weight: Node
    activation_labels: Labels
    weight_labels: Labels
    origin: Node
    quantised: Quantised | None = None
    pieces: tuple[Projection, ...] = ()

    @property
    def node(self) -> Node:
        return self.product.node

    @property
    def by_weight(self) -> tuple[Projection, ...]:
        """The projections with a weight each: this one, or its pieces."""
        return self.pieces or (self,)

    @property
    def weight_is_left(self) -> bool:
        return self.weight is self.product.left and self.weight_labels == self.product.left_labels

    @property
    def batch(self) -> Labels:
        """Labels that activation, weight and output share (the head axis of an absorbed
        product).
        """
        out = set(self.product.out_labels)
        return tuple(x for x in self.activation_labels if x in self.weight_labels and x in out)

    @property
    def summed(self) -> Labels:
        out = set(self.product.out_labels)
        return tuple(x for x in self.activation_labels if x in self.weight_labels and x not in out)

    @property
    def is_flat(self) -> bool:
        """One summed and one column axis, and no head axis: a linear layer."""
        return len(self.summed) == 1 and len(self.column_labels) == 1 and self._ones(self.batch)

    def _ones(self, labels: Labels) -> bool:
        shape = shape_of(self.weight)
        return all(_is_one(shape[self.weight_labels.index(label)]) for label in labels)

    @property
    def token_labels(self) -> Labels:
        out = self.product.out_labels
        return tuple(x for x in self.activation_labels if x not in self.weight_labels and x in out)

    @property
    def row_labels(self) -> Labels:
        """Token labels in the order of the output, which is the order in which a cone counts
        tokens.
        """
        return tuple(x for x in self.product.out_labels if x in self.token_labels)

    @property
    def width(self) -> Any:
        """How many columns the weight has on its first column axis."""
        return shape_of(self.weight)[self.weight_labels.index(self.column_labels[0])]

    @property
    def column_labels(self) -> Labels:
        out = self.product.out_labels
        return tuple(x for x in self.weight_labels if x not in self.activation_labels and x in out)


def rows(view: View, item: Projection) -> torch.Tensor | None:
    """Codes of the origin's elements, [token * He + k] as the product reads them; None where that
    is unknown.

    An origin is looked for through slices and permutations too, so two projections of one origin
    need not read the same rows of it.
    """
    item = item.by_weight[0]
    source = item.quantised.source if item.quantised is not None else None
    shape = view.binding.shape_of(item.origin)
    held = torch.arange(math.prod(shape)).reshape(shape)
    legs = [(item.origin, item.activation)]
    if source is not None:
        legs = [(item.origin, source), (peel(item.activation), item.activation)]
    for start, end in legs:
        if not _keeps_tokens(view, start, end):
            return None
        program = Program([start], nodes_between((start,), end), view.binding)
        value = program.run([held])[program.slot(end)]
        if not isinstance(value, torch.Tensor):
            return None
        held = value
    labels = item.activation_labels
    ordered = (*item.row_labels, *item.summed)
    others = [label for label in labels if label not in ordered]
    return held.permute([labels.index(label) for label in (*others, *ordered)]).reshape(-1)


def _keeps_tokens(view: View, start: Node, end: Node) -> bool:
    """Is the way from one to the other the same for each token, where their number is symbolic?"""
    between = nodes_between((start,), end)
    return start is end or Tokens.of((start,), between, view.binding.meaning).broken(end) is None


def token_sizes(item: Projection) -> list[object] | None:
    """The sizes of the token axes before any were merged, in the order in which the product's rows
    count them.

    ``[B, S]`` where the activation ``[B * S, He]`` is a view of ``[B, S, He]``; None where nothing
    above has more axes.
    """
    shape = shape_of(item.activation)
    long = [
        label
        for label, size in zip(item.activation_labels, shape, strict=True)
        if not same(size, 1)
    ]
    rows = [label for label in item.row_labels if label in long]
    if long[-1:] != list(item.summed) or long[:-1] != rows:
        return None
    best = [size for size in shape[:-1] if not same(size, 1)]
    for above in upward(item.activation, reshapes_and_casts):
        sizes = [size for size in shape_of(above) if not same(size, 1)]
        if not sizes or not same(sizes[-1], shape[-1]):
            break
        best = sizes[:-1] if len(sizes) - 1 > len(best) else best
    return best


def reads_whole(view: View, item: Projection) -> bool:
    """Does the projection read every element of its origin, rows and columns in the origin's
    order?
    """
    ordered = _order(item) == tuple(range(len(item.activation_labels)))
    if ordered and all(is_reshape(node) or is_cast(node) for node in _between(item)):
        return True
    codes = rows(view, item)
    return codes is not None and torch.equal(codes, torch.arange(_size(view, item.origin)))


def _between(item: Projection) -> list[Node]:
    """Views and casts from the activation up to its origin, on both sides of a dynamic
    quantisation.
    """
    source = item.quantised.source if item.quantised is not None else None
    chains = [item.activation] if source is None else [item.activation, source]
    return [node for start in chains for node in list(upward(start, views_and_model_casts))[:-1]]


def _size(view: View, node: Node) -> int:
    return view.binding.count_of(node)


def same_rows(view: View, a: Projection, b: Projection) -> bool:
    """Do two projections of one origin read the same rows, in the same order?"""
    if view.same(a.activation, b.activation) and _order(a) == _order(b):
        return True
    codes = [rows(view, item) for item in (a, b)]
    return codes[0] is not None and codes[1] is not None and torch.equal(codes[0], codes[1])


def _order(item: Projection) -> tuple[int, ...]:
    """Axes of the activation: those of the rows, then the summed one."""
    item = item.by_weight[0]
    return tuple(item.activation_labels.index(label) for label in (*item.row_labels, *item.summed))


def find(view: View) -> list[Projection]:
    """Every product of an activation with a weight, in graph order."""
    found: dict[Node, Projection] = {}
    sides, reader = _Sides(view), DynamicQuantReader(view)
    for product in view.contractions.values():
        made = (
            _join(view, product, found) if product.pieces else _orient(view, product, sides, reader)
        )
        if made is not None:
            found[product.node] = made
    return list(found.values())


def _join(view: View, product: Contraction, found: dict[Node, Projection]) -> Projection | None:
    pieces = tuple(found[part.node] for part in product.pieces if part.node in found)
    if len(pieces) != len(product.pieces) or any(
        piece.weight is not piece.product.right for piece in pieces
    ):
        return None
    if not all(same_rows(view, pieces[0], piece) for piece in pieces[1:]):
        return None
    return replace(pieces[0], product=product, pieces=pieces)


class _Sides:
    """On which side of how many products a value stands."""

    def __init__(self, view: View) -> None:
        self._products = view.contractions.values()

    @cached_property
    def _left(self) -> Counter[Node]:
        return Counter(peel(product.left) for product in self._products)

    @cached_property
    def _right(self) -> Counter[Node]:
        return Counter(peel(product.right) for product in self._products)

    def turned(self, product: Contraction) -> bool:
        """Is the right operand the activation: on the left of other products (``W @ x.T`` beside
        ``x @ V``), or alone shared by several (``W @ x.T`` beside ``V @ x.T``)?
        """
        left, right = peel(product.left), peel(product.right)
        return right in self._left or (self._right[right] > 1 and self._left[left] < 2)


def _orient(
    view: View, product: Contraction, sides: _Sides, reader: DynamicQuantReader
) -> Projection | None:
    """Which operand is the weight: one that no product reaches; of two such, the right one, unless
    its size varies or other products show that it is not.
    """
    left, right = (not view.sources(operand) for operand in (product.left, product.right))
    if not left and not right:
        return None
    # of a quantised product, the columns have the scales
    open_question = left and right and product.scales is None
    turned = open_question and (
        (_varies(product.right) and not _varies(product.left)) or sides.turned(product)
    )
    right_is_weight = right and not turned
    if right_is_weight:
        a, w, la, lw = product.left, product.right, product.left_labels, product.right_labels
    else:
        a, w, la, lw = product.right, product.left, product.right_labels, product.left_labels
    quantised = quant.read(reader, a, product.scales) if product.scales is not None else None
    dynamic = quantised.dynamic if quantised is not None else None
    return Projection(
        product=product,
        activation=a,
        weight=w,
        activation_labels=la,
        weight_labels=lw,
        origin=peel(dynamic.source if dynamic is not None else a),
        quantised=quantised,
    )


def unsmoothed(view: View, item: Projection) -> Projection | None:
    """The projection read as one of what was smoothed before nodes quantised it; None where nothing
    was.
    """
    quantised = item.quantised
    dynamic = quantised.dynamic if quantised is not None else None
    other = dynamic_quant.unsmoothed(view, dynamic) if dynamic is not None else None
    if quantised is None or other is None:
        return None
    return replace(item, origin=peel(other.source), quantised=replace(quantised, dynamic=other))


def statically_quantised(item: Projection) -> Projection | None:
    """The projection read as one of what one scale has quantised; None where nothing was, or not
    so.
    """
    quantised = item.quantised
    if (
        quantised is None
        or quantised.dynamic is not None
        or quantised.token_scale is not None
        or item.pieces
    ):
        return None
    fact = static_quant.by_operator(dynamic_quant.quantised_behind(item.activation))
    if fact is None:
        return None
    return replace(item, origin=peel(fact.source), quantised=replace(quantised, static=fact))


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


def _varies(node: Node) -> bool:
    return any(is_symbolic(size) for size in shape_of(node))
