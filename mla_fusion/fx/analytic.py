"""Can a proof go on behind a step? It can where the step moves elements or is analytic; else the proof ends there.

An operator's class is in the table; here the operands are looked at. A root, a logarithm or a quotient is analytic
where its argument keeps its sign: ``sqrt((v - 100) ** 2)`` is ``abs(v - 100)``, a choice. A choice whose outcome is the
same for every input does not end a proof: ``clamp_min(0)`` of a sum of squares, ``where`` with a mask of literals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.indexed import Indexed
from mla_fusion.fx.kinds import MODEL_FLOATS, argument, is_cast, kind_of, op_name, operator_of, reduces_a_symbolic_axis
from mla_fusion.fx.operators import GATHER, PLACED_WRITERS, QUANTISING, Kind
from mla_fusion.fx.ranges import Ranges
from mla_fusion.fx.walk import input_of, origin, upward, views_and_casts

FLOOR = 1e-10  # a floor under a norm that no row of bfloat16 numbers comes near (F.normalize: 1e-12)
_DISTINCT = 3  # elements from which on the zeros of their sum of squares leave the domain connected


@dataclass(frozen=True)
class Barrier:
    """A step behind which nothing is known of a product's elements.

    code     "step.choice", "step.random", "step.unknown" or "tokens.mixed"
    detail   what the step does, for messages
    """

    code: str
    detail: str

    @property
    def is_opaque(self) -> bool:
        """Can the step not be run on probes?"""
        return self.code in ("step.random", "step.unknown")


class Steps:
    """Asks of each node that depends on a product whether a proof can go on behind it."""

    def __init__(self, view: Indexed, ranges: Ranges) -> None:
        self._view, self._ranges = view, ranges

    def barrier(self, node: Node, everywhere: bool = False) -> Barrier | None:
        """Why facts end at the node, or None where they do not.

        ``everywhere``: must roots and quotients keep to their domain of tables too, not of products alone?
        """
        entry = operator_of(node)
        kind, name = entry.kind, entry.name
        if (kind is Kind.MOVEMENT and not entry.cast) or (kind is Kind.ANALYTIC and name not in _LOOKED_AT):
            return None  # most are such
        kind = kind_of(node)
        if kind is Kind.RANDOM:
            return Barrier("step.random", f"{node.name} ({node.target}) draws random numbers")
        if kind in (Kind.OPAQUE, Kind.EFFECT):
            return Barrier("step.unknown", f"{node.name} ({node.target or node.op}) {kind.value}")
        if kind is Kind.MOVEMENT:
            return self._cast(node) if is_cast(node) else None
        if kind is Kind.ANALYTIC:
            reason = self._singular(node, name, everywhere) or _saturates(node, name, everywhere) or _swamps(node, name)
            return Barrier("step.choice", f"{node.name} ({node.target}): {reason}") if reason else None
        if kind is Kind.GATHER or kind is Kind.WRITER:
            return self._moved_by_index(node, name)
        return None if self._is_inert(node, name) else Barrier("step.choice", _what_it_picks(node))

    def of_sizes(self, node: Node, size: Node | None) -> Barrier | None:
        """Why probes show what holds at one length alone: the node computes with a size, or sums over such an axis."""
        if size is not None:
            detail = f"{node.name} ({node.target}) computes with {size.name}, which is another number at other lengths"
        elif reduces_a_symbolic_axis(node):
            detail = f"{node.name} ({node.target}) sums over an axis of symbolic length"
        else:
            return None
        return Barrier("tokens.mixed", detail)

    def _cast(self, node: Node) -> Barrier | None:
        """A cast among a model's floats rounds, and no more; one to an integer picks."""
        value = node.meta.get("val")
        dtype = value.dtype if isinstance(value, torch.Tensor) else None
        source = node.args[0] if node.args else None
        before = source.meta["val"].dtype if isinstance(source, Node) else None
        floats = (*MODEL_FLOATS, torch.complex64, torch.complex128, torch.complex32)
        if dtype in floats or dtype == before or (before in _INTEGERS and dtype in _INTEGERS):
            return None
        return Barrier("step.choice", f"{node.name} casts to {str(dtype).removeprefix('torch.')}")

    # -- analytic where it is defined

    def _singular(self, node: Node, name: str, everywhere: bool) -> str:
        """Why the argument of an analytic operator may cross a point where the operator is not analytic, or ""."""
        argued = _ARGUMENT_OF.get(name)
        by = argued(node) if argued is not None else None
        if not isinstance(by, Node) or not (everywhere or self._view.depends_on_products(by)):
            return ""  # a rational function of a table's entries, or no division at all
        low, high = self._ranges.of(by)
        if low > 0 or high < 0 or self._is_sum_of_squares(by, name) or self._adds_an_input(by):
            return ""
        return f"{by.name} is not known to keep its sign"

    def _adds_an_input(self, node: Node) -> bool:
        """``mean(u ** 2) + eps`` with eps handed in at run time; such a norm is refused by name (norm.runtime_eps)."""
        if op_name(node) != "aten::add" or len(node.args) < 2:
            return False
        for one, other in (node.args[:2], node.args[1::-1]):
            value = other.meta.get("val") if isinstance(other, Node) else None
            single = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
            if not (single and isinstance(other, Node)):
                continue
            if origin(other, views_and_casts).op == "placeholder" and self._ranges.of(one)[0] >= 0:
                return True
        return False

    def _is_sum_of_squares(self, node: Node, name: str) -> bool:
        """A sum of the squares of distinct elements of a product: it is zero for the zero row alone."""
        if name in ("aten::linalg_vector_norm", "aten::norm", "aten::std"):
            return self._are_distinct(node)
        inner = origin(node, _scalings)
        while op_name(inner) in ("aten::sqrt", "aten::rsqrt") and isinstance(inner.args[0], Node):
            inner = origin(inner.args[0], _scalings)
        if op_name(inner) in ("aten::linalg_vector_norm", "aten::norm"):
            return self._are_distinct(inner.args[0])
        if op_name(inner) not in ("aten::sum", "aten::mean") or not isinstance(inner.args[0], Node):
            product = self._view.squares_of(inner)
            return product is not None and self._are_distinct(product)
        squared = origin(inner.args[0], views_and_casts)
        is_square = (
            op_name(squared) == "aten::square"
            or (op_name(squared) == "aten::pow" and squared.args[1] == 2)
            or (op_name(squared) == "aten::mul" and squared.args[0] is squared.args[1])
        )
        return is_square and self._are_distinct(squared.args[0])

    def _are_distinct(self, node: Any) -> bool:
        """Are they elements of one product, each met once, many in a row?"""
        if not isinstance(node, Node):
            return False
        width = node.meta["val"].shape[-1:]
        *steps, node = upward(node, _scalings)
        if any("expand" in op_name(step) for step in steps):
            return False
        return node in self._view.contractions and bool(width) and isinstance(width[0], int) and width[0] >= _DISTINCT

    # -- indices

    def _moved_by_index(self, node: Node, name: str) -> Barrier | None:
        """Movement where the index is a literal of the graph; what an input's values pick is a choice."""
        if name in PLACED_WRITERS:
            return None
        indices = [arg for arg in node.all_input_nodes if _is_integer(arg) and not self._view.is_constant(arg)]
        by_mask = [index for index in node.all_input_nodes if _is_mask(index) and not self._view.is_constant(index)]
        if name in ("aten::masked_scatter", "aten::scatter_reduce", "aten::index_reduce") or indices or by_mask:
            moved = "is placed" if name not in GATHER else "is taken"
            by = ", ".join(index.name for index in (*indices, *by_mask)) or node.name
            return Barrier("step.choice", f"what {moved} by {node.name} ({node.target}) depends on the values of {by}")
        return None

    # -- choices that never pick

    def _is_inert(self, node: Node, name: str) -> bool:
        rule = _INERT.get(name)
        return rule is not None and rule(self, node)

    def kept(self, node: Node) -> Node | None:
        """Of a choice that never picks otherwise: the operand that it always is."""
        name = op_name(node)
        if name in ("aten::where", "aten::masked_fill") or not self._is_inert(node, name):
            return None
        a, b = (*node.args, None)[:2]
        if name in _OF_TWO:
            above = self._ranges.of(a)[0] >= self._ranges.of(b)[1]
            a = a if above == (name in ("aten::maximum", "aten::fmax")) else b
        return a if isinstance(a, Node) else None

    def _within(self, node: Node) -> bool:
        """A clamp whose bounds the value cannot pass, or a floor under a norm that no row comes near."""
        low, high = self._ranges.of(node.args[0])
        least, most = argument(node, "min"), argument(node, "max")
        if most is not None and high > self._ranges.of(most)[0]:
            return False
        if least is None:
            return True
        floor = self._ranges.of(least)
        return low >= floor[1] or (low >= 0 and floor[0] > 0 and floor[1] <= FLOOR)

    def _greater(self, node: Node) -> bool:
        a, b = (self._ranges.of(side) for side in node.args[:2])
        return a[0] >= b[1] or b[0] >= a[1]

    def _never_negative(self, node: Node) -> bool:
        return self._ranges.of(node.args[0])[0] >= 0

    def _by_literal_mask(self, node: Node) -> bool:
        mask = node.args[0] if op_name(node) == "aten::where" else node.args[1]
        return isinstance(mask, Node) and self._view.is_constant(mask)


_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_mask(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _is_scaled(node: Node) -> bool:
    by = node.args[1] if len(node.args) > 1 else None
    scales = isinstance(by, (int, float)) and math.isfinite(by) and by != 0
    return op_name(node) in ("aten::mul", "aten::div") and scales


def _scalings(node: Node) -> Node | None:
    """Views, casts, products with a number: what keeps zeros, and the places of values in their rows."""
    return input_of(node) if _is_scaled(node) else views_and_casts(node)


def _what_it_picks(node: Node) -> str:
    literals = [repr(arg) for arg in (*node.args[1:], *node.kwargs.values()) if isinstance(arg, (int, float))]
    given = f" with {', '.join(literals)}" if literals else ""
    return f"{node.name} ({node.target}{given}) {Kind.CHOICE.value}"


def quantises(node: Node) -> bool:
    """May the step be one of a quantisation to int8? (Which bounds it may have, facts/quantising.py says.)"""
    return op_name(node) in QUANTISING


def _saturates(node: Node, name: str, everywhere: bool) -> str:
    """Why probes of some magnitudes say nothing of others: the function is flat in float64 where they lie; or "".

    A norm needs sums and roots, a rotation products. Angles, which are no product's, need sines and cosines.
    """
    if name not in _FLAT or (everywhere and name in _OF_ANGLES):
        return ""
    if name == "aten::exp" and _is_power(node.args[0]):
        return ""
    return "it is flat, or out of range, away from where probes lie"


_OF_ANGLES = frozenset("aten::sin aten::cos aten::polar aten::exp".split())
_FLAT = _OF_ANGLES | frozenset(
    """
    aten::exp2 aten::expm1 aten::sinh aten::cosh aten::tanh aten::sigmoid aten::silu aten::gelu aten::mish aten::erf
    aten::erfc aten::atan aten::asinh aten::logit aten::sinc aten::logaddexp aten::logaddexp2 aten::softmax
    aten::_softmax aten::log_softmax aten::_log_softmax aten::logsumexp aten::tan
    """.split()
)


def _is_power(node: Any) -> bool:
    """``exp(c * log(u))`` is a power of ``u``."""
    return isinstance(node, Node) and op_name(origin(node, _scalings)) == "aten::log"


def _swamps(node: Node, name: str) -> str:
    """Literals that take values of 16 bits out of range, which float64 probes do not show; or "".

    All that stand on the way one after the other count together: ``v * 1e-18 * 1e-18 * 1e18 * 1e18``.
    """
    if name not in _SCALED_BY or not _is_scaled(node):
        return ""
    total = 0.0
    for step in filter(_is_scaled, upward(node, _scalings)):
        by = abs(float(step.args[1]))  # type: ignore[arg-type]
        total += math.log2(by) if op_name(step) == "aten::mul" else -math.log2(by)
        if abs(total) > _HUGE or abs(math.log2(by)) > _HUGE:
            return f"{step.args[1]:g} takes values out of the range of their dtype"
    return ""


_SCALED_BY = frozenset("aten::mul aten::div".split())
_HUGE = 64.0  # binary digits


def _divisor(node: Node) -> Any:
    return node.args[1] if len(node.args) > 1 else None


def _whole(node: Node) -> Any:
    return node.args[0]


def _of_power(node: Node) -> Any:
    """The base, where the exponent is not a non-negative integer."""
    exponent = node.args[1] if len(node.args) > 1 else None
    natural = isinstance(exponent, (int, float)) and exponent >= 0 and float(exponent).is_integer()
    return None if natural else node.args[0]


_ARGUMENT_OF: dict[str, Callable[[Node], Any]] = {
    "aten::div": _divisor,
    "aten::divide": _divisor,
    "aten::true_divide": _divisor,
    "aten::addcdiv": lambda node: node.args[2],
    "python::truediv": _divisor,
    "_operator::truediv": _divisor,
    "aten::reciprocal": _whole,
    "aten::sqrt": _whole,
    "aten::rsqrt": _whole,
    "aten::log": _whole,
    "aten::log2": _whole,
    "aten::log10": _whole,
    "aten::log1p": _whole,
    "aten::logit": _whole,
    "aten::tan": _whole,
    "aten::pow": _of_power,
    "aten::float_power": _of_power,
    "aten::linalg_vector_norm": _whole,
    "aten::norm": _whole,
    "aten::std": _whole,
}

_LOOKED_AT = _ARGUMENT_OF.keys() | _SCALED_BY | _FLAT

_OF_TWO = frozenset(("aten::maximum", "aten::minimum", "aten::fmax", "aten::fmin"))
_INERT: dict[str, Callable[[Steps, Node], bool]] = {
    "aten::clamp": Steps._within,
    "aten::clamp_min": Steps._within,
    "aten::clamp_max": Steps._within,
    "aten::clip": Steps._within,
    "aten::maximum": Steps._greater,
    "aten::minimum": Steps._greater,
    "aten::fmax": Steps._greater,
    "aten::fmin": Steps._greater,
    "aten::abs": Steps._never_negative,
    "aten::relu": Steps._never_negative,
    "aten::where": Steps._by_literal_mask,
    "aten::masked_fill": Steps._by_literal_mask,
}
