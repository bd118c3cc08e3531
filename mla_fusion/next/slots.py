"""Row numbers that are distinct and not below 0: those of an input, trusted to be so, or of a block
table's blocks, at the places of one.
"""

from __future__ import annotations

from fractions import Fraction

from mla_fusion.graph.form import Value, filled_with


def trusted(index: Value) -> list[Value] | None:
    """The inputs that are taken at their word; None where more would have to be."""
    inner = index
    while inner.op in ("reshape", "cast", "slice", "expand"):
        inner = inner.sources[0]
    if inner.op == "leaf" and not inner.model and not inner.is_float:
        return [inner]
    if inner.op == "count":
        return []
    if inner.op == "constant":
        numbers = inner.literal.tensor.reshape(-1)
        is_apart = len(numbers.unique()) == len(numbers) and int(numbers.min()) >= 0
        return [] if is_apart else None
    if inner.op == "sum" and inner.literal[1] == 0:
        return _of_blocks(inner)
    return None


def _of_blocks(value: Value) -> list[Value] | None:
    """``table[s // b] * b + s % b``; or places of an input in each entry of a batch."""
    terms = dict(zip(value.sources, value.literal[0], strict=True))
    if len(terms) == 2:
        (entries, size), (places, one) = sorted(terms.items(), key=lambda term: -term[1])
        both = trusted(entries), trusted(places)
        if size > 1 and one == 1 and both[0] is not None and both[1] is not None:
            return [*both[0], *both[1]]
    for rows, size in terms.items():
        inner = _unmoved(rows)
        if inner.op != "gather" or size <= 1:
            continue
        rest = {one: times for one, times in terms.items() if one is not rows}
        of_slots = _places(rest, size)
        if of_slots is None:
            continue
        read = _block_numbers(inner.sources[1])
        if of_slots is read or _unmoved(of_slots) is _unmoved(read or of_slots):
            table = trusted(inner.sources[0])
            slots = trusted(of_slots)
            if table is not None and slots is not None:
                return [*table, *slots]
    return None


def _unmoved(value: Value) -> Value:
    while value.op in ("reshape", "cast", "expand"):
        value = value.sources[0]
    return value


def _places(terms: dict[Value, Fraction], size: Fraction) -> Value | None:
    """``s`` of ``s - size * (s // size)``"""
    if len(terms) != 2:
        return None
    for one, times in terms.items():
        if times == 1:
            ((other, by),) = ((v, t) for v, t in terms.items() if v is not one)
            quotient = _unmoved(other)
            if by == -size and quotient.op == "function" and quotient.literal[0] == "quotient":
                divisor = filled_with(quotient.sources[1])
                same = _unmoved(quotient.sources[0]) is _unmoved(one)
                if same and divisor is not None and divisor.literal[1].ratio == size:
                    return one
    return None


def _block_numbers(index: Value) -> Value | None:
    """``s`` of a row number that ``s // size`` is a term of."""
    stack = [index]
    while stack:
        one = stack.pop()
        if one.op == "function" and one.literal[0] == "quotient":
            return one.sources[0]
        if one.op in ("sum", "reshape", "cast", "expand"):
            stack += one.sources
    return None
