"""Where the tokens of a Value lie. No other module knows about tokens, regrouping or bound sizes.

``propose/`` and ``exact/`` use it: both run a graph for a few tokens.

A layout lists, for each axis, its digits, outermost first. A digit is ``(stride, size)``: a step
along it is ``stride`` tokens. ``(0, size)`` is a digit of anything else. Batch and sequence are two
digits of one count of tokens; a view regroups digits. ``(-size, size)`` is the digit of the rows of
a table that is gathered from; two rows stand for all of them.

A proof runs a few tokens of a graph with any number of them. ``Binding`` binds each digit of tokens
to a small size, whether the graph has 4096 tokens or a symbolic number.

Some steps have no layout: a slice or a roll of tokens, a regrouping across them. They raise
``Mixed``, and nothing is fused through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from torch import Tensor

from mla_fusion.graph.form import Value, with_axis

Digit = tuple[int, int]
Axis = tuple[Digit, ...]
Layout = tuple[Axis, ...]


class Mixed(Exception):
    """Raised for a Value that mixes or cuts tokens. ``args`` is that Value, or None."""


def token_free_axis(size: int) -> Axis:
    """The digits of an axis that counts no tokens."""
    return ((0, size),) if size != 1 else ()


def token_free_layout(shape: Iterable[int]) -> Layout:
    """The layout of a shape without tokens."""
    return tuple(map(token_free_axis, shape))


def token_layout(shape: Sequence[int]) -> Layout:
    """The layout of an activation, whose first axis counts tokens."""
    tokens, *others = shape
    return merge_digits([(1, tokens)]), *map(token_free_axis, others)


def is_token_free(axis: Axis) -> bool:
    """True if no digit of the axis counts tokens."""
    return not any(stride for stride, _ in axis)


def has_tokens(layout: Layout) -> bool:
    """True if an axis of the layout counts tokens."""
    return not all(map(is_token_free, layout))


def merge_digits(axis: Iterable[Digit]) -> Axis:
    """The digits of an axis with neighbours merged where they count as one digit."""
    digits: list[Digit] = []
    for stride, size in axis:
        if size == 1:
            continue
        if digits and digits[-1][0] == stride * size:
            digits[-1] = stride, digits[-1][1] * size
        else:
            digits.append((stride, size))
    return tuple(digits)


def regroup(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout of a reshape. None if a new axis takes part of a digit and of the next one."""
    digits = [digit for axis in layout for digit in axis][::-1]
    axes = list[Axis]()
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
                inner_size = count // size
                axis.append((stride * inner_size, size))
                digits.append((stride, inner_size))
                size = 1
            else:
                return None
        axes.append(merge_digits(axis))
    return tuple(axes) if not digits else None


def broadcast_to(layout: Layout, source: Value) -> Layout:
    """The layout of an operand, from the layout of the element-wise result that reads it."""
    skipped = len(layout) - len(source.shape)
    return tuple(
        () if size == 1 else axis for axis, size in zip(layout[skipped:], source.shape, strict=True)
    )


def layout_of(value: Value, layouts: dict[Value, Layout]) -> Layout:
    """The layout of a Value, from the layouts of its sources.

    layouts  of the sources that have tokens; a source without tokens is left out

    Raises Mixed if the Value has no layout, or has an element for each pair of tokens.
    """
    source_layouts = [layouts.get(source) for source in value.sources]
    layout = _layout_or_none(value, source_layouts)
    if layout is None:
        raise Mixed(value)
    strides = [stride for axis in layout for stride, _ in axis if stride]
    if len(set(strides)) != len(strides):  # an element for each pair of tokens
        raise Mixed(value)
    return layout


def _layout_or_none(value: Value, layouts: Sequence[Layout | None]) -> Layout | None:
    """The layout of a Value. None if it mixes or cuts tokens."""
    op, literal = value.op, value.literal
    first = next(layout for layout in layouts if layout is not None)
    if op == "reshape":
        return regroup(first, value.shape)
    if op == "permute":
        return tuple(first[axis] for axis in literal)
    if op in ("sum", "product", "function", "expand", "cast"):
        return _broadcast_layout(value.shape, layouts)
    if op == "reduce":
        if not all(is_token_free(first[axis]) for axis in literal):
            return None
        return tuple(axis for at, axis in enumerate(first) if at not in literal)
    if op == "slice":
        return _resized_axis(first, literal[0], value.shape[literal[0]])
    if op == "join":
        size = value.shape[literal]
        joined = {_resized_axis(layout, literal, size) for layout in layouts if layout is not None}
        return joined.pop() if len(joined) == 1 else None
    if op == "gather" and layouts[0] is not None and layouts[1] is None:
        if not is_token_free(first[literal]):
            return None
        return with_axis(first, literal, *token_free_layout(value.sources[1].shape))
    if op == "dot":
        return _product_layout(value, layouts)
    return None


def _resized_axis(layout: Layout, axis: int, size: int) -> Layout | None:
    """The layout with an axis of another size; None if the axis counts tokens."""
    if not is_token_free(layout[axis]):
        return None
    return with_axis(layout, axis, token_free_axis(size))


def _broadcast_layout(shape: Sequence[int], layouts: Sequence[Layout | None]) -> Layout | None:
    """The layout of an element-wise result; operands without tokens are broadcast.

    None if two operands count different tokens along one axis.
    """
    axes = list(token_free_layout(shape))
    for layout in layouts:
        for at in range(1, len(layout or ()) + 1):
            axis = layout[-at]  # type: ignore[index]
            if is_token_free(axis):
                continue
            if not is_token_free(axes[-at]) and axes[-at] != axis:
                return None
            axes[-at] = axis
    return tuple(axes)


def _product_layout(value: Value, layouts: Sequence[Layout | None]) -> Layout | None:
    """The layout of a product of matrices. None if tokens are summed over or do not agree."""
    left, right = (
        token_free_layout(source.shape) if layout is None else layout
        for layout, source in zip(layouts, value.sources, strict=True)
    )
    batch = _broadcast_layout(value.shape[:-2], (left[:-2], right[:-2]))
    if batch is None or not is_token_free(left[-1]) or not is_token_free(right[-2]):
        return None
    return (*batch, left[-2], right[-1])


def source_layout(value: Value, place: int, layout: Layout) -> Layout | None:
    """The layout of a source, from the layout of the Value that reads it: the reverse of
    ``layout_of``.

    place  of the source among the Value's sources

    None if the source has no layout.
    """
    op, literal, source = value.op, value.literal, value.sources[place]
    if op == "reshape":
        return regroup(layout, source.shape)
    if op == "permute":
        return tuple(layout[literal.index(axis)] for axis in range(len(literal)))
    if op in ("slice", "join"):
        axis = literal if op == "join" else literal[0]
        return _resized_axis(layout, axis, source.shape[axis])
    if op == "reduce":
        axes = iter(layout)
        sizes = enumerate(source.shape)
        return tuple(token_free_axis(n) if at in literal else next(axes) for at, n in sizes)
    if op == "dot":
        if place == 0:
            return (*layout[:-1], token_free_axis(source.shape[-1]))
        batch = layout[: len(source.shape) - 2]
        return (*batch, token_free_axis(source.shape[-2]), layout[-1])
    if op == "gather":
        end = literal + len(value.sources[1].shape)
        numbers = layout[literal:end]
        if place == 1:
            return numbers
        size = source.shape[literal]
        is_literal = value.sources[1].op == "constant" and not has_tokens(numbers)
        rows = token_free_axis(size) if is_literal or size == 1 else ((-size, size),)
        return (*layout[:literal], rows, *layout[end:])
    return broadcast_to(layout, source)


def token_order(digits: Sequence[Digit]) -> list[int]:
    """The places of digits in the order of rows: digits of tokens first, the outermost in front."""
    return sorted(range(len(digits)), key=lambda place: -digits[place][0])


def token_count(digits: Iterable[Digit]) -> int:
    """How many tokens the digits count."""
    return prod(size for stride, size in digits if stride)


def cuts_of(layouts: Iterable[Layout]) -> set[int]:
    """The token counts at which digits begin and end: strides, and strides times sizes."""
    return {
        cut
        for layout in layouts
        for axis in layout
        for stride, size in axis
        if stride > 0
        for cut in (stride, stride * size)
    }


class Binding:
    """Small sizes for the digits of tokens.

    cuts     the token counts between which there is one digit
    tokens   how many tokens the bound sizes make
    period   how many of them make one copy
    copies   how often the tokens are repeated, as the outermost digit; Values beside the activation
             are equal in each copy
    missing  cuts that a digit needed and the binding does not have
    """

    def __init__(self, cuts: Iterable[int], total: int, copies: int = 1) -> None:
        """Binds the digits between the cuts of ``total`` tokens: to 2, the outermost to 3.

        Raises Mixed if the cuts do not divide each other.
        """
        self.cuts, self.missing = sorted({1, total, *cuts}), set[int]()
        for below, above in pairwise(self.cuts):
            if above % below:
                raise Mixed(None)
        count = len(self.cuts) - 1
        sizes = [2] * (count - 1) + [3] if count else [1]
        self.period, self.copies = prod(sizes), copies
        sizes[-1] *= copies
        self._bound_strides = [*accumulate(sizes, mul, initial=1)]
        self.tokens = self.period * copies

    def refined(self, more: Iterable[int] = ()) -> Binding | None:
        """A binding with the missing cuts and more, too. None if none is new, or they do not
        divide each other.
        """
        cuts = self.missing.union(self.cuts, more)
        try:
            is_finer = len(cuts) > len(self.cuts)
            return Binding(cuts, self.cuts[-1], self.copies) if is_finer else None
        except Mixed:
            return None

    def digit(self, digit: Digit) -> Digit:
        """Stride and size of a digit in the bound tokens. Raises Mixed if it begins or ends at
        no cut.
        """
        stride, size = digit
        if not stride:
            return digit
        if stride < 0:  # rows of a table
            if stride != -size:
                raise Mixed(None)
            return -1, 2
        try:
            low, high = self.cuts.index(stride), self.cuts.index(stride * size)
        except ValueError:
            self.missing |= {stride, stride * size}
            raise Mixed(None) from None
        return self._bound_strides[low], self._bound_strides[high] // self._bound_strides[low]

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """The bound shape of a layout."""
        return tuple(prod(self.digit(digit)[1] for digit in axis) for axis in layout)

    def rows(self, tensor: Tensor, layout: Layout) -> Tensor:
        """The elements of a tensor as [tokens, all else]. Raises Mixed if tokens are missing."""
        digits = [self.digit(digit) for axis in layout for digit in axis]
        if token_count(digits) != self.tokens:
            raise Mixed(None)
        tensor = tensor.reshape([size for _, size in digits]).permute(token_order(digits))
        return tensor.reshape(self.tokens, -1)
