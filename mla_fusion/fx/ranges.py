"""Between which numbers every element of a node lies, whatever the graph's inputs hold: interval arithmetic.

From literals, lifted constants and what operators do for any input: a square is never negative, a cosine never above 1.
What is not known is unbounded. NaN is left out of account: where a graph computes one, so does the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import bounds_of
from mla_fusion.fx import contraction
from mla_fusion.fx.indexed import Indexed
from mla_fusion.fx.kinds import argument, filled_with, is_cast, is_getitem, is_view, op_name
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.sizes import is_symbolic

Range = tuple[float, float]

UNBOUNDED: Range = (-math.inf, math.inf)
_ABOVE_ZERO = 5e-324  # the least positive float64
_DEEPEST = 64  # operands above a node that are asked: a norm's statistic is a few steps below a square


class Ranges:
    """The ranges of one view's nodes, each computed when first asked for."""

    def __init__(self, view: Indexed, integer_inputs: Range = UNBOUNDED) -> None:
        """``integer_inputs``: what integers that come into the graph are trusted with."""
        self._view, self._integer_inputs = view, integer_inputs
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
        meaning = node.meta.get("val")
        if is_symbolic(meaning) or isinstance(meaning, (int, float)):
            return self._of_size(meaning)
        if isinstance(meaning, torch.Tensor) and meaning.is_complex():
            return UNBOUNDED
        if isinstance(meaning, torch.Tensor) and meaning.dtype == torch.bool:
            return 0.0, 1.0
        if self._view.is_constant(node):
            return self._of_constant(node)
        if node.op in ("placeholder", "get_attr"):
            return UNBOUNDED if _keeps_floats(node) else self._integer_inputs
        filled = filled_with(node)
        if filled is not None:
            return UNBOUNDED if math.isnan(filled) else (filled, filled)
        if is_view(node) or is_cast(node):
            source = node.args[0]
            if is_getitem(node) and isinstance(source, Node):
                source = source.args[0]
            inner = self.of(source, depth)
            return inner if _keeps_floats(node) else _whole(inner)
        if is_getitem(node) and op_name(node.args[0]) in _SPREADS and node.args[1] == 0:  # type: ignore[arg-type]
            return 0.0, math.inf
        rule = _RULES.get(op_name(node))
        if rule is not None:
            return rule(lambda value: self.of(value, depth), node)
        if self._view.squares_of(node) is not None:
            return 0.0, math.inf
        product = contraction.read(node)
        if product is None or product.bias is not None or product.scales is not None:
            return UNBOUNDED
        signs = [self.of(side, depth)[0] >= 0 for side in (product.left, product.right)]
        return (0.0, math.inf) if all(signs) and product.factors[0] >= 0 else UNBOUNDED

    def _of_size(self, size: Any) -> Range:
        if isinstance(size, (int, float)):
            return float(size), float(size)
        if not isinstance(size, torch.SymInt):
            return UNBOUNDED
        return bounds_of(size)

    def _of_constant(self, node: Node) -> Range:
        above = nodes_between((), node)
        if any("::empty" in op_name(step) or "::new_empty" in op_name(step) for step in above):
            return UNBOUNDED  # memory not yet written
        program = Program([], above, self._view.binding, exact=True)
        value = program.run([])[program.slot(node)]
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.is_complex():
            return UNBOUNDED
        if any(is_symbolic(size) for size in node.meta["val"].shape):
            # a count of positions has more of them at other sizes
            return (float(value.min()), math.inf) if not bool((value < 0).any()) else UNBOUNDED
        return float(value.min()), float(value.max())


def _held(found: Range, node: Node) -> Range:
    """An integer that its dtype cannot hold wraps around: anything, then."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not _keeps_floats(node) and value.dtype != torch.bool:
        limits = torch.iinfo(value.dtype)
        if found != UNBOUNDED and not (limits.min <= found[0] and found[1] <= limits.max):
            return UNBOUNDED
    return found


def _keeps_floats(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _whole(inner: Range) -> Range:
    """Of a number cut to an integer; not known of an infinite one."""
    low, high = inner
    return math.floor(low) if math.isfinite(low) else low, math.ceil(high) if math.isfinite(high) else high


_SPREADS = frozenset(("aten::var_mean", "aten::std_mean"))  # whose first result is the spread

Of = Callable[[Any], Range]


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def multiplied(a: Range, b: Range) -> Range:
    """Of the product of two independent values."""
    ends = [_times(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _added(of: Of, node: Node) -> Range:
    return _sum(of(node.args[0]), _scaled(of(node.args[1]), argument(node, "alpha", 1)))


def _subtracted(of: Of, node: Node) -> Range:
    low, high = _scaled(of(node.args[1]), argument(node, "alpha", 1))
    return _sum(of(node.args[0]), (-high, -low))


def _sum(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _scaled(a: Range, by: Any) -> Range:
    return multiplied(a, (float(by), float(by))) if isinstance(by, (int, float)) else UNBOUNDED


def _product(of: Of, node: Node) -> Range:
    a, b = node.args[:2]
    if a is b:
        return _square(of(a))
    return multiplied(of(a), of(b))


def _square(inner: Range) -> Range:
    low, high = inner
    ends = (low * low, high * high)
    return (0.0 if low <= 0 <= high else min(ends)), max(ends)


def _product_added(of: Of, node: Node) -> Range:
    """addcmul: a + value * b * c"""
    a, b, c = node.args[:3]
    product = _square(of(b)) if b is c else multiplied(of(b), of(c))
    return _sum(of(a), _scaled(product, argument(node, "value", 1)))


def _quotient(of: Of, node: Node) -> Range:
    if argument(node, "rounding_mode") is not None:
        return _floor_quotient(of, node)
    return multiplied(of(node.args[0]), _inverse(of(node.args[1])))


def _floor_quotient(of: Of, node: Node) -> Range:
    return _whole(multiplied(of(node.args[0]), _inverse(of(node.args[1]))))


def _inverse(inner: Range) -> Range:
    low, high = inner
    if low > 0 or high < 0:
        ends = [1 / end if end and math.isfinite(end) else 0.0 for end in inner]
        if low > 0:
            return max(min(ends), 0.0 if math.isinf(high) else _ABOVE_ZERO), max(ends)
        return min(ends), max(ends)
    return UNBOUNDED


def _power(of: Of, node: Node) -> Range:
    exponent, inner = node.args[1], of(node.args[0])
    if not isinstance(exponent, (int, float)):
        return UNBOUNDED
    if exponent == 2:
        return _square(inner)
    if exponent % 2 == 0 and exponent > 0:
        return 0.0, math.inf
    if inner[0] >= 0 and exponent > 0:
        return _raised(inner[0], exponent), _raised(inner[1], exponent)
    if inner[0] > 0:
        return _inverse((_raised(inner[0], -exponent), _raised(inner[1], -exponent)))
    return UNBOUNDED


def _raised(base: float, exponent: float) -> float:
    """Of a base that is not negative; no float64 holds more than infinity."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _root(of: Of, node: Node) -> Range:
    low, high = of(node.args[0])
    return math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0))


def _inverse_root(of: Of, node: Node) -> Range:
    low, high = of(node.args[0])
    return _inverse((math.sqrt(low), math.sqrt(high))) if low > 0 else (0.0, math.inf)


def _sum_along(of: Of, node: Node) -> Range:
    low, high = of(node.args[0])
    return (0.0 if low >= 0 else -math.inf), (0.0 if high <= 0 else math.inf)


def _same_as_input(of: Of, node: Node) -> Range:
    return of(node.args[0])


def _union(of: Of, node: Node) -> Range:
    """Of several tensors joined: cat, stack."""
    parts = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    return _hull([of(part) for part in parts])


def _hull(ranges: list[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _clamped(of: Of, node: Node) -> Range:
    low, high = of(node.args[0])
    least, most = argument(node, "min"), argument(node, "max")
    if least is not None:
        bound = of(least)
        low, high = max(low, bound[0]), max(high, bound[1])
    if most is not None:
        bound = of(most)
        low, high = min(low, bound[0]), min(high, bound[1])
    return low, high


def _largest(of: Of, node: Node) -> Range:
    a, b = of(node.args[0]), of(node.args[1])
    return max(a[0], b[0]), max(a[1], b[1])


def _smallest(of: Of, node: Node) -> Range:
    a, b = of(node.args[0]), of(node.args[1])
    return min(a[0], b[0]), min(a[1], b[1])


def _magnitude(of: Of, node: Node) -> Range:
    low, high = of(node.args[0])
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _rectified(of: Of, node: Node) -> Range:
    low, high = of(node.args[0])
    return max(low, 0.0), max(high, 0.0)


def _remainder(of: Of, node: Node) -> Range:
    """Of torch.remainder: the sign of the divisor; and the number itself where that is smaller."""
    (low, high), divisor = of(node.args[0]), of(node.args[1])
    if divisor[0] <= 0:
        return UNBOUNDED
    whole = not _keeps_floats(node)
    top = divisor[1] - 1 if whole else divisor[1]
    return (0.0, min(high, top)) if low >= 0 else (0.0, top)


def _masked(of: Of, node: Node) -> Range:
    """``a & b`` of integers: no more than a non-negative one of them."""
    if _keeps_floats(node):
        return UNBOUNDED
    tops = [high for low, high in (of(node.args[0]), of(node.args[1])) if low >= 0]
    return (0.0, min(tops)) if tops else UNBOUNDED


def _shifted_right(of: Of, node: Node) -> Range:
    (low, high), by = of(node.args[0]), of(node.args[1])
    if by[0] != by[1] or by[0] < 0:
        return UNBOUNDED
    scale = 2.0 ** by[0]
    return (math.floor(low / scale) if math.isfinite(low) else low), high / scale


def _shifted_left(of: Of, node: Node) -> Range:
    by = of(node.args[1])
    return multiplied(of(node.args[0]), (2.0 ** by[0],) * 2) if by[0] == by[1] and 0 <= by[0] < 63 else UNBOUNDED


def _either(of: Of, node: Node) -> Range:
    """where(condition, a, b)"""
    return _hull([of(side) for side in node.args[1:3]]) if len(node.args) > 2 else UNBOUNDED


def _filled_where(of: Of, node: Node) -> Range:
    """masked_fill(a, mask, number)"""
    return _hull([of(node.args[0]), of(node.args[2])])


def _negated(of: Of, node: Node) -> Range:
    low, high = of(node.args[0])
    return -high, -low


def _always(low: float, high: float) -> Callable[[Of, Node], Range]:
    return lambda of, node: (low, high)


_RULES: dict[str, Callable[[Of, Node], Range]] = {
    "aten::add": _added,
    "aten::sub": _subtracted,
    "aten::neg": _negated,
    "aten::mul": _product,
    "aten::addcmul": _product_added,
    "aten::div": _quotient,
    "aten::floor_divide": _floor_quotient,
    "aten::square": lambda of, node: _square(of(node.args[0])),
    "aten::pow": _power,
    "aten::reciprocal": lambda of, node: _inverse(of(node.args[0])),
    "aten::sqrt": _root,
    "aten::rsqrt": _inverse_root,
    "aten::sum": _sum_along,
    "aten::cumsum": _sum_along,
    "aten::linalg_vector_norm": _always(0.0, math.inf),
    "aten::norm": _always(0.0, math.inf),
    "aten::var": _always(0.0, math.inf),
    "aten::std": _always(0.0, math.inf),
    "aten::exp": _always(_ABOVE_ZERO, math.inf),
    "aten::exp2": _always(_ABOVE_ZERO, math.inf),
    "aten::sigmoid": _always(_ABOVE_ZERO, 1.0),
    "aten::_softmax": _always(0.0, 1.0),
    "aten::softmax": _always(0.0, 1.0),
    "aten::tanh": _always(-1.0, 1.0),
    "aten::sin": _always(-1.0, 1.0),
    "aten::cos": _always(-1.0, 1.0),
    "aten::mean": _same_as_input,
    "aten::amax": _same_as_input,
    "aten::amin": _same_as_input,
    "aten::repeat": _same_as_input,
    "aten::repeat_interleave": _same_as_input,
    "aten::flip": _same_as_input,
    "aten::roll": _same_as_input,
    "aten::index": _same_as_input,
    "aten::_unsafe_index": _same_as_input,
    "aten::index_select": _same_as_input,
    "aten::gather": _same_as_input,
    "aten::take": _same_as_input,
    "aten::embedding": _same_as_input,
    "aten::masked_fill": _filled_where,
    "aten::where": _either,
    "aten::cat": _union,
    "aten::stack": _union,
    "aten::clamp": _clamped,
    "aten::clamp_min": _clamped,
    "aten::clamp_max": _clamped,
    "aten::maximum": _largest,
    "aten::minimum": _smallest,
    "aten::abs": _magnitude,
    "aten::relu": _rectified,
    "aten::remainder": _remainder,
    "aten::bitwise_and": _masked,
    "aten::__and__": _masked,
    "aten::bitwise_right_shift": _shifted_right,
    "aten::__rshift__": _shifted_right,
    "aten::bitwise_left_shift": _shifted_left,
    "aten::__lshift__": _shifted_left,
    "aten::argmax": _always(0.0, math.inf),
    "aten::argmin": _always(0.0, math.inf),
    "aten::argsort": _always(0.0, math.inf),
    "aten::nonzero": _always(0.0, math.inf),
    "aten::bucketize": _always(0.0, math.inf),
    "aten::searchsorted": _always(0.0, math.inf),
}
