"""Decides which row numbers are distinct and non-negative, so that the kernel may write at them.

``caches.py`` asks this before it plans an in-place write. Three kinds of row numbers are accepted:

* numbers of one integer input, which are trusted, perhaps times a number and plus another
* counted numbers, from such an input's one number on or from a symbolic size on, or entries of such
  an input at counted places
* ``table[s // b] * b + s % b``: places in the blocks of a block table, of positions that are an
  input, or counted from its numbers on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import gcd, prod
from typing import Any

import torch

from mla_fusion.compat import guard, without_modes
from mla_fusion.graph import bounds
from mla_fusion.graph.form import Shape, Value, filled_with, order
from mla_fusion.graph.moves import is_open_part
from mla_fusion.graph.numbers import is_open
from mla_fusion.graph.read import Graph

Roles = dict[Value, str]
Term = tuple[Value, Any]  # a summand and its coefficient
Spread = tuple[Shape, list[int]]  # a shape, and the axes along which a summand has other numbers
_COUNTED = ("count", "constant")
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


def trusted_inputs(graph: Graph, index: Value) -> Roles | None:
    """Returns the inputs whose numbers are trusted to be valid row numbers, with their roles.

    The roles are those of ``witness.draws``. A symbolic size must not be negative, and what is
    counted from it must stay in the block. Counted places, as many as a symbolic size says, must
    stay below their role, the size of a block. Both are left out if guards of the compiled graph
    check that. Returns None if ``index`` may repeat a row, or is made in another way.
    """
    roles = None if _is_repeated(index) else _trusted_inputs(index, "slots")
    if roles is None or not _has_known_numbers(graph, index):
        return None
    places, block_size = places_in_blocks(roles), block_size_of(index)
    for value, role in [*roles.items()]:
        size, conditions = graph.size_of(value), list[Any]()
        if size is not None:
            conditions.append(size >= 0)
            if value in places and block_size:
                first, count = places[value]
                end = size + first + graph.unbound(count)
                conditions.append(end <= graph.unbound(block_size))
        elif value.numel == 1 and any(map(is_open, map(int, role.split(" ")[1:]))):
            return None  # its number of tokens is not that of all tokens
        elif role.isdigit():
            is_sum = value.op == "sum" and value.literal[0] == (1,)
            counted = _strip_views_and_casts(value.sources[0]) if is_sum else value
            limits = bounds.of(value)
            if counted.op == "count":
                end = graph.unbound(counted.shape[0]) + (int(value.number) if is_sum else 0)
            elif limits is not None:
                end = limits[1] + 1
            else:
                return None
            conditions.append(end <= graph.unbound(int(role)))
        guarded = list(map(guard, conditions))
        if False in guarded:
            return None
        if guarded and None not in guarded:
            del roles[value]
    return roles


def _has_known_numbers(graph: Graph, index: Value) -> bool:
    """Returns True unless a number in the index is a difference of sizes, which may be 0."""
    try:
        for value in order([index]):
            is_sum = value.op == "sum"
            numbers = value.literal[0] if is_sum else [graph.form.split(value)[0].ratio]
            for number in filter(is_open, map(abs, numbers)):
                graph.unbound(int(number))
    except LookupError:
        return False
    return True


def input_name(graph: Graph, leaf: Value) -> str:
    """Returns the name of an input, or the symbol of a size."""
    return graph.nodes[leaf][0].name if leaf in graph.nodes else str(leaf.literal)


def _trusted_inputs(index: Value, role: str) -> Roles | None:
    """Returns the trusted inputs of an index without repetition, or None.

    role  the role of an input that holds the index itself
    """
    inner = _strip(index, "reshape", "slice", "expand", "permute")
    if inner.op == "leaf" and not inner.is_float:  # includes buffers of the model's cache
        return {inner: role}
    if inner.op == "count":
        return {}
    if inner.is_number:  # one row, or it would be repeated
        return {} if inner.number.ratio >= 0 else None
    if inner.op == "constant":
        numbers = inner.literal.tensor.reshape(-1)
        is_distinct = len(numbers.unique()) == len(numbers) and int(numbers.min()) >= 0
        return {} if is_distinct else None
    if is_open_part(inner):
        part = inner.sources[0]
        return None if _is_repeated(part) else _trusted_inputs(part, role)
    if inner.op == "gather" and _are_distinct(inner.sources[1]):
        rows, places = inner.sources
        # several negative places would wrap
        starts = {} if places.numel == 1 else _trusted_inputs(places, "")
        roles = None if _is_repeated(rows) else _trusted_inputs(rows, role)
        return None if starts is None or roles is None else starts | roles
    if inner.op == "sum" and len(inner.sources) > 1:
        return _inputs_of_sum(inner)
    if inner.op == "sum":
        (times,), first = inner.literal
    elif inner.is_multiple:
        times, first = inner.number.ratio, 0
    else:
        return None
    (source,) = inner.sources
    if times.denominator > 1 or times <= 0 or first < 0 or _is_repeated(source):
        return None
    roles = _trusted_inputs(source, role)
    # a place times a number may be in another block
    return roles if times == 1 or role == "slots" or not roles else None


def block_size_of(index: Value) -> int:
    """Returns the block size by which the index is composed, or 0 if it has none."""
    for value in reversed(order([index])):
        factors = _terms(value).values() if value.op == "sum" else ()
        if len(factors) > 1 and 1 in factors:
            return int(max(factors)) if max(factors) > 1 else 0
    return 0


def places_in_blocks(roles: Roles) -> dict[Value, tuple[int, int]]:
    """Returns the inputs, among those trusted, that hold places below ``block_size_of``, with what
    is added to each, and how many places from there on must be below it.
    """
    places = dict[Value, tuple[int, int]]()
    for leaf, role in roles.items():
        name, *counted = role.split(" ")
        if name in ("place", "positions") and "table" not in roles.values():
            first, count = map(int, counted or (0, 1))
            places[leaf] = first, count
    return places


def _are_distinct(places: Value) -> bool:
    """Returns True if the places are distinct for all inputs: counted ones, plus one number."""
    if places.numel == 1:
        return True
    inner = _strip_views_and_casts(places)
    summands = inner.sources if inner.op == "sum" else (inner,)
    vectors = [vector for vector in map(_strip_views_and_casts, summands) if vector.numel > 1]
    if len(vectors) != 1 or any(map(_is_repeated, (places, *vectors))):
        return False
    is_counted = _trusted_inputs(vectors[0], "") == {}
    return is_counted and places.numel == vectors[0].numel


def _is_repeated(index: Value) -> bool:
    """Returns True if the index repeats its numbers by an expand."""
    inner = _strip(index, "reshape", "slice", "permute")
    return index.numel != 1 and inner.op == "expand"


def _terms(value: Value) -> dict[Value, Any]:
    """Returns the summands of a sum with their coefficients; the common factor of literals, if no
    summand has another one.
    """
    terms = dict(value.operands)
    for summand in terms if {*terms.values()} == {1} else ():
        inner = _strip_views_and_casts(summand)
        if inner.op == "constant" and not inner.is_float:
            with without_modes():
                terms[summand] *= gcd(*inner.literal.tensor.flatten().tolist())
    return terms


def _inputs_of_sum(value: Value) -> Roles | None:
    """Returns the trusted inputs of a sum of row numbers, or None.

    The sum may be ``table[s // b] * b + s % b``. It may be places of an input in each entry of a
    batch, scaled counts, or counts from a number on.
    """
    terms = _terms(value)
    if value.number < 0:
        return _inputs_of_table(value)
    if len(terms) == 2:
        (entries, size), (places, step) = sorted(terms.items(), key=lambda term: -term[1])
        rows, counted = map(_strip_views_and_casts, (entries, places))
        is_single = rows.numel == 1
        is_of_sequence = counted.op in _COUNTED or is_single
        is_position = rows.op in _COUNTED or is_single
        blocks = _trusted_inputs(entries, "sequences" if is_of_sequence else "block")
        offsets = _trusted_inputs(places, "positions" if is_position else "place")
        is_spread = _covers(terms, value.shape)
        if size > 1 and step == 1 and blocks is not None and offsets is not None and is_spread:
            limits = bounds.of(places)
            if not offsets and (is_open(counted.numel) or is_open(int(size))):
                offsets = {counted: str(size)}
            is_inside = bool(offsets) or (limits is not None and limits[1] < size)
            # an input has one role
            return blocks | offsets if is_inside and blocks.keys().isdisjoint(offsets) else None
    if min(terms.values()) > 0 and _are_distinct(value):
        starts = [term for term in terms if _strip_views_and_casts(term).numel == 1]
        roles = [_trusted_inputs(start, "") for start in starts]
        if None not in roles:
            return {leaf: role for known in roles for leaf, role in known.items()}  # type: ignore[union-attr]
    starts_of_blocks, size = max(terms.items(), key=lambda term: term[1])
    sequences = _trusted_inputs(starts_of_blocks, "sequences") if size > 1 else None
    positions = [term for term in terms.items() if term[0] is not starts_of_blocks]
    owners = [_spread(starts_of_blocks, value.shape)]
    starts_of_positions = _counted_from(positions, value.number, value.shape, owners)
    if sequences is not None and starts_of_positions:
        is_disjoint = sequences.keys().isdisjoint(starts_of_positions)
        return sequences | starts_of_positions if is_disjoint else None
    return _inputs_of_table(value)


def _inputs_of_table(value: Value) -> Roles | None:
    """Returns the trusted inputs of ``table[s // b] * b + s % b``, or None for another sum.

    The index of the table may have numbers of its rows, too. If several positions are counted from
    each start, each start must have a row of its own.
    """
    terms = dict(value.operands)
    for block_rows, size in terms.items():
        inner = _strip_views_and_casts(block_rows)
        if inner.op != "gather" or size <= 1:
            continue
        table, index = inner.sources[0], _strip_views_and_casts(inner.sources[1])
        offsets = {term: times for term, times in terms.items() if term is not block_rows}
        slots = _offset_source(offsets, size, value.number)
        rows = None if slots is None else _added_to_blocks(index, slots, size)
        if slots is None or rows is None or slots.numel != value.numel:
            continue
        table_shape = _strip(table, "reshape").shape
        if len(rows) > 1 or (rows and len(table_shape) > 1 and rows[0][1] != table_shape[-1]):
            continue
        blocks = None if _is_repeated(table) else _trusted_inputs(table, "table")
        places = _trusted_inputs(slots, "positions")
        if places is None and slots.op == "sum":
            owners = [_spread(term, index.shape) for term, _ in rows if _is_row_number(term)]
            places = _counted_from(slots.operands, slots.number, slots.shape, owners)
        if blocks is not None and places is not None:
            return blocks | places
    return None


def _is_row_number(value: Value) -> bool:
    """Returns True for counted numbers, and for an input."""
    inner = _strip_views_and_casts(value)
    return inner.op == "leaf" or _is_counted(inner)


def _counted_from(
    positions: Sequence[Term], first: Fraction, shape: Shape, owners: Sequence[Spread]
) -> Roles | None:
    """Returns the input from each of whose numbers on the same number of positions is counted, as
    in a step with several tokens of each sequence. None for other positions.

    positions  the summands of the positions, with their coefficients
    first      what is added to each
    shape      of the positions
    owners     how the numbers of sequences are spread
    """
    summands = [_strip_views_and_casts(summand) for summand, times in positions if times == 1]
    counts = list(filter(_is_counted, summands))
    starts = [summand for summand in summands if summand not in counts]
    if len(summands) < len(positions) or len(starts) != 1 or len(counts) > 1:
        return None
    roles = _trusted_inputs(starts[0], "positions")
    limits = bounds.of(counts[0]) if counts else (0, 0)
    if not roles or limits is None:
        return None
    count = counts[0].numel if counts else 1
    count = count if is_open(count) else limits[1] + 1
    spreads = [_spread(summand, shape) for summand, _ in positions]
    own = spreads[summands.index(starts[0])]

    def is_each_counted(spreads: Sequence[Spread]) -> bool:
        """Returns True if exactly one of the summands has other numbers along each axis."""
        axes = sorted(axis for _, summand_axes in spreads for axis in summand_axes)
        return all(target == own[0] for target, _ in spreads) and axes == _long_axes(own[0])

    is_single = starts[0].numel == 1
    is_owned = not counts or is_single or own in owners
    # one start may serve all sequences
    is_shared = is_single and is_each_counted([*spreads, *owners])
    if not (is_owned and (is_shared or is_each_counted(spreads))):
        return None
    return {leaf: f"{role} {first} {count}" for leaf, role in roles.items()}


def _long_axes(shape: Shape) -> list[int]:
    """Returns the axes that are longer than 1."""
    return [axis for axis, size in enumerate(shape) if size != 1]


def _covers(summands: Iterable[Value], shape: Shape) -> bool:
    """Returns True if along each axis some summand has other numbers.

    shape  of the sum
    """
    spreads = [_spread(summand, shape) for summand in summands]
    targets = {target for target, _ in spreads}
    axes = sorted({axis for _, summand_axes in spreads for axis in summand_axes})
    is_full = any(summand_axes == _long_axes(target) for target, summand_axes in spreads)
    return is_full or (len(targets) == 1 and axes == _long_axes(*targets))


def _spread(summand: Value, shape: Shape) -> Spread:
    """Returns a shape that a summand is spread to, and the axes along which it has other numbers.

    shape  of the sum
    """
    is_broadcast = summand.numel < prod(shape)
    value = summand if is_broadcast else _strip(summand, "reshape")
    inner = value.sources[0] if value.op == "expand" else value
    target = shape if is_broadcast else value.shape
    first = len(target) - len(inner.shape)
    axes = [] if _is_repeated(inner) else _long_axes(inner.shape)
    return target, [first + axis for axis in axes]


def _is_counted(value: Value) -> bool:
    """Returns True for distinct numbers from 0 on that no input has."""
    return value.op in _COUNTED and _trusted_inputs(value, "") == {}


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


def _offset_source(
    terms: dict[Value, Fraction], size: Fraction, constant: Fraction
) -> Value | None:
    """Returns ``s``, without views, if the terms and the constant are ``s - size * (s // size)``,
    or more than that. None for other terms.
    """
    if [*terms.values()] == [1]:  # a view of their sum
        inner = _strip_views_and_casts(*terms)
        is_sum = inner.op == "sum"
        terms = dict(inner.operands) if is_sum else {}
        constant += inner.number if is_sum else 0
    quotients = [term for term, factor in terms.items() if factor == -size]
    slots = _dividend(_strip_views_and_casts(quotients[0]), size) if len(quotients) == 1 else None
    if slots is None:
        return None
    others = [term for term in terms.items() if term[0] is not quotients[0]]
    if _without_views(others) == [(slots, 1)] and constant >= 0:
        return slots
    is_sum = slots.op == "sum" and constant >= slots.number
    is_equal = is_sum and _without_views(others) == _without_views(slots.operands)
    return slots if is_equal else None


def _without_views(terms: Iterable[Term]) -> list[Term]:
    """Returns the terms, in order, without views and exact casts around their Values."""
    stripped = [(_strip_views_and_casts(term), factor) for term, factor in terms]
    return sorted(stripped, key=lambda term: term[0].serial)


def _added_to_blocks(index: Value, slots: Value, size: Fraction) -> list[Term] | None:
    """Returns what is added to ``slots // size`` in the index of a table, or None if that is not in
    the index.
    """
    terms = _terms(index).items() if index.op == "sum" else [(index, 1)]
    others = [
        (term, times)
        for term, times in terms
        if times != 1 or _dividend(_strip_views_and_casts(term), size) is not slots
    ]
    return others if len(others) == len(terms) - 1 else None


def _dividend(value: Value, size: Fraction) -> Value | None:
    """Returns ``s``, without views, if the Value is ``s // size``, else None."""
    if value.function != "quotient":
        return None
    source, divisor = value.sources[0], filled_with(value.sources[1])
    is_equal = divisor is not None and divisor.number.ratio == size
    return _strip_views_and_casts(source) if is_equal else None
