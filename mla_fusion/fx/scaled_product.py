"""A product with an int8 weight, written in steps: numbers multiplied, then brought to scale by
multiplications.

``(x_int8 @ w_int8).float() * token_scale * weight_scale``, the product in int32 or in floats, the
scales in any order, one by one or multiplied beforehand; npu_quant_matmul without a token scale,
which comes after. Only where each step is read by the next alone is it one product. What the token
scale is worth is not decided here, nor whether the activation must be int8 too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.fx import Node

from mla_fusion.fx.contraction import Contraction, Labels, Scales
from mla_fusion.fx.kinds import is_cast, is_reshape, word
from mla_fusion.fx.sizes import is_size, same, same_shape
from mla_fusion.fx.walk import exact_casts, input_of, origin, upward
from mla_fusion.meta.number_formats import INT8
from mla_fusion.operators.forms import order_of
from mla_fusion.operators.known import dtype_of, shape_of, value_of

_WIDE = (torch.float32, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int16, torch.int32, torch.int64)
_HOLD_INT8 = (torch.int8, torch.float16, *_INTEGERS, *_WIDE)  # every one of its numbers, exactly
# of a bare product; a narrower integer would wrap
_SUMS = (torch.int32, torch.int64, torch.float16, *_WIDE)
_LONGEST = 12  # nodes from the bare product to the scaled one
_STEPS = 127  # of int8: a token scale may be max|row|, and the product divided by this at the end
_COLUMN, _ROW = 101, 100  # labels of the weight's columns and of what is summed


def read(product: Contraction) -> Contraction | None:
    """The product that begins with ``product``, a bare one of integers, and ends where both its
    scales are on it.
    """
    node, given = product.node, product.scales
    if product.bias is not None or product.factors[0] != 1.0 or dtype_of(node) not in _SUMS:
        return None
    weight = _int8_weight(product.right, product.right_labels)
    if weight is None or not _is_linear(product):
        return None
    rows = _int8_activations(product.left) or _float_activations(product.left)
    if not rows:
        return None
    steps = _Steps(node, shape_of(node)[-1], is_int8=dtype_of(rows[0]) == torch.int8)
    if given is not None:
        if given.token is not None or given.offset is not None or given.format is not INT8:
            return None
        # that is npu_quant_matmul's sum before it is scaled
        if dtype_of(node) != torch.int32:
            steps.weight = given.weight
    steps.walk()
    if steps.weight is None or (steps.token is None and given is not None) or len(steps.nodes) < 2:
        return None
    return _whole(product, rows, weight, steps)


@dataclass
class _Steps:
    """nodes: the bare product and what it becomes, as far as it was followed; ``is_int8``: is the
    activation?
    """

    first: Node
    width: Any
    is_int8: bool
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
        while len(self.nodes) > 1 and _keeps_order(self.nodes[-1]):
            self.nodes.pop()

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.nodes[-1])

    @property
    def _complete(self) -> bool:
        return self.weight is not None and (self.token is not None or not self.is_int8)

    def _takes(self, user: Node) -> bool:
        """Is the reader one more step?"""
        value = value_of(user)
        if not isinstance(value, torch.Tensor):
            return False
        if is_cast(user):
            return value.dtype in _WIDE and not (self._complete and self.dtype == torch.bfloat16)
        if _keeps_order(user):
            return not self._complete and same(_row(value), self.width)
        return value.dtype in _WIDE and self._scales(user)

    def _scales(self, user: Node) -> bool:
        """A multiplication, or a division of the product, by scales or a number."""
        name, node = word(user), self.nodes[-1]
        if name not in ("mul", "div") or user.kwargs or len(user.args) != 2:
            return False
        by = user.args[1] if user.args[0] is node else user.args[0]
        divides = name == "div"
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
        if not same_shape(shape_of(user), shape_of(node)):
            return False
        before = self.weight, self.token, self.inverse
        taken = all(self._scale(scale, divides) for scale in _factors(by, self.width))
        if not taken:
            self.weight, self.token, self.inverse = before
        return taken

    def _scale(self, scale: Node, divides: bool) -> bool:
        value = value_of(scale)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
        lead = shape_of(self.nodes[-1])[:-1]
        shape = value.shape
        if (
            self.weight is None
            and not divides
            and shape
            and same(shape[-1], self.width)
            and _ones(shape[:-1])
        ):
            self.weight = scale
            return True
        if (
            self.token is None
            and len(shape) > 1
            and same(shape[-1], 1)
            and same_shape(shape[:-1], lead)
        ):
            self.token, self.inverse = scale, divides
            return True
        return False


def _only_reader(node: Node) -> Node | None:
    readers = [user for user in node.users if not is_size(user)]
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None


def _factors(by: Node, width: Any) -> list[Node]:
    """The column scales and the row scales of which ``by`` is the outer product, else itself."""
    inner = origin(by, exact_casts)
    sides = [arg for arg in inner.args if isinstance(arg, Node)]
    if word(inner) != "mul" or len(sides) != 2 or inner.kwargs:
        return [by]
    shapes = [shape_of(side) for side in sides]
    columns = [bool(shape) and same(shape[-1], width) and _ones(shape[:-1]) for shape in shapes]
    tokens = [len(shape) > 1 and same(shape[-1], 1) for shape in shapes]
    return sides if (columns[0] and tokens[1]) or (columns[1] and tokens[0]) else [by]


def _ones(shape: Sequence[Any]) -> bool:
    return all(same(size, 1) for size in shape)


def _is_linear(product: Contraction) -> bool:
    """Rows by a matrix, the columns last."""
    left, out = product.left_labels, product.out_labels
    right = _longer(product.right_labels, shape_of(product.right))
    return (
        len(right) == 2
        and len(left) > 1
        and left[-1] in right
        and out[:-1] == left[:-1]
        and out[-1] in right
    )


def _int8_weight(node: Node, labels: Labels) -> tuple[Node, Labels] | None:
    """The int8 matrix that the operand is a cast of, and its labels."""
    labels = _longer(labels, shape_of(node))
    if len(labels) != 2:
        return None
    for above in upward(node, _holding_int8):
        if dtype_of(above) == torch.int8 and above.meta["val"].dim() == 2:
            return above, labels
        moved = _moved(above)
        if moved is not None:
            labels = labels if moved == tuple(sorted(moved)) else labels[::-1]
        elif is_reshape(above):
            before, after = (shape_of(value) for value in (above.all_input_nodes[0], above))
            if not same_shape(_longer(before, before), _longer(after, after)):
                return None
    return None


def _holding_int8(node: Node) -> Node | None:
    """Casts and moves among dtypes that hold every number of int8."""
    passed = is_cast(node) or is_reshape(node) or _moved(node) is not None
    return input_of(node) if passed and dtype_of(node) in _HOLD_INT8 else None


_Item = TypeVar("_Item")


def _longer(items: Sequence[_Item], shape: Sequence[Any]) -> tuple[_Item, ...]:
    """Those that belong to axes longer than one: einsum puts in others and moves them about."""
    return tuple(item for item, size in zip(items, shape, strict=True) if not same(size, 1))


def _moved(node: Node) -> tuple[int, ...] | None:
    """Of a permutation, where its axes longer than one come from."""
    order = order_of(node)
    return None if order is None else _longer(order, shape_of(node))


def _keeps_order(node: Node) -> bool:
    moved = _moved(node)
    return is_reshape(node) if moved is None else moved == tuple(sorted(moved))


def _row(value: torch.Tensor) -> Any:
    """The length of the last axis, of those longer than one."""
    return (1, *_longer(value.shape, value.shape))[-1]


def _int8_activations(node: Node) -> list[Node]:
    """The int8 rows that the operand is a cast of, as they are before and after being reshaped,
    nearest first.
    """
    found: list[Node] = []
    for above in upward(node, _holding_int8):
        if not same(_row(above.meta["val"]), _row(node.meta["val"])):
            break
        if dtype_of(above) == torch.int8:
            found.append(above)
        if not (_keeps_order(above) or (is_cast(above) and not found)):
            break
    return found


def _float_activations(node: Node) -> list[Node]:
    """Of a product whose weight alone is int8: the rows as they are before and after being
    reshaped.
    """
    above = upward(node, lambda step: input_of(step) if _keeps_order(step) else None)
    return list(above) if node.meta["val"].is_floating_point() else []


def _whole(
    product: Contraction, rows: list[Node], weight: tuple[Node, Labels], steps: _Steps
) -> Contraction | None:
    """The product whose rows are arranged as the scaled result's are; None where none of ``rows``
    is.
    """
    *inside, last = steps.nodes
    lead = shape_of(last)[:-1]
    summed = product.left_labels[-1]
    names = {summed: _ROW, product.out_labels[-1]: _COLUMN}
    node, labels = weight
    for left in rows:
        if same_shape(shape_of(left)[:-1], lead):
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
