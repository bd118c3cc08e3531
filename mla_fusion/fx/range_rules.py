"""What an operator makes of the ranges of its operands. A rule must hold for every input that these
admit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import argument
from mla_fusion.operators.known import rules, value_of

Range = tuple[float, float]

UNBOUNDED: Range = (-math.inf, math.inf)
_ABOVE_ZERO = 5e-324  # the least positive float64
_MOST_ELEMENTS = 2.0**56  # of a tensor, whose bytes have addresses


def keeps_floats(node: Node) -> bool:
    value = value_of(node)
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def whole(inner: Range) -> Range:
    """Of a number cut to an integer; not known of an infinite one."""
    low, high = inner
    return math.floor(low) if math.isfinite(low) else low, math.ceil(high) if math.isfinite(
        high
    ) else high


Of = Callable[[Any], Range]


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def multiplied(a: Range, b: Range) -> Range:
    """Of the product of two independent values."""
    ends = [_times(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _added(of: Of, node: Node) -> Range:
    return _sum(of(node.args[0]), _scaled(of(node.args[1]), argument(node, "alpha", 1)))


def _counted(of: Of, node: Node) -> Range:
    """Positions, of which there are more at other sizes, but no more than memory holds."""
    (low, high), step = of(argument(node, "start", 0)), argument(node, "step", 1)
    if not isinstance(step, (int, float)):
        return UNBOUNDED
    if step <= 0:
        return -math.inf, high
    (_, end), (_, length) = of(argument(node, "end")), of(argument(node, "length"))
    return low, min(end, high + step * min(length, _MOST_ELEMENTS))


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
    return whole(multiplied(of(node.args[0]), _inverse(of(node.args[1]))))


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
    top = divisor[1] if keeps_floats(node) else divisor[1] - 1
    return (0.0, min(high, top)) if low >= 0 else (0.0, top)


def _masked(of: Of, node: Node) -> Range:
    """``a & b`` of integers: no more than a non-negative one of them."""
    if keeps_floats(node):
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
    return (
        multiplied(of(node.args[0]), (2.0 ** by[0],) * 2)
        if by[0] == by[1] and 0 <= by[0] < 63
        else UNBOUNDED
    )


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


# By the names that rows of the operator table give.
RULES: dict[str, Callable[[Of, Node], Range]] = {
    **rules(
        _added,
        _clamped,
        _counted,
        _either,
        _filled_where,
        _floor_quotient,
        _inverse_root,
        _largest,
        _magnitude,
        _masked,
        _negated,
        _power,
        _product,
        _product_added,
        _quotient,
        _rectified,
        _remainder,
        _root,
        _same_as_input,
        _shifted_left,
        _shifted_right,
        _smallest,
        _subtracted,
        _sum_along,
        _union,
    ),
    "fraction": _always(0.0, 1.0),
    "inverse": lambda of, node: _inverse(of(node.args[0])),
    "positive": _always(_ABOVE_ZERO, math.inf),
    "share": _always(_ABOVE_ZERO, 1.0),
    "sine": _always(-1.0, 1.0),
    "square": lambda of, node: _square(of(node.args[0])),
    "unsigned": _always(0.0, math.inf),
}
