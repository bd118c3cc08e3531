"""Row numbers that are distinct and not below 0: those of an input, trusted to be so, from a row
on, or at counted places of it; or of a block table's blocks, at the places of one.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

import torch

from mla_fusion.graph.bounds import fits
from mla_fusion.graph.form import Value, filled_with, order

Roles = dict[Value, str]
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


def trusted(index: Value) -> Roles | None:
    """The inputs that are taken at their word, with what they hold, in the words of
    ``witness.draws``; None where more would have to be.
    """
    return None if _is_repeated(index) else _trusted(index, "slots")


def _trusted(index: Value, role: str) -> Roles | None:
    inner = index
    while inner.op in ("reshape", "slice", "expand") or _is_exact_cast(inner):
        inner = inner.sources[0]
    if inner.op == "leaf" and not inner.is_float:  # a buffer of the model's cache, too
        return {inner: role}
    if inner.op == "count" or _is_every_nth(inner):
        return {}
    if inner.op == "constant":
        numbers = inner.literal.tensor.reshape(-1)
        is_apart = len(numbers.unique()) == len(numbers) and int(numbers.min()) >= 0
        return {} if is_apart else None
    if inner.op == "gather" and _are_apart(inner.sources[1]):
        rows = inner.sources[0]
        return None if _is_repeated(rows) else _trusted(rows, role)
    if inner.op == "sum" and inner.literal[1] >= 0:
        is_shifted = inner.literal[0] == (1,)
        return _trusted(inner.sources[0], role) if is_shifted else _of_blocks(inner)
    return None


def _is_every_nth(value: Value) -> bool:
    """Is it n times what is counted?"""
    if value.op != "product" or len(value.sources) != 1 or value.literal[0] != (1,):
        return False
    return value.literal[1].ratio > 0 and _unmoved(value.sources[0]).op == "count"


def block_of(index: Value) -> int:
    """How many rows the blocks have by which it counts; 0 where it counts by none."""
    for value in reversed(order([index])):
        if value.op == "sum" and len(value.sources) > 1 and 1 in value.literal[0]:
            return int(max(value.literal[0])) if max(value.literal[0]) > 1 else 0
    return 0


def _are_apart(places: Value) -> bool:
    """Are they distinct, whatever inputs hold: counted from one number on?"""
    if prod(places.shape) == 1:
        return True
    inner = _unmoved(places)
    terms = inner.sources if inner.op == "sum" else (inner,)
    counted = [one for one in map(_unmoved, terms) if prod(one.shape) > 1]
    is_one = len(counted) == 1 and counted[0].op == "count"
    return is_one and not _is_repeated(places) and prod(places.shape) == prod(counted[0].shape)


def _is_repeated(index: Value) -> bool:
    """Does one of its numbers come more than once, whatever they are?"""
    while index.op in ("reshape", "slice") or _is_exact_cast(index):
        index = index.sources[0]
    return index.op == "expand"


def _of_blocks(value: Value) -> Roles | None:
    """``table[s // b] * b + s % b``; or places of an input in each entry of a batch; or counted
    rows.
    """
    terms = dict(zip(value.sources, value.literal[0], strict=True))
    if len(terms) == 1 and _unmoved(value.sources[0]).op == "count":
        return {} if value.literal[0][0] > 0 else None
    if len(terms) == 2:
        (entries, size), (places, one) = sorted(terms.items(), key=lambda term: -term[1])
        is_counted = [_unmoved(one).op in ("count", "constant") for one in (entries, places)]
        is_one = prod(_unmoved(entries).shape) == 1
        blocks = _trusted(entries, "sequences" if is_counted[1] or is_one else "block")
        inside = _trusted(places, "positions" if is_counted[0] or is_one else "place")
        repeated = _is_repeated(entries) and _is_repeated(places)
        if size > 1 and one == 1 and blocks is not None and inside is not None and not repeated:
            return blocks | inside
    for rows, size in terms.items():
        inner = _unmoved(rows)
        if inner.op != "gather" or size <= 1:
            continue
        rest = {one: times for one, times in terms.items() if one is not rows}
        of_slots = _places(rest, size)
        if of_slots is None:
            continue
        read = _block_numbers(inner.sources[1], size)
        if read is not None and _unmoved(of_slots) is _unmoved(read):
            table = _trusted(inner.sources[0], "table")
            slots = _trusted(of_slots, "positions")
            if table is not None and slots is not None:
                return table | slots
    return None


def _unmoved(value: Value) -> Value:
    while value.op in ("reshape", "expand") or _is_exact_cast(value):
        value = value.sources[0]
    return value


def _is_exact_cast(value: Value) -> bool:
    """Is it a cast that keeps every slot, of 0 to 2 ** 24 - 1, as ``witness.draws`` draws them?"""
    return value.op == "cast" and (value.dtype in _EXACT or fits(value.sources[0], value.dtype))


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


def _block_numbers(index: Value, size: Fraction) -> Value | None:
    """``s`` of a row number that ``s // size`` is a term of."""
    stack = [index]
    while stack:
        one = stack.pop()
        if one.op == "function" and one.literal[0] == "quotient":
            divisor = filled_with(one.sources[1])
            is_size = divisor is not None and divisor.literal[1].ratio == size
            return one.sources[0] if is_size else None
        if one.op in ("sum", "reshape", "cast", "expand"):
            stack += one.sources
    return None
