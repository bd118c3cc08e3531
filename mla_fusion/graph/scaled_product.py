"""An int8 product written in steps: integers multiplied, then brought to scale by multiplications.

``(x_int8 @ w_int8).float() * token_scale * weight_scale``, the product in int32 or in floats, the scales in any order,
one by one or multiplied beforehand; npu_quant_matmul without a token scale, which comes after. Only where each step is
read by the next alone is it one product. What the token scale is worth is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.graph.contraction import Contraction, Labels, Scales
from mla_fusion.graph.kinds import is_cast, is_faithful_cast, is_reshape, op_name
from mla_fusion.graph.sizes import is_symbolic, same, same_shape

_WIDE = (torch.float32, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int16, torch.int32, torch.int64)
_HOLD_INT8 = (torch.int8, torch.float16, *_INTEGERS, *_WIDE)  # every one of its numbers, exactly
_SUMS = (torch.int32, torch.int64, torch.float16, *_WIDE)  # of a bare product; a narrower integer would wrap
_LONGEST = 12  # nodes from the bare product to the scaled one
_STEPS = 127  # of int8: a token scale may be max|row|, and the product divided by this at the end
_COLUMN, _ROW = 101, 100  # labels of the weight's columns and of what is summed


def read(product: Contraction) -> Contraction | None:
    """The product that begins with ``product``, a bare one of integers, and ends where both its scales are on it."""
    node, given = product.node, product.scales
    if product.bias is not None or product.factors[0] != 1.0 or node.meta["val"].dtype not in _SUMS:
        return None
    weight = _int8_weight(product.right, product.right_labels)
    if weight is None or not _is_linear(product) or not _int8_activations(product.left):
        return None
    steps = _Steps(node, width=node.meta["val"].shape[-1])
    if given is not None:
        if given.token is not None or given.offset is not None:
            return None
        if node.meta["val"].dtype != torch.int32:  # that is npu_quant_matmul's sum before it is scaled
            steps.weight = given.weight
    steps.walk()
    if steps.weight is None or (steps.token is None and given is not None) or len(steps.nodes) < 2:
        return None
    return _whole(product, weight, steps)


@dataclass
class _Steps:
    """nodes: the bare product and what it becomes, as far as it was followed."""

    first: Node
    width: Any
    nodes: list[Node] = field(default_factory=list)
    weight: Node | None = None
    token: Node | None = None
    factor: float = 1.0
    inverse: bool = False

    def walk(self) -> None:
        self.nodes = [self.first]
        while len(self.nodes) < _LONGEST:
            user = _only_reader(self.nodes[-1])
            if user is None or not self._takes(user):
                break
            self.nodes.append(user)
        while len(self.nodes) > 1 and is_reshape(self.nodes[-1]):
            self.nodes.pop()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.nodes[-1].meta["val"].dtype
        return dtype

    @property
    def _complete(self) -> bool:
        return self.weight is not None and self.token is not None

    def _takes(self, user: Node) -> bool:
        """Is the reader one more step?"""
        value = user.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return False
        if is_cast(user):
            return value.dtype in _WIDE and not (self._complete and self.dtype == torch.bfloat16)
        if is_reshape(user):
            return not self._complete and same(value.shape[-1] if value.dim() else 0, self.width)
        return value.dtype in _WIDE and self._scales(user)

    def _scales(self, user: Node) -> bool:
        """A multiplication, or a division of the product, by scales or a number."""
        name, node = op_name(user), self.nodes[-1]
        if name not in ("aten::mul", "aten::div") or user.kwargs or len(user.args) != 2:
            return False
        by = user.args[1] if user.args[0] is node else user.args[0]
        divides = name == "aten::div"
        if divides and user.args[0] is not node:
            return False
        if isinstance(by, (int, float)) and by != 0:
            factor = self.factor / by if divides else self.factor * by
            if self._complete and abs(factor * _STEPS - 1) > 1e-3:
                return False  # a number that belongs to what comes next, a softmax scale say
            self.factor = factor
            return True
        if self._complete or not isinstance(by, Node):
            return False
        if not same_shape(user.meta["val"].shape, node.meta["val"].shape):
            return False
        before = self.weight, self.token, self.inverse
        taken = all(self._scale(scale, divides) for scale in _factors(by, self.width))
        if not taken:
            self.weight, self.token, self.inverse = before
        return taken

    def _scale(self, scale: Node, divides: bool) -> bool:
        value = scale.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
        lead = self.nodes[-1].meta["val"].shape[:-1]
        shape = value.shape
        if self.weight is None and not divides and shape and same(shape[-1], self.width) and _ones(shape[:-1]):
            self.weight = scale
            return True
        if self.token is None and len(shape) > 1 and same(shape[-1], 1) and same_shape(shape[:-1], lead):
            self.token, self.inverse = scale, divides
            return True
        return False


def _only_reader(node: Node) -> Node | None:
    readers = [user for user in node.users if not is_symbolic(user.meta.get("val"))]
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None


def _factors(by: Node, width: Any) -> list[Node]:
    """The column scales and the row scales of which ``by`` is the outer product, else itself."""
    inner = by
    while is_faithful_cast(inner) and isinstance(inner.args[0], Node):
        inner = inner.args[0]
    sides = [arg for arg in inner.args if isinstance(arg, Node)]
    if op_name(inner) != "aten::mul" or len(sides) != 2 or inner.kwargs:
        return [by]
    shapes = [side.meta["val"].shape for side in sides]
    columns = [bool(shape) and same(shape[-1], width) and _ones(shape[:-1]) for shape in shapes]
    tokens = [len(shape) > 1 and same(shape[-1], 1) for shape in shapes]
    return sides if (columns[0] and tokens[1]) or (columns[1] and tokens[0]) else [by]


def _ones(shape: Sequence[Any]) -> bool:
    return all(same(size, 1) for size in shape)


def _is_linear(product: Contraction) -> bool:
    """Rows by a matrix, the columns last."""
    left, right, out = product.left_labels, product.right_labels, product.out_labels
    return len(right) == 2 and len(left) > 1 and left[-1] in right and out[:-1] == left[:-1] and out[-1] in right


def _int8_weight(node: Node, labels: Labels) -> tuple[Node, Labels] | None:
    """The int8 matrix that the operand is a cast of, and its labels."""
    while node.meta["val"].dtype != torch.int8:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or node.meta["val"].dtype not in _HOLD_INT8:
            return None
        if _swaps(node):
            labels = labels[::-1]
        elif not is_cast(node):
            return None
        node = source
    return node, labels


def _swaps(node: Node) -> bool:
    """Does the node transpose a matrix?"""
    name = op_name(node)
    if name == "aten::permute":
        return list(node.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]
    return name in ("aten::t", "aten::transpose") and len(node.meta["val"].shape) == 2


def _int8_activations(node: Node) -> list[Node]:
    """The int8 rows that the operand is a cast of, as they are before and after being reshaped, nearest first."""
    found: list[Node] = []
    while True:
        value = node.meta["val"]
        if value.dtype == torch.int8:
            found.append(node)
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or value.dtype not in _HOLD_INT8:
            return found
        if not (is_reshape(node) or (is_cast(node) and not found)):
            return found
        if not same(source.meta["val"].shape[-1], value.shape[-1]):
            return found
        node = source


def _whole(product: Contraction, weight: tuple[Node, Labels], steps: _Steps) -> Contraction | None:
    """The product whose rows are arranged as the scaled result's are; None where no int8 tensor is."""
    *inside, last = steps.nodes
    lead = last.meta["val"].shape[:-1]
    summed = product.left_labels[-1]
    names = {summed: _ROW, product.out_labels[-1]: _COLUMN}
    node, labels = weight
    for left in _int8_activations(product.left):
        if same_shape(left.meta["val"].shape[:-1], lead):
            tokens = tuple(range(len(lead)))
            assert steps.weight is not None
            return replace(
                product,
                node=last,
                left=left,
                right=node,
                left_labels=(*tokens, _ROW),
                right_labels=tuple(names[label] for label in labels),
                out_labels=(*tokens, _COLUMN),
                scales=Scales(steps.weight, steps.token, None, steps.factor, steps.inverse),
                inside=tuple(inside),
            )
    return None
