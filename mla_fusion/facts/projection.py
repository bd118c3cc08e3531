"""Projections: products of an activation with a weight that no other product has touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from mla_fusion.facts import quant
from mla_fusion.facts.quant import Quantised
from mla_fusion.graph.contraction import Contraction, Labels
from mla_fusion.graph.sizes import is_symbolic
from mla_fusion.graph.view import View, peel


@dataclass(frozen=True)
class Projection:
    """``product.node = activation @ weight``, as one einsum.

    activation, weight   operands of the product
    origin               what the activation re-indexes, casts or quantises: equal for projections of one x
    quantised            of an int8 product, None of any other
    pieces               projections whose columns stand side by side in this one (a weight in chunks); weight,
                         scales and labels are then the first one's
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
    def parts(self) -> tuple[Projection, ...]:
        """The projections with a weight each: this one, or its pieces."""
        return self.pieces or (self,)

    @property
    def weight_is_left(self) -> bool:
        return self.weight is self.product.left and self.weight_labels == self.product.left_labels

    @property
    def batch(self) -> Labels:
        """Labels that activation, weight and output share (the head axis of an absorbed product)."""
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
        shape = self.weight.meta["val"].shape
        return all(_is_one(shape[self.weight_labels.index(label)]) for label in labels)

    @property
    def token_labels(self) -> Labels:
        out = self.product.out_labels
        return tuple(x for x in self.activation_labels if x not in self.weight_labels and x in out)

    @property
    def column_labels(self) -> Labels:
        out = self.product.out_labels
        return tuple(x for x in self.weight_labels if x not in self.activation_labels and x in out)


def find(view: View) -> list[Projection]:
    """Every product of an activation with a weight, in graph order."""
    found: dict[Node, Projection] = {}
    for product in view.contractions.values():
        made = _join(product, found) if product.parts else _orient(view, product)
        if made is not None:
            found[product.node] = made
    return list(found.values())


def _join(product: Contraction, found: dict[Node, Projection]) -> Projection | None:
    pieces = tuple(found[part.node] for part in product.parts if part.node in found)
    if len(pieces) != len(product.parts) or any(piece.weight is not piece.product.right for piece in pieces):
        return None
    return replace(pieces[0], product=product, pieces=pieces)


def _orient(view: View, product: Contraction) -> Projection | None:
    """Which operand is the weight: one that no product reaches; of two such, the right one, unless its size varies."""
    left, right = (not view.sources(operand) for operand in (product.left, product.right))
    if not left and not right:
        return None
    right_is_weight = right and not (left and _varies(product.right) and not _varies(product.left))
    if right_is_weight:
        a, w, la, lw = product.left, product.right, product.left_labels, product.right_labels
    else:
        a, w, la, lw = product.right, product.left, product.right_labels, product.left_labels
    quantised = quant.read(view, a, product.scales) if product.scales is not None else None
    dynamic = quantised.dynamic if quantised is not None else None
    return Projection(product, a, w, la, lw, peel(dynamic.source if dynamic is not None else a), quantised)


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


def _varies(node: Node) -> bool:
    return any(is_symbolic(size) for size in node.meta["val"].shape)
