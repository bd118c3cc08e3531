"""Between which numbers every element of a node lies, whatever the graph's inputs hold: interval
arithmetic.

From literals, lifted constants and what operators do for any input: a square is never negative, a
cosine never above 1. What is not known is unbounded. NaN is left out of account: where a graph
computes one, so does the kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import bounds_of
from mla_fusion.fx import contraction
from mla_fusion.fx.indexed import Indexed
from mla_fusion.fx.kinds import (
    filled_with,
    is_cast,
    is_getitem,
    is_literal,
    is_view,
    one_dtype,
    op_name,
    tensor_held,
    word,
)
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.range_rules import RULES, UNBOUNDED, Range, keeps_floats, whole
from mla_fusion.fx.sizes import has_symbols, is_symbolic
from mla_fusion.operators.known import rule_of, value_of

_SPREADS = frozenset(("var_mean", "std_mean"))  # whose first result is the spread
# operands above a node that are asked: a norm's statistic is a few steps below a square
_DEEPEST = 64


class Ranges:
    """The ranges of one view's nodes, each computed when first asked for."""

    def __init__(
        self, view: Indexed, integer_inputs: Range = UNBOUNDED, largest_size: float = math.inf
    ) -> None:
        """``integer_inputs``: what integers that come into the graph are trusted with;
        ``largest_size``: what symbolic sizes are.
        """
        self._view, self._integer_inputs = view, integer_inputs
        self._largest_size = largest_size
        self._known: dict[Node, Range] = {}

    def of(self, value: Any, depth: int = 0) -> Range:
        """The range of a node's elements, or of a literal."""
        if isinstance(value, (bool, int, float)):
            return float(value), float(value)
        if not isinstance(value, Node):
            return UNBOUNDED
        known = self._known.get(value)
        if known is None:
            if depth > _DEEPEST:
                return UNBOUNDED
            known = self._known[value] = _held(self._read(value, depth + 1), value)
        return known

    def positive(self, value: Any) -> bool:
        return self.of(value)[0] > 0

    def _read(self, node: Node, depth: int) -> Range:
        meaning = value_of(node)
        if is_symbolic(meaning) or isinstance(meaning, (int, float)):
            return self._of_size(meaning)
        if isinstance(meaning, torch.Tensor) and meaning.is_complex():
            return UNBOUNDED
        if isinstance(meaning, torch.Tensor) and meaning.dtype == torch.bool:
            return 0.0, 1.0
        sizes = meaning.shape if isinstance(meaning, torch.Tensor) else ()
        if self._view.is_constant(node) and not has_symbols(sizes):
            return self._of_constant(node)
        if node.op in ("placeholder", "get_attr"):
            return UNBOUNDED if keeps_floats(node) else self._of_integers(node)
        filled = filled_with(node)
        if filled is not None:
            return UNBOUNDED if math.isnan(filled) else (filled, filled)
        if is_view(node) or is_cast(node):
            source = node.args[0]
            if is_getitem(node) and isinstance(source, Node):
                source = source.args[0]
            inner = self.of(source, depth)
            return inner if keeps_floats(node) else whole(inner)
        if is_getitem(node) and word(node.args[0]) in _SPREADS and node.args[1] == 0:  # type: ignore[arg-type]
            return 0.0, math.inf
        rule = rule_of(node, "range", RULES)
        if rule is not None:
            return rule(lambda value: self.of(value, depth), node)
        if self._view.squares_of(node) is not None:
            return 0.0, math.inf
        product = contraction.read(node)
        if product is None or product.bias is not None or product.scales is not None:
            return UNBOUNDED
        signs = [self.of(side, depth)[0] >= 0 for side in (product.left, product.right)]
        return (0.0, math.inf) if all(signs) and product.factors[0] >= 0 else UNBOUNDED

    def _of_integers(self, node: Node) -> Range:
        """Of integers that come in: of a literal those that it holds. What else holds a negative
        number is trusted with nothing.
        """
        held = tensor_held(node)
        if held is None or not held.numel():
            return self._integer_inputs
        if is_literal(node):
            return float(held.min()), float(held.max())
        return UNBOUNDED if bool((held < 0).any()) else self._integer_inputs

    def _of_size(self, size: Any) -> Range:
        if isinstance(size, (int, float)):
            return float(size), float(size)
        if not isinstance(size, torch.SymInt):
            return UNBOUNDED
        low, high = bounds_of(size)
        return low, max(low, min(high, self._largest_size))

    def _of_constant(self, node: Node) -> Range:
        above = nodes_between((), node)
        if any("::empty" in op_name(step) or "::new_empty" in op_name(step) for step in above):
            return UNBOUNDED  # memory not yet written
        program = Program([], above, self._view.binding, exact=True)
        value = program.run([])[program.slot(node)]
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.is_complex():
            return UNBOUNDED
        return float(value.min()), float(value.max())


def _held(found: Range, node: Node) -> Range:
    """As its dtype holds it: a float is rounded (4095 is 4096 in bfloat16), and an integer that its
    dtype cannot hold wraps around: anything, then.
    """
    dtype = one_dtype(node)
    if dtype is None or dtype == torch.bool:
        return found
    if dtype.is_floating_point:
        low, high = torch.tensor(found, dtype=torch.float64).to(dtype).tolist()
        return (low, high) if low <= high else UNBOUNDED  # a float8 may have no infinity
    if dtype.is_complex:
        return UNBOUNDED
    return found if fits(found, dtype) else UNBOUNDED


def fits(numbers: Range, dtype: torch.dtype) -> bool:
    """Does a dtype of integers hold every integer in the range?"""
    limits = torch.iinfo(dtype)
    return limits.min <= numbers[0] and numbers[1] <= limits.max


def keeps_integers(wide: torch.dtype, narrow: torch.dtype, numbers: Range) -> bool:
    """Does ``wide`` hold every integer of ``narrow``, or at least those in the range?"""
    held = torch.iinfo(narrow)
    return fits((held.min, held.max), wide) or fits(numbers, wide)
