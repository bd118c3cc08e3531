"""Where the tokens of a Value lie: the one owner of tokens, regrouping and symbolic sizes.

A layout gives each axis as digits, outermost first: ``(stride, size)`` in tokens, or ``(0, size)``
for anything else. Batch and sequence are two digits of one count of tokens; a view regroups digits.
A proof runs a few tokens of a graph of any number: each digit of tokens is bound to a small size,
whether the graph has 4096 of them or a symbol.

Rows of a table that is gathered from are a digit ``(-size, size)``, of which two stand for all.

A step that cannot be said in digits (a slice or a roll of tokens, a regrouping across them) has no
layout: nothing is fused through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

from mla_fusion.graph.form import Value

Digit = tuple[int, int]
Axis = tuple[Digit, ...]
Layout = tuple[Axis, ...]


class Mixed(Exception):
    """Tokens are mixed, or cut: ``args`` is the Value that does it."""


def plain(size: int) -> Axis:
    return ((0, size),) if size != 1 else ()


def plain_layout(shape: Iterable[int]) -> Layout:
    return tuple(map(plain, shape))


def of_tokens(lead: Sequence[int], rest: Sequence[int]) -> Layout:
    """Leading axes that count tokens together, and others."""
    axes, stride = list[Axis](), prod(lead)
    for size in lead:
        stride //= size
        axes.append(((stride, size),) if size != 1 else ())
    return (*axes, *map(plain, rest))


def is_plain(axis: Axis) -> bool:
    return not any(stride for stride, _ in axis)


def has_tokens(layout: Layout) -> bool:
    return not all(map(is_plain, layout))


def merged(axis: Iterable[Digit]) -> Axis:
    """Digits that follow on each other as one."""
    found: list[Digit] = []
    for stride, size in axis:
        if size == 1:
            continue
        if found:
            before, count = found[-1]
            if stride and before == stride * size:
                found[-1] = stride, count * size
                continue
            if not stride and not before:
                found[-1] = 0, count * size
                continue
        found.append((stride, size))
    return tuple(found)


def regrouped(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout of a reshape; None where a size takes part of a digit and of the next."""
    digits = [digit for axis in layout for digit in axis][::-1]
    found = list[Axis]()
    for size in shape:
        axis = list[Digit]()
        while size > 1:
            if not digits:
                return None
            stride, count = digits.pop()
            if size % count == 0:
                axis.append((stride, count))
                size //= count
            elif count % size == 0:
                rest = count // size
                axis.append((stride * rest, size))
                digits.append((stride, rest))
                size = 1
            else:
                return None
        found.append(merged(axis))
    return tuple(found) if not digits else None


def broadcast_to(layout: Layout, source: Value) -> Layout:
    """What an operand has of the layout of an element-wise result."""
    skipped = len(layout) - len(source.shape)
    return tuple(
        () if size == 1 else axis for axis, size in zip(layout[skipped:], source.shape, strict=True)
    )


def followed(value: Value, known: dict[Value, Layout]) -> Layout:
    """The layout of a Value, from those of its sources that have tokens. Raises Mixed."""
    sources = [known.get(source) for source in value.sources]
    found = _followed(value, sources)
    if found is None:
        raise Mixed(value)
    strides = [stride for axis in found for stride, _ in axis if stride]
    if len(set(strides)) != len(strides):  # one token beside another
        raise Mixed(value)
    return found


def _followed(value: Value, sources: Sequence[Layout | None]) -> Layout | None:
    op, literal = value.op, value.literal
    first = next(layout for layout in sources if layout is not None)
    if op == "reshape":
        return regrouped(first, value.shape)
    if op == "permute":
        return tuple(first[axis] for axis in literal)
    if op in ("sum", "product", "function", "expand", "cast"):
        return _joined(value, sources)
    if op == "reduce":
        if not all(is_plain(first[axis]) for axis in literal):
            return None
        return tuple(axis for at, axis in enumerate(first) if at not in literal)
    if op == "slice":
        return _along(first, literal[0], value.shape)
    if op == "join":
        for layout in sources:
            for at, axis in enumerate(layout or ()):
                if (axis != first[at] and at != literal) or (at == literal and not is_plain(axis)):
                    return None
        return _along(first, literal, value.shape)
    if op == "gather" and sources[0] is not None and sources[1] is None:
        if not is_plain(first[literal]):
            return None
        index = value.sources[1].shape
        return (*first[:literal], *plain_layout(index), *first[literal + 1 :])
    if op == "dot":
        return _of_product(value, sources)
    return None


def _along(layout: Layout, axis: int, shape: Sequence[int]) -> Layout | None:
    if not is_plain(layout[axis]):
        return None
    return tuple(plain(shape[at]) if at == axis else one for at, one in enumerate(layout))


def _joined(value: Value, sources: Sequence[Layout | None]) -> Layout | None:
    """Of operands that are broadcast; those without tokens take what the others have."""
    found = list(plain_layout(value.shape))
    for layout in sources:
        for at in range(1, len(layout or ()) + 1):
            axis = layout[-at]  # type: ignore[index]
            if is_plain(axis):
                continue
            if not is_plain(found[-at]) and found[-at] != axis:
                return None
            found[-at] = axis
    return tuple(found)


def _of_product(value: Value, sources: Sequence[Layout | None]) -> Layout | None:
    left, right = (
        plain_layout(source.shape) if layout is None else layout
        for layout, source in zip(sources, value.sources, strict=True)
    )
    if not is_plain(left[-1]) or not is_plain(right[-2]):
        return None
    lead = list[Axis]()
    batch = right[:-2] if len(right) > 2 else (None,) * (len(left) - 2)
    for one, other in zip(left[:-2], batch, strict=True):
        if other is not None and not is_plain(one) and not is_plain(other) and one != other:
            return None
        lead.append(one if other is None or not is_plain(one) else other)
    return (*lead, left[-2], right[-1])


def cuts_of(layouts: Iterable[Layout]) -> set[int]:
    """Where digits of tokens begin and end."""
    return {
        end
        for layout in layouts
        for axis in layout
        for stride, size in axis
        if stride > 0
        for end in (stride, stride * size)
    }


class Binding:
    """Small sizes for the digits of tokens of a proof.

    missing  where digits were asked for that begin or end elsewhere
    copies   how often the tokens are repeated, as the outermost digit: what is beside the
             activation is the same in each copy
    """

    def __init__(self, cuts: Iterable[int], total: int, copies: int = 1, few: int = 2) -> None:
        """Raises Mixed where digits cut the tokens at places that do not fit each other."""
        self._places, self.missing = sorted({1, total, *cuts}), set[int]()
        for below, above in pairwise(self._places):
            if above % below:
                raise Mixed(None)
        last = len(self._places) - 1
        sizes = [few + 1 if place == last - 1 else few for place in range(last)] or [1]
        self.period, self.copies = prod(sizes), copies
        sizes[-1] *= copies
        self._bound = [1]
        for size in sizes:
            self._bound.append(self._bound[-1] * size)
        self.tokens = self.period * copies

    def digit(self, digit: Digit) -> Digit:
        """Its stride and size in the bound tokens."""
        stride, size = digit
        if not stride:
            return digit
        if stride < 0:  # rows of a table
            if stride != -size:
                raise Mixed(None)
            return -1, 2
        try:
            low, high = self._places.index(stride), self._places.index(stride * size)
        except ValueError:
            self.missing |= {stride, stride * size}
            raise Mixed(None) from None
        return self._bound[low], self._bound[high] // self._bound[low]

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return tuple(prod(self.digit(digit)[1] for digit in axis) for axis in layout)

    def digits(self, layout: Layout) -> list[Digit]:
        """All of them, bound, in order."""
        return [self.digit(digit) for axis in layout for digit in axis]
