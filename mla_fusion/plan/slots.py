"""Decides which row numbers are distinct and non-negative, so that the kernel may write at them.

``caches.py`` asks this before it plans an in-place write. Three kinds of row numbers are accepted:

* numbers of one integer input, which are trusted
* counted numbers, from such an input's one number on or from a symbolic size on, or entries of such
  an input at counted places
* ``table[s // b] * b + s % b``: places in the blocks of a block table, of positions that are an
  input, or counted from its numbers on
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import prod
from typing import Any

import torch

from mla_fusion.compat import guard
from mla_fusion.graph import bounds
from mla_fusion.graph.form import Value, filled_with, order
from mla_fusion.graph.numbers import is_open
from mla_fusion.graph.read import Graph

Roles = dict[Value, str]
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


def trusted_inputs(graph: Graph, index: Value) -> Roles | None:
    """Returns the inputs whose numbers are trusted to be valid row numbers, with their roles.

    The roles are those of ``witness.draws``. A symbolic size must not be negative. Counted
    places, as many as a symbolic size says, must stay below their role, the size of a block. Both
    are left out if guards of the compiled graph check that. Returns None if ``index`` may repeat a
    row, or is made in another way.
    """
    roles = None if _is_repeated(index) else _trusted_inputs(index, "slots")
    if roles is None:
        return None
    for value, role in [*roles.items()]:
        size, condition = graph.size_of(value), None
        if size is not None:
            condition = size >= 0
        elif role.isdigit():
            is_sum = value.op == "sum" and value.literal[0] == (1,)
            count = _strip_views_and_casts(value.sources[0]) if is_sum else value
            if count.op != "count":
                return None
            end = graph.unbound(count.shape[0]) + (int(value.literal[1]) if is_sum else 0)
            condition = end <= graph.unbound(int(role))
        is_guarded = None if condition is None else guard(condition)
        if is_guarded is False:
            return None
        if is_guarded:
            del roles[value]
    return roles


def _trusted_inputs(index: Value, role: str) -> Roles | None:
    """Returns the trusted inputs of an index without repetition, or None.

    role  the role of an input that holds the index itself
    """
    inner = _strip(index, "reshape", "slice", "expand")
    if inner.op == "leaf" and not inner.is_float:  # includes buffers of the model's cache
        return {inner: role}
    if inner.op == "count" or _is_scaled_count(inner):
        return {}
    if inner.is_number:  # one row, or it would be repeated
        return {} if inner.literal[1].ratio >= 0 else None
    if inner.op == "constant":
        numbers = inner.literal.tensor.reshape(-1)
        is_distinct = len(numbers.unique()) == len(numbers) and int(numbers.min()) >= 0
        return {} if is_distinct else None
    if inner.op == "gather" and _are_distinct(inner.sources[1]):
        rows = inner.sources[0]
        return None if _is_repeated(rows) else _trusted_inputs(rows, role)
    if inner.op != "sum" or inner.literal[1] < 0:
        return None
    if inner.literal[0] != (1,):
        return _inputs_of_sum(inner)
    (source,) = inner.sources
    return None if _is_repeated(source) else _trusted_inputs(source, role)


def _is_scaled_count(value: Value) -> bool:
    """Returns True if the Value is a positive number times a count."""
    if value.op != "product" or len(value.sources) != 1 or value.literal[0] != (1,):
        return False
    (source,) = value.sources
    is_count = _strip_views_and_casts(source).op == "count" and not _is_repeated(source)
    return is_count and value.literal[1].ratio > 0


def block_size_of(index: Value) -> int:
    """Returns the block size by which the index is composed, or 0 if it has none."""
    for value in reversed(order([index])):
        if value.op == "sum" and len(value.sources) > 1 and 1 in value.literal[0]:
            return int(max(value.literal[0])) if max(value.literal[0]) > 1 else 0
    return 0


def places_in_blocks(roles: Roles) -> list[Value]:
    """Returns the inputs, among those trusted, that must hold places below ``block_size_of``."""
    if "table" in roles.values():
        return []
    return [leaf for leaf, role in roles.items() if role in ("place", "positions")]


def _are_distinct(places: Value) -> bool:
    """Returns True if the places are distinct for all inputs: counted ones, plus one number."""
    if prod(places.shape) == 1:
        return True
    inner = _strip_views_and_casts(places)
    summands = inner.sources if inner.op == "sum" else (inner,)
    vectors = [vector for vector in map(_strip_views_and_casts, summands) if prod(vector.shape) > 1]
    if len(vectors) != 1 or any(map(_is_repeated, (places, *vectors))):
        return False
    is_counted = _trusted_inputs(vectors[0], "") == {}
    return is_counted and prod(places.shape) == prod(vectors[0].shape)


def _is_repeated(index: Value) -> bool:
    """Returns True if the index repeats its numbers by an expand."""
    return prod(index.shape) != 1 and _strip(index, "reshape", "slice").op == "expand"


def _inputs_of_sum(value: Value) -> Roles | None:
    """Returns the trusted inputs of a sum of row numbers, or None.

    The sum may be ``table[s // b] * b + s % b``. It may be places of an input in each entry of a
    batch, scaled counts, or counts from a number on.
    """
    terms = dict(value.operands)
    if len(terms) == 2:
        (entries, size), (places, step) = sorted(terms.items(), key=lambda term: -term[1])
        is_counted = [
            _strip_views_and_casts(operand).op in ("count", "constant")
            for operand in (entries, places)
        ]
        is_single = prod(_strip_views_and_casts(entries).shape) == 1
        blocks = _trusted_inputs(entries, "sequences" if is_counted[1] or is_single else "block")
        offsets = _trusted_inputs(places, "positions" if is_counted[0] or is_single else "place")
        repeated = prod(value.shape) > 1 and all(
            prod(operand.shape) == 1 or _is_repeated(operand) for operand in terms
        )
        if size > 1 and step == 1 and blocks is not None and offsets is not None and not repeated:
            counted, limits = _strip_views_and_casts(places), bounds.of(places)
            if not offsets and is_open(prod(counted.shape)):
                offsets = {counted: str(size)}
            is_inside = bool(offsets) or (limits is not None and limits[1] < size)
            # an input has one role
            return blocks | offsets if is_inside and blocks.keys().isdisjoint(offsets) else None
    if min(terms.values()) > 0 and _are_distinct(value):
        starts = [term for term in terms if prod(_strip_views_and_casts(term).shape) == 1]
        roles = [_trusted_inputs(start, "") for start in starts]
        if None not in roles:
            return {leaf: role for known in roles for leaf, role in known.items()}  # type: ignore[union-attr]
    for block_rows, size in terms.items():
        inner = _strip_views_and_casts(block_rows)
        if inner.op != "gather" or size <= 1:
            continue
        offset_terms = {term: factor for term, factor in terms.items() if term is not block_rows}
        slots_of_offset = _offset_source(offset_terms, size)
        slots_of_block = _divided_slots(inner.sources[1], size)
        if slots_of_block is not None and slots_of_block is slots_of_offset:
            table = _trusted_inputs(inner.sources[0], "table")
            slots = _trusted_inputs(slots_of_offset, "positions") or _counted_from(slots_of_offset)
            if table is not None and slots is not None:
                return table | slots
    return None


def _counted_from(positions: Value) -> Roles | None:
    """Returns the input from each of whose numbers on the same number of positions is counted: the
    tokens of a step with several for each sequence. None for other positions.
    """
    if positions.op != "sum" or positions.literal != ((1, 1), 0):
        return None
    starts, counts = sorted(map(_strip_views_and_casts, positions.sources), key=_is_counted)
    is_each_counted = prod(positions.shape) == prod(starts.shape) * prod(counts.shape)
    limits, roles = bounds.of(counts), _trusted_inputs(starts, "positions")
    if not (_is_counted(counts) and is_each_counted and limits and roles) or is_open(limits[1] + 1):
        return None
    return {leaf: f"{role} {limits[1] + 1}" for leaf, role in roles.items()}


def _is_counted(value: Value) -> bool:
    """Returns True for distinct numbers from 0 on that no input has."""
    return value.op in ("count", "constant") and _trusted_inputs(value, "") == {}


def _strip_views_and_casts(value: Value) -> Value:
    """Returns the Value without reshapes, expands and exact casts around it."""
    return _strip(value, "reshape", "expand")


def _strip(value: Value, *operations: str) -> Value:
    """Returns the Value without these operations and exact casts around it.

    An exact cast keeps every slot from 0 to 2 ** 24 - 1; ``witness.draws`` draws in this range.
    """
    while value.op in operations or (
        value.op == "cast" and (value.dtype in _EXACT or bounds.fits(value.sources[0], value.dtype))
    ):
        value = value.sources[0]
    return value


def _offset_source(terms: dict[Value, Fraction], size: Fraction) -> Value | None:
    """Returns ``s``, without views, if the terms are ``s - size * (s // size)``, else None."""
    if [*terms.values()] == [1]:  # a view of their sum
        inner = _strip_views_and_casts(*terms)
        is_sum = inner.op == "sum" and inner.literal[1] >= 0
        terms = dict(inner.operands) if is_sum else {}
    quotients = [term for term, factor in terms.items() if factor == -size]
    slots = _dividend(_strip_views_and_casts(quotients[0]), size) if len(quotients) == 1 else None
    if slots is None:
        return None
    others = [term for term in terms.items() if term[0] is not quotients[0]]
    summands = slots.operands if slots.op == "sum" and not slots.literal[1] else []
    is_equal = _without_views(others) in ([(slots, 1)], _without_views(summands))
    return slots if is_equal else None


def _without_views(terms: Iterable[tuple[Value, Any]]) -> list[tuple[Value, Any]]:
    """Returns the terms, in order, without views and exact casts around their Values."""
    stripped = [(_strip_views_and_casts(term), factor) for term, factor in terms]
    return sorted(stripped, key=lambda term: term[0].serial)


def _divided_slots(index: Value, size: Fraction) -> Value | None:
    """Returns ``s``, without views, if the index has a term ``s // size``, else None."""
    stack = [index]
    while stack:
        value = stack.pop()
        if value.function == "quotient":
            return _dividend(value, size)
        if value.op in ("sum", "reshape", "cast", "expand"):
            stack += value.sources
    return None


def _dividend(value: Value, size: Fraction) -> Value | None:
    """Returns ``s``, without views, if the Value is ``s // size``, else None."""
    if value.function != "quotient":
        return None
    source, divisor = value.sources[0], filled_with(value.sources[1])
    is_equal = divisor is not None and divisor.literal[1].ratio == size
    return _strip_views_and_casts(source) if is_equal else None
