"""Values for a few tokens at a random point of the field.

What is made of the values given (an activation) is computed, in the layout that follows from
theirs. What is beside that is asked for in the layout in which it meets them; so far as it is moves
and functions, element by element, these are computed too, and what is left is drawn by which Value
it is: the same Value is the same numbers, wherever it is used.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from math import prod

import torch
from torch import Tensor

from mla_fusion.exact import field
from mla_fusion.exact.field import Point
from mla_fusion.exact.weights import Weight
from mla_fusion.graph.form import Value
from mla_fusion.graph.layout import (
    Binding,
    Layout,
    Mixed,
    broadcast_to,
    has_tokens,
    is_token_free,
    layout_of,
    regroup,
    token_free_axis,
)

_MANY = 1 << 22  # elements of one Value
Found = Tensor | Weight


class Undecided(Exception):
    """A Value that is too large to be run: ``args`` is it."""


def order(
    values: Iterable[Value], known: Container[Value], inside: Container[Value] | None = None
) -> list[Value]:
    """What the Values are made of, sources first, down to what is known: of activations, and of
    what reads what is known; or of those inside.
    """

    def is_inside(value: Value) -> bool:
        if inside is not None:
            return value in inside
        return value.active or any(source in known for source in value.sources)

    found, seen = list[Value](), set[Value]()
    stack = [(value, False) for value in values]
    while stack:
        value, is_ready = stack.pop()
        if is_ready:
            found.append(value)
        elif value not in seen and value not in known and is_inside(value):
            seen.add(value)
            stack.append((value, True))
            stack += [(source, False) for source in value.sources]
    return found


def layouts_of(values: Iterable[Value], given: Mapping[Value, Layout]) -> dict[Value, Layout]:
    """The layouts of the Values given and of what is made of them. Raises Mixed."""
    found = dict(given)
    for value in order(values, given):
        if any(source in found for source in value.sources):
            found[value] = layout_of(value, found)
    return found


class Evaluation:
    """
    layouts  of the Values given and of what is made of them (:func:`layouts_of`)
    given    tensors of the bound shape: nothing above them is run
    at       the point, with its field
    """

    def __init__(
        self,
        binding: Binding,
        layouts: Mapping[Value, Layout],
        given: Mapping[Value, Tensor],
        at: Point,
    ) -> None:
        self.binding, self.layouts, self.at, self.p = binding, layouts, at, at.p
        self.tensors: dict[Value, Tensor] = dict(given)
        self._beside: dict[tuple[Value, Layout], Found] = {}

    def run(self, values: Iterable[Value]) -> None:
        """Compute them, and what they are made of."""
        wanted = [value for value in values if value in self.layouts]
        for value in order(wanted, self.tensors, self.layouts):
            self.tensors[value] = self._made(value, self.layouts[value])

    def flat(self, value: Value) -> Tensor:
        """[tokens, the rest] of what was run."""
        layout = self.layouts[value]
        digits = self.binding.digits(layout)
        at = sorted((k for k, one in enumerate(digits) if one[0]), key=lambda k: -digits[k][0])
        sizes = [digits[k][1] for k in at]
        if prod(sizes) != self.binding.tokens:
            raise Mixed(value)
        rest = [k for k, one in enumerate(digits) if not one[0]]
        tensor = self.tensors[value].reshape([size for _, size in digits])
        return tensor.permute([*at, *rest]).reshape(self.binding.tokens, -1)

    # -- made of what is given

    def _made(self, value: Value, layout: Layout) -> Tensor:
        op, literal, sources = value.op, value.literal, value.sources
        shape = self.binding.shape(layout)
        if op in ("sum", "product", "function", "cast"):
            read = [self._operand(one, broadcast_to(layout, one)) for one in sources]
            return self._elementwise(value, read).expand(shape)
        if op == "dot":
            return self._dot(value, layout)
        if op == "join":
            parts = []
            for one in sources:
                own = tuple(
                    token_free_axis(one.shape[at]) if at == literal else axis
                    for at, axis in enumerate(layout)
                )
                parts.append(self._operand(one, own).expand(self.binding.shape(own)))
            return torch.cat(parts, literal)
        if op == "gather":
            return self._gathered(value, self.tensors[sources[0]], sources[1], layout)
        return self._moved(value, self.tensors[sources[0]], shape)

    def _operand(self, value: Value, layout: Layout) -> Tensor:
        if value in self.layouts:
            if self.layouts[value] != layout:
                raise Mixed(value)
            return self.tensors[value]
        found = self.beside(value, layout)
        return found.dense(self.p) if isinstance(found, Weight) else found

    def _elementwise(self, value: Value, read: list[Tensor]) -> Tensor:
        op, literal = value.op, value.literal
        if op == "sum":
            found = torch.tensor(field.fraction(literal[1], self.p), dtype=torch.int64)
            for coefficient, one in zip(literal[0], read, strict=True):
                factor = field.fraction(coefficient, self.p)
                found = found + (one if factor == 1 else one * factor % self.p)
            return found % self.p
        if op == "product":
            found = torch.tensor(field.number(literal[1], self.at), dtype=torch.int64)
            for exponent, one in zip(literal[0], read, strict=True):
                if exponent != 1:
                    one = field.root(one, exponent, self.at)
                found = found * one % self.p
            return found
        key = (str(value.dtype), literal) if op == "function" else str(literal)
        return field.hashed(field.word(self.at.seed, op, key), *read)

    def _moved(self, value: Value, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        op, literal = value.op, value.literal
        if op == "reshape":
            return tensor.reshape(shape)
        if op == "permute":
            return tensor.permute(literal)
        if op == "expand":
            return tensor.expand(shape)
        if op == "slice":
            axis, start, step = literal
            places = torch.arange(value.shape[axis]) * step + start
            return tensor.index_select(axis, places)
        assert op == "reduce", op
        return tensor.sum(literal) % self.p

    def _dot(self, value: Value, layout: Layout) -> Tensor:
        left, right = value.sources
        size = token_free_axis(left.shape[-1])
        batch = layout[: len(right.shape) - 2]
        one = self._of_source(left, (*layout[:-1], size))
        other = self._of_source(right, (*batch, size, layout[-1]))
        if isinstance(one, Weight):
            one = one.dense(self.p)
        if isinstance(other, Weight):
            return other.product(one, self.p)
        return field.product(one, other, self.p)

    def _of_source(self, value: Value, layout: Layout) -> Found:
        if value in self.layouts:
            if self.layouts[value] != layout:
                raise Mixed(value)
            return self.tensors[value]
        found = self.beside(value, layout)
        if isinstance(found, Tensor):
            return found.expand(self.binding.shape(layout))
        return found

    def _gathered(self, value: Value, base: Tensor, index: Value, layout: Layout) -> Tensor:
        """Of rows that all stand there; by numbers that are known, or as a function of them."""
        axis = value.literal
        own = layout[axis : axis + len(index.shape)]
        numbers = self._operand(index, own)
        if _is_listed(index) and not has_tokens(own):
            found = base.index_select(axis, numbers.reshape(-1))
            return found.reshape(self.binding.shape(layout))
        rows = base.movedim(axis, 0)
        name = field.word(self.at.seed, "row", rows.shape[0])
        scale = field.random(name, (rows.shape[0], *[1] * (rows.dim() - 1)))
        columns = (rows * scale % self.p).sum(0) % self.p
        flat = field.hashed(
            field.word(self.at.seed, "gather"), numbers.reshape(-1, 1), columns.reshape(1, -1)
        )
        found = flat.reshape(*numbers.shape, *columns.shape)
        back = tuple(range(axis, axis + numbers.dim()))
        return found.movedim(tuple(range(numbers.dim())), back)

    # -- beside that

    def beside(self, value: Value, layout: Layout) -> Found:
        key = value, layout
        found = self._beside.get(key)
        if found is None:
            try:
                found = None if value.active else self._computed(value, layout)
            except (Mixed, RecursionError):
                found = None
            if found is None:
                found = self._drawn(value, layout)
            self._beside[key] = found
        return found

    def _drawn(self, value: Value, layout: Layout) -> Found:
        """By which Value it is, and the place of each element; copies of tokens are alike."""
        name = field.word(self.at.seed, "value", value.serial)
        if value.model and not has_tokens(layout) and len(value.shape) > 1:
            return Weight.of_leaf(name, value.shape)
        shape = self.binding.shape(layout)
        if prod(shape) > _MANY:
            raise Undecided(value)
        places, count = torch.zeros((), dtype=torch.int64), 1
        for axis, size in zip(reversed(layout), reversed(shape), strict=True):
            own, kept = torch.zeros(1, dtype=torch.int64), 1
            for digit in axis:
                stride, number = self.binding.digit(digit)
                is_copied = stride > 0 and stride * number == self.binding.tokens
                once = number // self.binding.copies if is_copied else number
                own = (own.unsqueeze(-1) * once + torch.arange(number) % once).reshape(-1)
                kept *= once
            places = places + own.view(size, *[1] * places.dim()) * count
            count *= kept
        return field.random_at(name, places).expand(shape)

    def _computed(self, value: Value, layout: Layout) -> Found | None:
        """None: it is drawn."""
        op, literal, sources = value.op, value.literal, value.sources
        if value.is_number:
            return torch.tensor(field.number(literal[1], self.at), dtype=torch.int64)
        if op == "constant":
            return None if has_tokens(layout) else field.elements_of(literal.tensor, self.at)
        if op == "count":
            return None if has_tokens(layout) else torch.arange(value.shape[0])
        if op in ("sum", "product", "function", "cast"):
            return self._beside_elementwise(value, layout)
        if op == "reduce":
            axes = iter(layout)
            inner = sources[0].shape
            own = tuple(
                token_free_axis(n) if at in literal else next(axes) for at, n in enumerate(inner)
            )
            if prod(self.binding.shape(own)) > _MANY:
                return None
            found = self.beside(sources[0], own)
            found = found.dense(self.p) if isinstance(found, Weight) else found
            return found.expand(self.binding.shape(own)).sum(literal) % self.p
        if op == "gather":
            return self._beside_gather(value, layout)
        if op == "dot":  # a product with an activation, of which one row is known
            return self._beside_dot(value, layout)
        if op in ("reshape", "permute", "expand", "slice", "join"):
            return self._beside_move(value, layout)
        return None

    def _beside_elementwise(self, value: Value, layout: Layout) -> Found | None:
        read = [self.beside(one, broadcast_to(layout, one)) for one in value.sources]
        if any(isinstance(one, Weight) for one in read):
            only = read[0]
            if len(read) == 1 and isinstance(only, Weight) and value.op == "product":
                exponents, times = value.literal
                if exponents == (1,) and not times.roots:
                    return only.scaled(field.fraction(times.ratio, self.p))
            if value.op == "cast" and isinstance(only, Weight) and is_widening(value):
                return only
            return self._weights_times(value, read)
        if value.op == "cast" and is_widening(value):
            return read[0]
        tensors = [one for one in read if isinstance(one, Tensor)]
        return self._elementwise(value, tensors).expand(self.binding.shape(layout))

    def _weights_times(self, value: Value, read: list[Found]) -> Found | None:
        """A product of weights; of anything else: None."""
        if value.op != "product" or value.literal[1].roots or set(value.literal[0]) != {1}:
            return None
        found = None
        for one in read:
            if not isinstance(one, Weight):
                return None
            wide = one.expanded(value.shape)
            found = wide if found is None else found.times(wide)
        return found.scaled(field.fraction(value.literal[1].ratio, self.p)) if found else None

    def _beside_dot(self, value: Value, layout: Layout) -> Found | None:
        left, right = value.sources
        size = token_free_axis(left.shape[-1])
        sides = (
            (left, (*layout[:-1], size)),
            (right, (*layout[: len(right.shape) - 2], size, layout[-1])),
        )
        read = []
        for side, own in sides:
            part = self.beside(side, own)
            if isinstance(part, Weight) and prod(side.shape) > _MANY:
                return None
            part = part.dense(self.p) if isinstance(part, Weight) else part
            read.append(part.expand(self.binding.shape(own)))
        one, other = read
        return field.product(one, other, self.p)

    def _beside_move(self, value: Value, layout: Layout) -> Found | None:
        op, literal, source = value.op, value.literal, value.sources[0]
        shape = self.binding.shape(layout)
        if op == "join":
            if not is_token_free(layout[literal]):
                return None
            parts = []
            for one in value.sources:
                own = tuple(
                    token_free_axis(one.shape[at]) if at == literal else axis
                    for at, axis in enumerate(layout)
                )
                part = self.beside(one, own)
                if isinstance(part, Tensor):
                    part = part.expand(self.binding.shape(own))
                parts.append(part)
            weights = [part for part in parts if isinstance(part, Weight)]
            if len(weights) == len(parts):
                return Weight.joined(weights, literal)
            dense = [part.dense(self.p) if isinstance(part, Weight) else part for part in parts]
            return torch.cat(dense, literal)
        if op == "reshape":
            above = regroup(layout, source.shape)
            if above is None:
                return None
            found = self.beside(source, above)
            if isinstance(found, Weight):
                return found.reshaped(value.shape)
            return found.expand(self.binding.shape(above)).reshape(shape)
        if op == "permute":
            back = [literal.index(axis) for axis in range(len(literal))]
            own = tuple(layout[at] for at in back)
            found = self.beside(source, own)
            if isinstance(found, Weight):
                return found.permuted(literal)
            return found.expand(self.binding.shape(own)).permute(literal)
        if op == "expand":
            found = self.beside(source, broadcast_to(layout, source))
            if isinstance(found, Weight):
                return found.expanded(value.shape)
            return found.expand(shape)
        axis, start, step = literal
        if not is_token_free(layout[axis]):
            return None
        own = (*layout[:axis], token_free_axis(source.shape[axis]), *layout[axis + 1 :])
        places = torch.arange(value.shape[axis]) * step + start
        found = self.beside(source, own)
        if isinstance(found, Weight):
            return found.taken(axis, places)
        return found.expand(self.binding.shape(own)).index_select(axis, places)

    def _beside_gather(self, value: Value, layout: Layout) -> Found | None:
        base, index = value.sources
        axis, rank = value.literal, len(index.shape)
        of_index = layout[axis : axis + rank]
        size = base.shape[axis]
        if _is_listed(index) and not has_tokens(of_index):
            own = (*layout[:axis], token_free_axis(size), *layout[axis + rank :])
            places = index.literal.tensor
            found = self.beside(base, own)
            if isinstance(found, Weight):
                return found.taken(axis, places) if places.dim() == 1 else None
            found = found.expand(self.binding.shape(own)).index_select(axis, places.reshape(-1))
            return found.reshape(self.binding.shape(layout))
        # two rows stand for all of them
        rows = ((-size, size),) if size != 1 else ()
        own = (*layout[:axis], rows, *layout[axis + rank :])
        found = self.beside(base, own)
        if isinstance(found, Weight):
            return None
        table = found.expand(self.binding.shape(own))
        return self._gathered_beside(table, index, of_index, axis)

    def _gathered_beside(self, table: Tensor, index: Value, of_index: Layout, axis: int) -> Tensor:
        numbers = self._operand(index, of_index)
        numbers = numbers.expand(self.binding.shape(of_index))
        name = field.word(self.at.seed, "gather")
        columns = field.hashed(name, *table.movedim(axis, 0))
        lead, rest = columns.shape[:axis], columns.shape[axis:]
        columns = columns.reshape(*lead, *[1] * numbers.dim(), *rest)
        return field.hashed(name, numbers.reshape(*numbers.shape, *[1] * len(rest)), columns)


def _is_listed(index: Value) -> bool:
    return index.op == "constant"


def is_widening(cast: Value) -> bool:
    """Does a cast keep every number? Of integers to floats of float32 and wider, as far as slots
    and positions go.
    """
    source, dtype = cast.sources[0].dtype, cast.dtype
    if source == torch.bool:
        return dtype != torch.bool
    if dtype == torch.bool:
        return False
    if not source.is_floating_point:
        if dtype.is_floating_point:
            least = 8 * source.itemsize
            return torch.finfo(dtype).eps <= 2.0 ** (1 - least)
        before, after = torch.iinfo(source), torch.iinfo(dtype)
        return after.min <= before.min and after.max >= before.max
    if not dtype.is_floating_point:
        return False
    one, other = torch.finfo(source), torch.finfo(dtype)
    return other.eps <= one.eps and other.max >= one.max
