"""Evaluates Values for a few tokens at a random point of the field.

``exact/prove.py`` compares both sides of a claim with it. ``propose/`` runs the Values that are
computed from a projection with it.

The caller gives tensors for some Values, the activations. Values computed from them are evaluated
in the layouts that follow from theirs (:func:`layouts_of`).

Other Values are evaluated in the layout in which they meet an activation. Moves, element-wise
functions and a few other operations are computed, down to random elements. The random elements of
a Value depend on the Value alone: it has the same elements wherever it is used.
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

_MANY = 1 << 22  # most elements of one Value
Elements = Tensor | Weight


class Undecided(Exception):
    """Raised for a Value with too many elements to evaluate. ``args`` is that Value."""


def order(
    values: Iterable[Value], inputs: Container[Value], allowed: Container[Value] | None = None
) -> list[Value]:
    """The Values to evaluate for ``values``, sources first.

    It descends to ``inputs``, which are not in the result. With ``allowed`` it stays inside that
    container. Otherwise it follows active Values and readers of inputs.
    """

    def is_allowed(value: Value) -> bool:
        if allowed is not None:
            return value in allowed
        return value.active or any(source in inputs for source in value.sources)

    ordered, seen = list[Value](), set[Value]()
    stack = [(value, False) for value in values]
    while stack:
        value, is_ready = stack.pop()
        if is_ready:
            ordered.append(value)
        elif value not in seen and value not in inputs and is_allowed(value):
            seen.add(value)
            stack.append((value, True))
            stack += [(source, False) for source in value.sources]
    return ordered


def layouts_of(values: Iterable[Value], activations: Mapping[Value, Layout]) -> dict[Value, Layout]:
    """The layouts of the activations and of all Values computed from them. Raises Mixed."""
    layouts = dict(activations)
    for value in order(values, activations):
        if any(source in layouts for source in value.sources):
            layouts[value] = layout_of(value, layouts)
    return layouts


class Evaluation:
    """The elements of Values at one point.

    binding  the bound sizes of the tokens' digits
    layouts  of the activations and of the Values computed from them (:func:`layouts_of`)
    tensors  by Value, its elements in the bound shape; at first those of the activations, whose
             sources are not evaluated
    point    has the seed of all random elements
    p        the prime of the point's field
    """

    def __init__(
        self,
        binding: Binding,
        layouts: Mapping[Value, Layout],
        activations: Mapping[Value, Tensor],
        point: Point,
    ) -> None:
        self.binding, self.layouts, self.point, self.p = binding, layouts, point, point.p
        self.tensors: dict[Value, Tensor] = dict(activations)
        self._beside: dict[tuple[Value, Layout], Elements] = {}

    def run(self, values: Iterable[Value]) -> None:
        """Evaluates the Values, and the Values that they are computed from."""
        evaluated = [value for value in values if value in self.layouts]
        for value in order(evaluated, self.tensors, self.layouts):
            self.tensors[value] = self._evaluate(value, self.layouts[value])

    def flat(self, value: Value) -> Tensor:
        """The elements of an evaluated Value as [tokens, all else]. Raises Mixed if tokens are
        missing.
        """
        layout = self.layouts[value]
        digits = self.binding.digits(layout)
        token_digits = sorted(
            (k for k, digit in enumerate(digits) if digit[0]), key=lambda k: -digits[k][0]
        )
        sizes = [digits[k][1] for k in token_digits]
        if prod(sizes) != self.binding.tokens:
            raise Mixed(value)
        other_digits = [k for k, digit in enumerate(digits) if not digit[0]]
        tensor = self.tensors[value].reshape([size for _, size in digits])
        return tensor.permute([*token_digits, *other_digits]).reshape(self.binding.tokens, -1)

    # -- Values computed from activations

    def _evaluate(self, value: Value, layout: Layout) -> Tensor:
        """Evaluates a Value that is computed from an activation, in its layout."""
        op, literal, sources = value.op, value.literal, value.sources
        shape = self.binding.shape(layout)
        if op in ("sum", "product", "function", "cast"):
            operands = [self._operand(source, broadcast_to(layout, source)) for source in sources]
            return self._elementwise(value, operands).expand(shape)
        if op == "dot":
            return self._dot(value, layout)
        if op == "join":
            parts = []
            for source in sources:
                source_layout = tuple(
                    token_free_axis(source.shape[at]) if at == literal else axis
                    for at, axis in enumerate(layout)
                )
                parts.append(
                    self._operand(source, source_layout).expand(self.binding.shape(source_layout))
                )
            return torch.cat(parts, literal)
        if op == "gather":
            return self._gather(value, self.tensors[sources[0]], sources[1], layout)
        return self._move(value, self.tensors[sources[0]], shape)

    def _operand(self, value: Value, layout: Layout) -> Tensor:
        """The elements of an operand in a layout. Raises Mixed if it has another layout."""
        if value in self.layouts:
            if self.layouts[value] != layout:
                raise Mixed(value)
            return self.tensors[value]
        elements = self.beside(value, layout)
        return elements.dense(self.p) if isinstance(elements, Weight) else elements

    def _elementwise(self, value: Value, operands: list[Tensor]) -> Tensor:
        """An element-wise operation on the elements of its operands."""
        op, literal = value.op, value.literal
        if op == "sum":
            elements = torch.tensor(field.fraction(literal[1], self.p), dtype=torch.int64)
            for coefficient, operand in zip(literal[0], operands, strict=True):
                factor = field.fraction(coefficient, self.p)
                elements = elements + (operand if factor == 1 else operand * factor % self.p)
            return elements % self.p
        if op == "product":
            elements = torch.tensor(field.number(literal[1], self.point), dtype=torch.int64)
            for exponent, operand in zip(literal[0], operands, strict=True):
                if exponent != 1:
                    operand = field.root(operand, exponent, self.point)
                elements = elements * operand % self.p
            return elements
        key = (str(value.dtype), literal) if op == "function" else str(literal)
        return field.hashed(field.word(self.point.seed, op, key), *operands)

    def _move(self, value: Value, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A move, or a sum along axes."""
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
        """A product of matrices."""
        left, right = value.sources
        inner_axis = token_free_axis(left.shape[-1])
        batch = layout[: len(right.shape) - 2]
        left_elements = self._factor(left, (*layout[:-1], inner_axis))
        right_elements = self._factor(right, (*batch, inner_axis, layout[-1]))
        if isinstance(left_elements, Weight):
            left_elements = left_elements.dense(self.p)
        if isinstance(right_elements, Weight):
            return right_elements.product(left_elements, self.p)
        return field.product(left_elements, right_elements, self.p)

    def _factor(self, value: Value, layout: Layout) -> Elements:
        """The elements of a factor in a layout, a weight as a ``Weight``. Raises Mixed."""
        if value in self.layouts:
            if self.layouts[value] != layout:
                raise Mixed(value)
            return self.tensors[value]
        elements = self.beside(value, layout)
        if isinstance(elements, Tensor):
            return elements.expand(self.binding.shape(layout))
        return elements

    def _gather(self, value: Value, base: Tensor, index: Value, layout: Layout) -> Tensor:
        """Rows of an evaluated table: by literal numbers, or else as a function of numbers and
        table.
        """
        axis = value.literal
        index_layout = layout[axis : axis + len(index.shape)]
        numbers = self._operand(index, index_layout)
        if _is_literal(index) and not has_tokens(index_layout):
            elements = base.index_select(axis, numbers.reshape(-1))
            return elements.reshape(self.binding.shape(layout))
        rows = base.movedim(axis, 0)
        name = field.word(self.point.seed, "row", rows.shape[0])
        scale = field.random(name, (rows.shape[0], *[1] * (rows.dim() - 1)))
        columns = (rows * scale % self.p).sum(0) % self.p
        flat = field.hashed(
            field.word(self.point.seed, "gather"), numbers.reshape(-1, 1), columns.reshape(1, -1)
        )
        elements = flat.reshape(*numbers.shape, *columns.shape)
        index_axes = tuple(range(axis, axis + numbers.dim()))
        return elements.movedim(tuple(range(numbers.dim())), index_axes)

    # -- Values beside the activations

    def beside(self, value: Value, layout: Layout) -> Elements:
        """The elements of a Value beside the activations, in a layout. Raises Undecided."""
        key = value, layout
        elements = self._beside.get(key)
        if elements is None:
            try:
                elements = None if value.active else self._compute_beside(value, layout)
            except (Mixed, RecursionError):
                elements = None
            if elements is None:
                elements = self._random(value, layout)
            self._beside[key] = elements
        return elements

    def _random(self, value: Value, layout: Layout) -> Elements:
        """Random elements by the Value and the place of each; copies of the tokens have equal
        elements.
        """
        name = field.word(self.point.seed, "value", value.serial)
        if value.model and not has_tokens(layout) and len(value.shape) > 1:
            return Weight.of_leaf(name, value.shape)
        shape = self.binding.shape(layout)
        if prod(shape) > _MANY:
            raise Undecided(value)
        places, count = torch.zeros((), dtype=torch.int64), 1
        for axis, size in zip(reversed(layout), reversed(shape), strict=True):
            axis_places, axis_size = torch.zeros(1, dtype=torch.int64), 1
            for digit in axis:
                stride, number = self.binding.digit(digit)
                is_copied = stride > 0 and stride * number == self.binding.tokens
                own_size = number // self.binding.copies if is_copied else number
                axis_places = (
                    axis_places.unsqueeze(-1) * own_size + torch.arange(number) % own_size
                ).reshape(-1)
                axis_size *= own_size
            places = places + axis_places.view(size, *[1] * places.dim()) * count
            count *= axis_size
        return field.random_at(name, places).expand(shape)

    def _compute_beside(self, value: Value, layout: Layout) -> Elements | None:
        """The elements of a Value computed from its sources. None: they are random."""
        op, literal, sources = value.op, value.literal, value.sources
        if value.is_number:
            return torch.tensor(field.number(literal[1], self.point), dtype=torch.int64)
        if op == "constant":
            return None if has_tokens(layout) else field.elements_of(literal.tensor, self.point)
        if op == "count":
            return None if has_tokens(layout) else torch.arange(value.shape[0])
        if op in ("sum", "product", "function", "cast"):
            return self._beside_elementwise(value, layout)
        if op == "reduce":
            axes = iter(layout)
            source_shape = sources[0].shape
            source_layout = tuple(
                token_free_axis(n) if at in literal else next(axes)
                for at, n in enumerate(source_shape)
            )
            if prod(self.binding.shape(source_layout)) > _MANY:
                return None
            elements = self.beside(sources[0], source_layout)
            elements = elements.dense(self.p) if isinstance(elements, Weight) else elements
            return elements.expand(self.binding.shape(source_layout)).sum(literal) % self.p
        if op == "gather":
            return self._beside_gather(value, layout)
        if op == "dot":  # a product of which one row is known
            return self._beside_dot(value, layout)
        if op in ("reshape", "permute", "expand", "slice", "join"):
            return self._beside_move(value, layout)
        return None

    def _beside_elementwise(self, value: Value, layout: Layout) -> Elements | None:
        """An element-wise operation beside the activations; of weights, if the result is a
        weight.
        """
        operands = [self.beside(source, broadcast_to(layout, source)) for source in value.sources]
        if any(isinstance(operand, Weight) for operand in operands):
            first = operands[0]
            if len(operands) == 1 and isinstance(first, Weight) and value.op == "product":
                exponents, times = value.literal
                if exponents == (1,) and not times.roots:
                    return first.scaled(field.fraction(times.ratio, self.p))
            if value.op == "cast" and isinstance(first, Weight) and is_widening(value):
                return first
            return self._product_of_weights(value, operands)
        if value.op == "cast" and is_widening(value):
            return operands[0]
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        return self._elementwise(value, tensors).expand(self.binding.shape(layout))

    def _product_of_weights(self, value: Value, operands: list[Elements]) -> Elements | None:
        """A product of weights as a weight. None for any other operation of weights."""
        if value.op != "product" or value.literal[1].roots or set(value.literal[0]) != {1}:
            return None
        product = None
        for operand in operands:
            if not isinstance(operand, Weight):
                return None
            expanded = operand.expanded(value.shape)
            product = expanded if product is None else product.times(expanded)
        return product.scaled(field.fraction(value.literal[1].ratio, self.p)) if product else None

    def _beside_dot(self, value: Value, layout: Layout) -> Elements | None:
        """A product of matrices beside the activations. None if a weight has too many elements."""
        left, right = value.sources
        inner_axis = token_free_axis(left.shape[-1])
        sides = (
            (left, (*layout[:-1], inner_axis)),
            (right, (*layout[: len(right.shape) - 2], inner_axis, layout[-1])),
        )
        side_elements = []
        for side, side_layout in sides:
            elements = self.beside(side, side_layout)
            if isinstance(elements, Weight) and prod(side.shape) > _MANY:
                return None
            elements = elements.dense(self.p) if isinstance(elements, Weight) else elements
            side_elements.append(elements.expand(self.binding.shape(side_layout)))
        left_elements, right_elements = side_elements
        return field.product(left_elements, right_elements, self.p)

    def _beside_move(self, value: Value, layout: Layout) -> Elements | None:
        """A move beside the activations: of a weight's places, or of elements. None: it is
        random.
        """
        op, literal, source = value.op, value.literal, value.sources[0]
        shape = self.binding.shape(layout)
        if op == "join":
            if not is_token_free(layout[literal]):
                return None
            parts = []
            for source_of_part in value.sources:
                source_layout = tuple(
                    token_free_axis(source_of_part.shape[at]) if at == literal else axis
                    for at, axis in enumerate(layout)
                )
                part = self.beside(source_of_part, source_layout)
                if isinstance(part, Tensor):
                    part = part.expand(self.binding.shape(source_layout))
                parts.append(part)
            weights = [part for part in parts if isinstance(part, Weight)]
            if len(weights) == len(parts):
                return Weight.joined(weights, literal)
            dense = [part.dense(self.p) if isinstance(part, Weight) else part for part in parts]
            return torch.cat(dense, literal)
        if op == "reshape":
            regrouped_layout = regroup(layout, source.shape)
            if regrouped_layout is None:
                return None
            elements = self.beside(source, regrouped_layout)
            if isinstance(elements, Weight):
                return elements.reshaped(value.shape)
            return elements.expand(self.binding.shape(regrouped_layout)).reshape(shape)
        if op == "permute":
            inverse = [literal.index(axis) for axis in range(len(literal))]
            source_layout = tuple(layout[at] for at in inverse)
            elements = self.beside(source, source_layout)
            if isinstance(elements, Weight):
                return elements.permuted(literal)
            return elements.expand(self.binding.shape(source_layout)).permute(literal)
        if op == "expand":
            elements = self.beside(source, broadcast_to(layout, source))
            if isinstance(elements, Weight):
                return elements.expanded(value.shape)
            return elements.expand(shape)
        axis, start, step = literal
        if not is_token_free(layout[axis]):
            return None
        source_layout = (*layout[:axis], token_free_axis(source.shape[axis]), *layout[axis + 1 :])
        places = torch.arange(value.shape[axis]) * step + start
        elements = self.beside(source, source_layout)
        if isinstance(elements, Weight):
            return elements.taken(axis, places)
        return elements.expand(self.binding.shape(source_layout)).index_select(axis, places)

    def _beside_gather(self, value: Value, layout: Layout) -> Elements | None:
        """Rows of a table beside the activations. None: they are random."""
        base, index = value.sources
        axis, rank = value.literal, len(index.shape)
        index_layout = layout[axis : axis + rank]
        size = base.shape[axis]
        if _is_literal(index) and not has_tokens(index_layout):
            base_layout = (*layout[:axis], token_free_axis(size), *layout[axis + rank :])
            places = index.literal.tensor
            elements = self.beside(base, base_layout)
            if isinstance(elements, Weight):
                return elements.taken(axis, places) if places.dim() == 1 else None
            elements = elements.expand(self.binding.shape(base_layout)).index_select(
                axis, places.reshape(-1)
            )
            return elements.reshape(self.binding.shape(layout))
        # two rows stand for all rows of the table
        rows = ((-size, size),) if size != 1 else ()
        base_layout = (*layout[:axis], rows, *layout[axis + rank :])
        elements = self.beside(base, base_layout)
        if isinstance(elements, Weight):
            return None
        table = elements.expand(self.binding.shape(base_layout))
        return self._gather_unknown_rows(table, index, index_layout, axis)

    def _gather_unknown_rows(
        self, table: Tensor, index: Value, index_layout: Layout, axis: int
    ) -> Tensor:
        """Elements as a function of the row numbers and of the two rows of the table."""
        numbers = self._operand(index, index_layout)
        numbers = numbers.expand(self.binding.shape(index_layout))
        name = field.word(self.point.seed, "gather")
        columns = field.hashed(name, *table.movedim(axis, 0))
        leading, trailing = columns.shape[:axis], columns.shape[axis:]
        columns = columns.reshape(*leading, *[1] * numbers.dim(), *trailing)
        return field.hashed(name, numbers.reshape(*numbers.shape, *[1] * len(trailing)), columns)


def _is_literal(index: Value) -> bool:
    """True if the row numbers are literals."""
    return index.op == "constant"


def is_widening(cast: Value) -> bool:
    """True if the cast keeps every number of the source's dtype."""
    source, dtype = cast.sources[0].dtype, cast.dtype
    if source == torch.bool:
        return dtype != torch.bool
    if dtype == torch.bool:
        return False
    if not source.is_floating_point:
        if dtype.is_floating_point:
            bits = 8 * source.itemsize
            return torch.finfo(dtype).eps <= 2.0 ** (1 - bits)
        source_range, result_range = torch.iinfo(source), torch.iinfo(dtype)
        return result_range.min <= source_range.min and result_range.max >= source_range.max
    if not dtype.is_floating_point:
        return False
    source_info, result_info = torch.finfo(source), torch.finfo(dtype)
    return result_info.eps <= source_info.eps and result_info.max >= source_info.max
