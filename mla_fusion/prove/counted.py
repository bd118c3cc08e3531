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

from mla_fusion.compat import bounds_of
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
from mla_fusion.fx.sizes import is_size
from mla_fusion.operators.known import COUNTS, rule_named, rule_of, rules, shape_of, value_of
from mla_fusion.prove import field, operators
from mla_fusion.prove.field import Num

_POWERS = (2, 3)
TOKENS = 1 << 19  # of a graph, and above what positions and slots are taken to be
_FARTHEST = 1 << 128  # no dtype holds so much
_WHOLE = {torch.float32: 1 << 24, torch.float64: 1 << 53}  # up to which a dtype has all integers
# of rules: those under which floats that hold integers go on holding them, and those under which
# they are no counts any more
_OF_INTEGERS = frozenset(("added", "multiplied", "same", "summed"))
_NO_ARITHMETIC = frozenset(("", "bytes_summed", "clamped"))


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
        if "" in kinds or not (keeps or is_whole or rule_named(node, "size") not in _NO_ARITHMETIC):
            return ""
        return (
            "" if isinstance(node.args[0], (int, float)) else "counts"
        )  # a base, whose exponents are counted

    def leaves_the_field(self, node: Node) -> bool:
        """Is it another function for some tokens: not a number, or one that its dtype has not?"""
        rule, held = rule_named(node, "size"), node.meta["val"]
        if not isinstance(held, torch.Tensor):
            return False
        if _is_whole(held):
            return self.most(node) > torch.iinfo(held.dtype).max + 1  # -128 is one of int8
        if (
            (is_cast(node) or rule not in _NO_ARITHMETIC)
            and self._is_integral(node)
            and node in self
        ):
            return self.most(node) > _WHOLE.get(held.dtype, _FARTHEST)
        if rule == "root":
            return node.args[0] in self
        if rule == "quotient":
            return argument(node, "other") in self
        if rule == "power":
            return node.args[0] in self and argument(node, "exponent", 2) not in _POWERS
        return False

    def _is_integral(self, node: Any) -> bool:
        """Are its numbers integers, whatever dtype holds them?"""
        held = value_of(node)
        if not isinstance(held, torch.Tensor) or _is_whole(held):
            return isinstance(held, torch.Tensor)
        if node not in self._integral:
            kind, rule = operator_of(node).kind, rule_named(node, "size")
            keeps = kind is Kind.MOVEMENT or rule in _OF_INTEGERS
            given = (*node.args, *node.kwargs.values())
            numbers = [item for item in given if isinstance(item, float)]
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
        held = value_of(node)
        if not isinstance(held, torch.Tensor):
            return self._above if is_number_of_call(node) else TOKENS
        if not self._is_integral(node):
            return 1
        if node.op != "call_function":
            literal = attribute(node) if node.op == "get_attr" and is_literal(node) else None
            if isinstance(literal, torch.Tensor) and literal.numel() and not literal.is_meta:
                return int(literal.long().abs().max())
            return min(self._above, torch.iinfo(held.dtype).max)
        if operator_of(node).kind is Kind.MOVEMENT and not is_cast(node):
            reads = map(self.most, filter(_is_tensor, node.all_input_nodes))
            return max(reads, default=min(TOKENS, _largest(held)))
        given = [self.most(item) for item in (*node.args, *node.kwargs.values())]
        if word(node) in COUNTS:
            return (_length(held.shape) + 1) * max(given, default=1)
        rule = rule_of(node, "size", RULES)
        if rule is not None:
            return rule(self, node, given)
        if is_cast(node):
            source = node.all_input_nodes[0]
            is_any = source.meta["val"].is_floating_point() and self._kind(source) == ""
            return _largest(held) if is_any else max(given, default=0)
        return self._same(node, given)

    # -- rules: above the sizes of the result, given what is above those of the arguments

    def _same(self, node: Node, given: Sequence[int]) -> int:
        return min(max(given, default=0), _largest(node.meta["val"]))

    def _added(self, node: Node, given: Sequence[int]) -> int:
        return (given[0] + given[1]) * max([1, *given[2:]])

    def _multiplied(self, node: Node, given: Sequence[int]) -> int:
        return math.prod(one + 1 for one in given)

    def _power(self, node: Node, given: Sequence[int]) -> int:
        power = argument(node, "exponent", 2)
        return given[0] ** power if isinstance(power, int) and 0 <= power <= 64 else _FARTHEST

    def _shifted(self, node: Node, given: Sequence[int]) -> int:
        return given[0] << min(given[1], 64)

    def _summed(self, node: Node, given: Sequence[int]) -> int:
        """Of a product, one matrix by itself too, or along axes."""
        lists = (arg if isinstance(arg, (list, tuple)) else (arg,) for arg in node.args)
        factors = [one for items in lists for one in items if isinstance(one, Node)]
        sizes = [shape_of(factor) for factor in factors if _is_tensor(factor)]
        terms = max(map(_longest, sizes)) if len(sizes) > 1 else _length(sizes[0])
        return math.prod(max(1, self.most(factor)) for factor in factors) * terms

    def _bytes_summed(self, node: Node, given: Sequence[int]) -> int:
        """In int32; two of bytes, and a bias where the operator has one."""
        terms = _length(shape_of(node.all_input_nodes[0])[-1:])
        return given[0] * given[1] * terms + self.most(argument(node, "bias"))

    def _clamped(self, node: Node, given: Sequence[int]) -> int:
        ends = [argument(node, end) for end in ("min", "max")]
        if not all(isinstance(end, int) for end in ends):
            return self._same(node, given)
        return min(given[0], max(map(self.most, ends)))


def is_number_of_call(node: Node) -> bool:
    """Is it an int argument, or made of one? A size is not below 0."""
    return is_size(node) and bounds_of(value_of(node))[0] < 0


def _is_whole(held: torch.Tensor) -> bool:
    return not (is_float(held.dtype) or held.dtype == torch.bool)


def _largest(held: torch.Tensor) -> int:
    """What its dtype holds at most."""
    return torch.iinfo(held.dtype).max if _is_whole(held) else _FARTHEST


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


# By the names that rows of the operator table give.
RULES = rules(
    Counted._same,
    Counted._added,
    Counted._multiplied,
    Counted._power,
    Counted._shifted,
    Counted._summed,
    Counted._bytes_summed,
    Counted._clamped,
) | dict.fromkeys(("root", "quotient"), Counted._same)
