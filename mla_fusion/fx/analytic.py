"""Can facts be read behind a step? They can where the step moves elements or is analytic; else they
end there.

An operator's class is in the table; here the operands are looked at. A choice whose outcome is the
same for every input ends nothing: ``clamp_min(0)`` of a sum of squares, ``where`` with a mask of
literals. Whether what was read holds for all inputs is decided by exact arithmetic
(:mod:`mla_fusion.prove`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.fx import registered
from mla_fusion.fx.indexed import Indexed
from mla_fusion.fx.kinds import (
    MODEL_FLOATS,
    argument,
    called,
    holds_integers,
    is_cast,
    kind_of,
    one_dtype,
    operator_of,
    reduces_a_symbolic_axis,
    word,
)
from mla_fusion.fx.ranges import Ranges
from mla_fusion.fx.walk import INPUTS, input_of, origin, upward, views_and_casts
from mla_fusion.operators.known import (
    GATHER,
    PLACED_WRITERS,
    Kind,
    dtype_of,
    rule_named,
    rule_of,
    rules,
)

# a floor under a norm that no row of bfloat16 numbers comes near (F.normalize: 1e-12)
FLOOR = 1e-10


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

    def barrier(self, node: Node) -> Barrier | None:
        """Why facts end at the node, or None where they do not."""
        entry = operator_of(node)
        if entry.kind is Kind.MOVEMENT and not entry.cast:
            return None  # most are such
        kind, name = kind_of(node), entry.row.word
        if kind is Kind.ANALYTIC:
            reason = _swamps(node, name)
            return (
                Barrier("step.choice", f"{node.name} ({node.target}): {reason}") if reason else None
            )
        if kind is Kind.RANDOM:
            return Barrier("step.random", f"{node.name} ({node.target}) draws random numbers")
        if kind in (Kind.OPAQUE, Kind.EFFECT):
            said = [
                f"{node.name} ({called(node) or node.op}) {kind.value}",
                registered.unused(node),
            ]
            return Barrier("step.unknown", "; ".join(filter(None, said)))
        if kind is Kind.MOVEMENT:
            return self._cast(node) if is_cast(node) else None
        if kind is Kind.GATHER or kind is Kind.WRITER:
            return self._moved_by_index(node, name)
        return None if self._never_picks(node) else Barrier("step.choice", _what_it_picks(node))

    def of_sizes(self, node: Node, size: Node | None) -> Barrier | None:
        """Why probes show what holds at one length alone: the node computes with a size, or sums
        over such an axis.
        """
        if size is not None:
            detail = (
                f"{node.name} ({node.target}) computes with {size.name}, which is another number "
                "at other lengths"
            )
        elif reduces_a_symbolic_axis(node):
            detail = f"{node.name} ({node.target}) sums over an axis of symbolic length"
        else:
            return None
        return Barrier("tokens.mixed", detail)

    def _cast(self, node: Node) -> Barrier | None:
        """A cast among a model's floats rounds, and no more; one to an integer picks."""
        dtype = one_dtype(node)
        source = node.args[0] if node.args else None
        before = dtype_of(source) if isinstance(source, Node) else None
        floats = (*MODEL_FLOATS, torch.complex64, torch.complex128, torch.complex32)
        if dtype in floats or dtype == before or (before in _INTEGERS and dtype in _INTEGERS):
            return None
        return Barrier("step.choice", f"{node.name} casts to {str(dtype).removeprefix('torch.')}")

    # -- indices

    def _moved_by_index(self, node: Node, name: str) -> Barrier | None:
        """Movement where the index is a literal of the graph; what an input's values pick is a
        choice.
        """
        if name in PLACED_WRITERS:
            return None
        indices = [
            arg
            for arg in node.all_input_nodes
            if holds_integers(arg) and not self._view.is_constant(arg)
        ]
        by_mask = [
            index
            for index in node.all_input_nodes
            if one_dtype(index) == torch.bool and not self._view.is_constant(index)
        ]
        if name in ("masked_scatter", "scatter_reduce", "index_reduce") or indices or by_mask:
            above = (origin(index, views_and_casts) for index in indices)
            held = [base for base in above if base.op in INPUTS]
            if held and name in GATHER:
                return Barrier("step.choice", _order_held(node, held[0]))
            moved = "is placed" if name not in GATHER else "is taken"
            by = ", ".join(index.name for index in (*indices, *by_mask)) or node.name
            return Barrier(
                "step.choice",
                f"what {moved} by {node.name} ({node.target}) depends on the values of {by}",
            )
        return None

    # -- choices that never pick: a rule gives the operand that the choice always is, True where it
    # is none of them, and False where it may pick

    def _never_picks(self, node: Node) -> Node | bool:
        rule = rule_of(node, "inert", RULES)
        return rule is not None and rule(self, node)

    def kept(self, node: Node) -> Node | None:
        """Of a choice that never picks otherwise: the operand that it always is."""
        found = self._never_picks(node)
        return found if isinstance(found, Node) else None

    def floored(self, node: Node) -> Node | None:
        """What is never negative and has a floor that no row's mean square comes near.

        Whether it is one, exact arithmetic says: elsewhere such a floor is a choice.
        """
        if word(node) not in _CLAMPS or argument(node, "max") is not None:
            return None
        low, floor = self._ranges.of(node.args[0])[0], self._ranges.of(argument(node, "min"))
        is_low = 0 <= low < floor[1] <= FLOOR and floor[0] > 0
        return node.args[0] if is_low and isinstance(node.args[0], Node) else None

    def _within(self, node: Node) -> Node | bool:
        """A clamp whose bounds the value cannot pass, or a floor that may be one under a norm."""
        if self.floored(node) is not None:
            return True
        low, high = self._ranges.of(node.args[0])
        least, most = argument(node, "min"), argument(node, "max")
        passes = (most is not None and high > self._ranges.of(most)[0]) or (
            least is not None and low < self._ranges.of(least)[1]
        )
        return not passes and _operand(node, 0)

    def _greater(self, node: Node) -> Node | bool:
        a, b = (self._ranges.of(side) for side in node.args[:2])
        first = (a[0] >= b[1]) == (rule_named(node, "range") == "largest")
        return (a[0] >= b[1] or b[0] >= a[1]) and _operand(node, int(not first))

    def _never_negative(self, node: Node) -> Node | bool:
        return self._ranges.of(node.args[0])[0] >= 0 and _operand(node, 0)

    def _by_literal_mask(self, node: Node) -> bool:
        mask = node.args[0] if word(node) == "where" else node.args[1]
        return isinstance(mask, Node) and self._view.is_constant(mask)


def _order_held(node: Node, held: Node) -> str:
    return (
        f"{node.name} ({node.target}) takes elements in an order that {held.name} holds: its "
        "numbers come from outside the graph and may change; write the order as a list, or with "
        "slices, views or torch.arange"
    )


def _operand(node: Node, place: int) -> Node | bool:
    """One of a choice's operands; True of a literal."""
    given = node.args[place]
    return given if isinstance(given, Node) else True


_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def _is_scaled(node: Node) -> bool:
    by = node.args[1] if len(node.args) > 1 else None
    scales = isinstance(by, (int, float)) and math.isfinite(by) and by != 0
    return word(node) in ("mul", "div") and scales


def _scalings(node: Node) -> Node | None:
    """Views, casts, products with a number: what keeps zeros, and the places of values in their
    rows.
    """
    return input_of(node) if _is_scaled(node) else views_and_casts(node)


def _what_it_picks(node: Node) -> str:
    literals = [
        repr(arg)
        for arg in (*node.args[1:], *node.kwargs.values())
        if isinstance(arg, (int, float))
    ]
    given = f" with {', '.join(literals)}" if literals else ""
    return f"{node.name} ({node.target}{given}) {Kind.CHOICE.value}"


def _swamps(node: Node, name: str) -> str:
    """Literals that take values of 16 bits out of range, which float64 probes do not show; or "".

    All that stand on the way one after the other count together: ``v * 1e-18 * 1e-18 * 1e18 *
    1e18``.
    """
    if name not in _SCALED_BY or not _is_scaled(node):
        return ""
    total = 0.0
    for step in filter(_is_scaled, upward(node, _scalings)):
        by = abs(float(step.args[1]))  # type: ignore[arg-type]
        total += math.log2(by) if word(step) == "mul" else -math.log2(by)
        if abs(total) > _HUGE or abs(math.log2(by)) > _HUGE:
            return f"{step.args[1]:g} takes values out of the range of their dtype"
    return ""


_SCALED_BY = frozenset("mul div".split())
_HUGE = 64.0  # binary digits


_CLAMPS = frozenset(("clamp", "clamp_min"))
RULES = rules(Steps._within, Steps._greater, Steps._never_negative, Steps._by_literal_mask)
