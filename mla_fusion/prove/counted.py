"""Numbers that tokens are counted by: positions, slots, lengths, and what is linear in them.

Over the real numbers an int32 is any integer, and a quotient by a count a number. Counts grow with
the tokens: int32 ends, and what is divided by a count has a token at which it is no number. So such
steps on counts are uninterpreted functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import (
    Kind,
    argument,
    attribute,
    is_cast,
    is_float,
    is_literal,
    operator_of,
    word,
)
from mla_fusion.operators.known import COUNTS, shape_of, value_of
from mla_fusion.prove import field, operators
from mla_fusion.prove.field import Num

_ARITHMETIC = frozenset(
    """
    add sub rsub mul neg addcmul outer mm bmm matmul einsum dot cumsum sum square pow div sqrt rsqrt
    reciprocal bitwise_left_shift
    """.split()
)
_POWERS = (2, 3)
TOKENS = 1 << 19  # of a graph, and above what positions and slots are taken to be
_FARTHEST = 1 << 128  # no dtype holds so much
_WHOLE = {torch.float32: 1 << 24, torch.float64: 1 << 53}  # up to which a dtype has all integers
_LEFT_SHIFT = "bitwise_left_shift"
_SUMS_OF_TWO = ("add", "sub", "rsub")
_OVER_AXES = ("sum", "cumsum")
_SUMMED = frozenset((*_OVER_AXES, *"mm bmm matmul einsum dot".split()))
_OF_BYTES = ("_int_mm", "npu_quant_matmul")  # whose sums are int32
_OF_INTEGERS = frozenset((*_SUMS_OF_TWO, "mul", "neg"))
_PRODUCTS = frozenset(("mul", "outer", "addcmul"))


class Counted:
    """Which nodes of a region hold counts; asked in the order in which nodes are run."""

    def __init__(
        self, leaves: Mapping[Node, str], constant: frozenset[str], most: int = TOKENS
    ) -> None:
        """``most``: above all integers that come in."""
        self._leaves, self._constant, self._above = leaves, constant, most
        self._kinds: dict[Node, str] = {}
        self._most: dict[Node, int] = {}
        self._integral: dict[Node, bool] = {}

    def __contains__(self, node: object) -> bool:
        return isinstance(node, Node) and self._kind(node) == "counts"

    def _kind(self, node: Node) -> str:
        """ "counts"; "constant", the same for all tokens; or "", anything else."""
        found = self._kinds.get(node)
        if found is None:
            found = self._kinds[node] = self._found(node)
        return found

    def _found(self, node: Node) -> str:
        held = value_of(node)
        if not isinstance(held, torch.Tensor) or held.dtype == torch.bool:
            return ""
        role, is_whole = self._leaves.get(node), _is_whole(held)
        if role is not None or node.op != "call_function":
            if node.op == "get_attr" or role in self._constant:
                return "constant"
            return "counts" if is_whole and held.dtype.itemsize > 1 else ""
        if word(node) in ("arange", "linspace"):
            return "counts"
        kinds = {self._kind(read) for read in node.all_input_nodes if _is_tensor(read)}
        if kinds <= {"constant"}:
            return "constant"
        keeps = operator_of(node).kind == Kind.MOVEMENT or is_cast(node)
        if "" in kinds or not (keeps or is_whole or word(node) in _ARITHMETIC):
            return ""
        return (
            "" if isinstance(node.args[0], (int, float)) else "counts"
        )  # a base, whose exponents are counted

    def leaves_the_field(self, node: Node) -> bool:
        """Is it another function for some tokens: not a number, or one that its dtype has not?"""
        name, held = word(node), node.meta["val"]
        if not isinstance(held, torch.Tensor):
            return False
        if _is_whole(held):
            return self.most(node) > torch.iinfo(held.dtype).max + 1  # -128 is one of int8
        if (is_cast(node) or name in _ARITHMETIC) and self._is_integral(node) and node in self:
            return self.most(node) > _WHOLE.get(held.dtype, _FARTHEST)
        if name in ("sqrt", "rsqrt", "reciprocal"):
            return node.args[0] in self
        if name == "div":
            return argument(node, "other") in self
        if name == "pow":
            return node.args[0] in self and argument(node, "exponent") not in _POWERS
        return False

    def _is_integral(self, node: Any) -> bool:
        """Are its numbers integers, whatever dtype holds them?"""
        held = value_of(node)
        if not isinstance(held, torch.Tensor) or _is_whole(held):
            return isinstance(held, torch.Tensor)
        if node not in self._integral:
            keeps = operator_of(node).kind is Kind.MOVEMENT or word(node) in _OF_INTEGERS
            numbers = [item for item in node.args if isinstance(item, float)]
            self._integral[node] = (
                node.op == "call_function"
                and keeps
                and all(map(float.is_integer, numbers))
                and all(map(self._is_integral, node.all_input_nodes))
            )
        return self._integral[node]

    def most(self, given: Any) -> int:
        """Above the sizes of all integers that it would hold, had its dtype no end."""
        if isinstance(given, (list, tuple)):
            return max(map(self.most, given), default=0)
        if isinstance(given, (int, float)):
            return math.ceil(min(abs(given), _FARTHEST))
        if not isinstance(given, Node):
            return 0
        if given not in self._most:
            self._most[given] = min(self._bound(given), _FARTHEST)
        return self._most[given]

    def _bound(self, node: Node) -> int:
        held, name = value_of(node), word(node)
        if not isinstance(held, torch.Tensor):
            return TOKENS  # a size
        if not self._is_integral(node):
            return 1
        if node.op != "call_function":
            literal = attribute(node) if node.op == "get_attr" and is_literal(node) else None
            if isinstance(literal, torch.Tensor) and literal.numel() and not literal.is_meta:
                return int(literal.long().abs().max())
            return min(self._above, torch.iinfo(held.dtype).max)
        largest = torch.iinfo(held.dtype).max if _is_whole(held) else _FARTHEST
        if operator_of(node).kind is Kind.MOVEMENT and not is_cast(node):
            reads = map(self.most, filter(_is_tensor, node.all_input_nodes))
            return max(reads, default=min(TOKENS, largest))
        given = [self.most(item) for item in (*node.args, *node.kwargs.values())]
        if name in COUNTS:
            return (_length(held.shape) + 1) * max(given, default=1)
        if name in ("pow", "square"):
            power = argument(node, "exponent") if name == "pow" else 2
            is_power = isinstance(power, int) and 0 <= power <= 64
            return given[0] ** power if is_power else _FARTHEST
        if name == _LEFT_SHIFT:
            return given[0] << min(given[1], 64)
        if name in _SUMS_OF_TWO:
            return (given[0] + given[1]) * max([1, *given[2:]])
        if name in _SUMMED:
            sizes = [shape_of(read) for read in node.all_input_nodes if _is_tensor(read)]
            terms = _length(sizes[0]) if name in _OVER_AXES else max(map(_longest, sizes))
            return math.prod(max(1, self.most(read)) for read in node.all_input_nodes) * terms
        if name in _OF_BYTES:
            left, right = node.args[:2]
            bias = argument(node, "bias") if name == _OF_BYTES[1] else None
            terms = _length(shape_of(left)[-1:])  # type: ignore[arg-type]
            return self.most(left) * self.most(right) * terms + self.most(bias)
        if name in _PRODUCTS:
            return math.prod(one + 1 for one in given)
        ends = [argument(node, end) for end in ("min", "max")] if name == "clamp" else []
        if ends and all(isinstance(end, int) for end in ends):
            return min(given[0], max(map(self.most, ends)))
        if is_cast(node):
            source = node.all_input_nodes[0]
            is_any = source.meta["val"].is_floating_point() and self._kind(source) == ""
            return largest if is_any else max(given, default=0)
        return min(max(given, default=0), largest)


def _is_whole(held: torch.Tensor) -> bool:
    return not (is_float(held.dtype) or held.dtype == torch.bool)


def _longest(shape: Sequence[Any]) -> int:
    """Of the axes that weights have: no product sums over the tokens."""
    return max((size for size in shape if isinstance(size, int)), default=TOKENS)


def _length(shape: Sequence[Any]) -> int:
    """Above how many elements there are."""
    return math.prod(size if isinstance(size, int) else TOKENS for size in shape)


def past_rounding(call: operators.Call, found: Any) -> Any:
    """What is left of numbers that are rounded: a difference of two that are equal over the real
    numbers is what rounding has left of them, and not 0.
    """
    given = [item for item in call.given.values() if isinstance(item, Num)]
    if not isinstance(found, Num) or not field.has_zeros(found):
        return found
    return found if any(map(field.has_zeros, given)) else operators.opaque(call)


def _is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)
