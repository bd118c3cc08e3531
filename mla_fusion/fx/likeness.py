"""Are the cones of two products equal node by node? Then one of them is read, and its facts hold
for both.

A cone has a program, and programs could be compared; but walking two cones side by side costs a
quarter of compiling the second.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mla_fusion.fx.cone import Cone
from mla_fusion.fx.contraction import Contraction
from mla_fusion.fx.sizes import has_symbols, is_size
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, table_columns
from mla_fusion.operators.known import shape_of, value_of


def outline(view: View, product: Contraction, weight_is_left: bool) -> object:
    """Equal for products whose cones may be alike: found at once where :func:`likeness` must
    walk.
    """
    members = tuple([id(node.target) for node in view.members(product.node)])
    labels = product.left_labels, product.right_labels, product.out_labels, weight_is_left
    return labels, str(shape_of(product.node)), members


def likeness(cone: Cone, product: Contraction) -> dict[Node, Node] | None:
    """What stands in the cone of ``product`` for every node of ``cone``, or None where they
    differ.
    """
    walk = _Walk(cone)
    if not walk.alike(cone.node, product.node):
        return None
    walk.move[cone.node] = product.node
    inside = set(cone.nodes)
    for node, other in zip(
        cone.view.members(cone.node), cone.view.members(product.node), strict=True
    ):
        if node in inside and not walk.step(node, other):
            return None
    return walk.move


class _Walk:
    def __init__(self, cone: Cone) -> None:
        self.view = cone.view
        self.move: dict[Node, Node] = {}
        self._bases = {*cone.bases, *cone.aliases}
        # bases that hold one value are one input: so must be their counterparts
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, int] = {}

    def step(self, node: Node, other: Node) -> bool:
        """Take in a node that does to its inputs what ``other`` does to the counterparts of
        these.
        """
        call, inputs = self.view.call(node)
        its, theirs = self.view.call(other)
        if call != its:
            return False
        move = self.move
        for one, another in zip(inputs, theirs, strict=True):
            known = move.get(one)
            if known is not another and (known is not None or not self._side(one, another)):
                return False
        move[node] = other
        return True

    def _side(self, node: Node, other: Node) -> bool:
        """Inputs from outside: sizes, what is made of literals, or views up to a base."""
        if is_size(node):
            return node is other
        if node in self._bases:
            return self._base(node, other)
        return self.view.is_constant(node) == self.view.is_constant(other) and self.step(
            node, other
        )

    def _base(self, base: Node, other: Node) -> bool:
        if (
            self.view.is_constant(other)
            or origin(other, table_columns) is not other
            or not self.alike(base, other)
        ):
            return False
        number, theirs = self.view.number(base), self.view.number(other)
        if (
            self._numbers.setdefault(number, theirs) != theirs
            or self._theirs.setdefault(theirs, number) != number
        ):
            return False
        self.move[base] = other
        return True

    def alike(self, node: Node, other: Node) -> bool:
        """Are they tensors of one shape and dtype?"""
        a, b = value_of(node), value_of(other)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype != b.dtype:
            return False
        if not has_symbols((*a.shape, *b.shape)):
            return a.shape == b.shape
        return a.dim() == b.dim() and all(map(self.view.binding.same, a.shape, b.shape))
