"""Float arithmetic in which a term is lost: ``(x + c) - c`` is x over the real numbers, and what
rounding has left of x in a dtype; ``x * c / c`` is no number where c is 0.

What is computed is read as a polynomial in its operands, through casts and views. Where two of them
leave nothing of a term, or little, the step is no arithmetic of the field but a function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.indexed import Indexed
from mla_fusion.fx.kinds import (
    argument,
    filled_with,
    is_cast,
    is_float,
    is_literal,
    is_view,
    operator_of,
    tensor_held,
    word,
)
from mla_fusion.fx.ranges import Ranges
from mla_fusion.fx.walk import input_of
from mla_fusion.operators.known import EXPANDS, RESHAPES, dtype_of, value_of

# powers of values, by what is equal for equal values; no power: a number
Product = tuple[tuple[object, int], ...]
Terms = dict[Product, float]
_MOST = 16  # terms of a polynomial; a step that makes a larger one is a function
# how much smaller a term may become, or how much larger a number may be than what it is added to
_LEFT = {torch.float64: 2.0**-40, torch.float32: 2.0**-8}
_SWAMPED = {torch.float64: 2.0**51, torch.float32: 2.0**22}
_NARROW_LEFT, _NARROW_SWAMPED = 0.5, 2.0**6


class LostTerms:
    """Asked of nodes of one view."""

    def __init__(self, view: Indexed, ranges: Ranges) -> None:
        self._view, self._ranges = view, ranges
        self._terms: dict[Node, Terms] = {}
        self._losing: set[Node] = set()

    def loses(self, node: Node) -> bool:
        """Has it, of floats, less in it than its operands have?"""
        if _rule(node) not in ("added", "multiplied", "quotient") or not _is_float(node):
            return False
        self._of(node)
        return node in self._losing

    def _loses_term(self, dtype: torch.dtype, a: Terms, b: Terms, whole: Terms) -> bool:
        """Is there less in the sum than in a and b, which are not equal?"""
        if len(whole) > _MOST or not whole or _values(a, b) != _values(whole):
            return True
        left = _LEFT.get(dtype, _NARROW_LEFT)
        for one, by in whole.items():
            if abs(by) < left * max(abs(a.get(one, 0.0)), abs(b.get(one, 0.0))):
                return True
        number, others = abs(whole.get((), 0.0)), [abs(by) for one, by in whole.items() if one]
        return bool(others) and number > _SWAMPED.get(dtype, _NARROW_SWAMPED) * max(others)

    def _are_equal(self, node: Node) -> bool:
        """Are the operands equal, or one a number? Then a difference of 0 is exact."""
        numbers = [self._view.number(side) for side in node.all_input_nodes]
        return len(numbers) != 2 or numbers[0] == numbers[1]

    def _is_never_0(self, divisor: Any) -> bool:
        low, high = self._ranges.of(divisor)
        return low > 0 or high < 0

    def _operands(self, node: Node) -> tuple[Terms, Terms]:
        """Of a sum, as they are added."""
        a, b = map(self._of, node.args[:2])
        alpha, reverse = argument(node, "alpha", 1), word(node) == "rsub"
        by = float(alpha) if isinstance(alpha, (int, float)) else 1.0
        a, b = _times(a, {(): -by if reverse else 1.0}), _times(b, {(): 1.0 if reverse else by})
        return (a, _times(b, {(): -1.0})) if word(node) == "sub" else (a, b)

    def _of(self, given: Any) -> Terms:
        if isinstance(given, (int, float)):
            return {(): float(given)} if given else {}
        if not isinstance(given, Node):
            return {((given, 1),): 1.0}
        number = _number(given)
        if number is not None:
            return self._of(number)
        stack = [given] if given not in self._terms else []
        while stack:
            node = stack[-1]
            missing = [read for read in _steps(node) if read not in self._terms]
            if not missing:
                self._terms[stack.pop()] = self._read(node)
            stack += missing
        return self._terms[given]

    def _read(self, node: Node) -> Terms:
        """Its terms; itself alone where it loses one, or is no such step."""
        itself: Terms = {((self._view.number(node), 1),): 1.0}
        if not _steps(node):
            return itself
        rule, loses, found = _rule(node), False, None
        if rule == "added":
            a, b = self._operands(node)
            found = _plus(a, b)
            is_exact = not found and self._are_equal(node)
            loses = not is_exact and self._loses_term(dtype_of(node), a, b, found)
        elif rule in ("multiplied", "quotient"):
            a, b = map(self._of, node.args[:2])
            is_product = rule == "multiplied"
            found = _times(a, b) if is_product else _over(a, b)
            if len(a) * len(b) > _MOST:  # what later steps lose of it would not be seen
                loses = is_product
            elif found and (is_product or not self._is_never_0(node.args[1])):
                loses = not _values(a, b) - {()} <= _values(found)
        elif rule == "negated":
            found = _times(self._of(node.args[0]), {(): -1.0})
        elif rule == "inverted":
            found = _over({(): 1.0}, self._of(node.args[0]))
        else:
            found = self._moved(node)
        if loses:
            self._losing.add(node)
        return itself if loses or not found or len(found) > _MOST else found

    def _moved(self, node: Node) -> Terms:
        """Of a cast or a view: a part is another value than the whole."""
        found = self._of(input_of(node))
        if is_cast(node) or _keeps_order(node):
            return found
        by = self._view.call(node)[0]
        return {
            tuple(((by, value), power) for value, power in one): factor
            for one, factor in found.items()
        }


def _number(node: Node) -> float | None:
    """Which every element of the node is, by the graph itself."""
    held = tensor_held(node) if is_literal(node) else None
    if held is not None and held.numel() == 1 and not held.is_complex():
        return float(held)
    return filled_with(node)


def _rule(node: Node) -> str:
    """Which of these steps it is; "" of any other node."""
    rule = _RULES.get(word(node), "")
    if rule in ("negated", "inverted"):
        return rule
    is_one = rule and len(node.args) > 1 and argument(node, "rounding_mode") is None
    return rule if is_one else ""


_RULES = {
    "add": "added",
    "sub": "added",
    "rsub": "added",
    "mul": "multiplied",
    "div": "quotient",
    "neg": "negated",
    "reciprocal": "inverted",
}


def _steps(node: Node) -> list[Node]:
    """What a step of sums and products, a view or a cast reads; nothing of any other node."""
    if node.op != "call_function" or not _is_float(node):
        return []
    source = input_of(node)
    if _rule(node):
        return [read for read in node.args[:2] if isinstance(read, Node)]
    passes = source is not None and _is_float(source) and (is_cast(node) or is_view(node))
    return [source] if passes and source is not None else []


def _keeps_order(node: Node) -> bool:
    operator = operator_of(node)
    return operator.row.form in RESHAPES or operator.row.word in EXPANDS


def _is_float(node: Node) -> bool:
    held = value_of(node)
    return isinstance(held, torch.Tensor) and is_float(held.dtype)


def _plus(a: Terms, b: Terms) -> Terms:
    found = {one: a.get(one, 0.0) + b.get(one, 0.0) for one in {**a, **b}}
    return {one: by for one, by in found.items() if by}


def _times(a: Terms, b: Terms) -> Terms:
    found: Terms = {}
    for one, by in a.items() if len(a) * len(b) <= _MOST else ():
        for other, more in b.items():
            powers: dict[object, int] = dict(one)
            for value, power in other:
                powers[value] = powers.get(value, 0) + power
            product = tuple(sorted(((v, p) for v, p in powers.items() if p), key=str))
            found[product] = found.get(product, 0.0) + by * more
    return {one: by for one, by in found.items() if by}


def _over(a: Terms, b: Terms) -> Terms | None:
    if len(b) != 1:
        return None
    ((product, by),) = b.items()
    return _times(a, {tuple((value, -power) for value, power in product): 1 / by})


def _values(*terms: Terms) -> set[object]:
    """What the terms are made of; () of a number."""
    found = {value for each in terms for one in each for value, _ in one}
    return found | ({()} if any(() in each for each in terms) else set())
