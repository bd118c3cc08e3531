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
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla_fusion.exact import field
from mla_fusion.exact.field import Point
from mla_fusion.exact.weights import Weight
from mla_fusion.graph.form import MOVES, Value, is_widening, order
from mla_fusion.graph.layout import Binding, Layout, Mixed, has_tokens, layout_of, source_layout

_MANY = 1 << 22  # most elements of one Value
_MOST = 1 << 25  # of one that is computed, as a table of positions is; a symbolic size is a prime
_OF_ONE_SOURCE = ("reshape", "permute", "expand", "slice", "reduce")
Elements = Tensor | Weight


class Undecided(Exception):
    """Raised for a Value with too many elements to evaluate. ``args`` is that Value."""


def computed_from(values: Iterable[Value], inputs: Container[Value]) -> list[Value]:
    """The active Values, and the readers of inputs, that ``values`` are computed from."""

    def is_followed(value: Value) -> bool:
        return value.active or any(source in inputs for source in value.sources)

    return order(values, inputs, is_followed)


def layouts_of(values: Iterable[Value], activations: Mapping[Value, Layout]) -> dict[Value, Layout]:
    """The layouts of the activations and of all Values computed from them. Raises Mixed."""
    layouts = dict(activations)
    for value in computed_from(values, activations):
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
        for value in order(evaluated, self.tensors, self.layouts.__contains__):
            self.tensors[value] = self._evaluate(value, self.layouts[value])

    def flat(self, value: Value) -> Tensor:
        """The elements of an evaluated Value as [tokens, all else]. Raises Mixed if tokens are
        missing.
        """
        return self.binding.rows(self.tensors[value], self.layouts[value])

    def dense(self, elements: Elements) -> Tensor:
        """Elements as a tensor."""
        return elements.dense(self.p) if isinstance(elements, Weight) else elements

    # -- Values computed from activations

    def _evaluate(self, value: Value, layout: Layout) -> Tensor:
        """Evaluates a Value that is computed from an activation, in its layout."""
        op, shape = value.op, self.binding.shape(layout)
        if op in _OF_ONE_SOURCE:
            return self._move(value, self.tensors[value.sources[0]], shape)
        if op == "gather":
            return self._gather(value, self.tensors[value.sources[0]], value.sources[1], layout)
        operands = [self._operand(value, place, layout) for place in range(len(value.sources))]
        if op == "dot":
            left, right = operands
            if isinstance(right, Weight):
                return right.product(self.dense(left), self.p)
            return field.product(self.dense(left), right, self.p)
        tensors = list(map(self.dense, operands))
        if op == "join":
            return torch.cat(tensors, value.literal)
        return self._elementwise(value, tensors).expand(shape)

    def _operand(self, value: Value, place: int, layout: Layout) -> Elements:
        """The elements of a source in the layout in which a Value reads it. Raises Mixed if it
        has another layout.
        """
        source, expected_layout = value.sources[place], source_layout(value, place, layout)
        if source in self.layouts:
            if self.layouts[source] != expected_layout:
                raise Mixed(source)
            return self.tensors[source]
        if expected_layout is None:
            raise Mixed(value)
        return self.beside(source, expected_layout)

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

    def _move(self, value: Value, elements: Any, shape: tuple[int, ...]) -> Any:
        """A move, or a sum along axes. Raises Mixed if a weight cannot be reshaped so."""
        op, literal = value.op, value.literal
        if op == "reshape":
            return elements.reshape(shape)
        if op == "permute":
            return elements.permute(literal)
        if op == "expand":
            return elements.expand(shape)
        if op == "slice":
            axis, start, step = literal
            return elements.index_select(axis, torch.arange(value.shape[axis]) * step + start)
        assert op == "reduce", op
        return self.dense(elements).sum(literal) % self.p

    def _gather(self, value: Value, base: Tensor, index: Value, layout: Layout) -> Tensor:
        """Rows of an evaluated table: by literal numbers, or else as a function of numbers and
        table.
        """
        axis = value.literal
        index_layout = layout[axis : axis + len(index.shape)]
        numbers = self.dense(self._operand(value, 1, layout))
        if index.op == "constant" and not has_tokens(index_layout):
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
        """The elements of a Value beside the activations, in the shape of a layout. Raises
        Undecided.
        """
        key = value, layout
        elements = self._beside.get(key)
        if elements is None:
            shape = self.binding.shape(layout)
            if prod(shape) > _MOST and not value.weight and value.op != "expand":
                raise Undecided(value)
            try:
                is_computed = not value.active or value.op in MOVES
                elements = self._compute_beside(value, layout) if is_computed else None
            except (Mixed, RecursionError):
                elements = None
            if elements is None:
                elements = self._random(value, layout)
            elements = self._beside[key] = elements.expand(shape)
        return elements

    def _random(self, value: Value, layout: Layout) -> Elements:
        """Random elements by the Value and the place of each; copies of the tokens have equal
        elements. So have literals that only axes of size 1 tell apart.
        """
        key: object = value.serial
        if value.op == "constant":
            key = value.literal.key, value.dtype, *filter((1).__ne__, value.shape)
        name = field.word(self.point.seed, "value", key)
        if value.model and not has_tokens(layout) and len(value.shape) > 1:
            return Weight.of_leaf(name, value.shape)
        shape = self.binding.shape(layout)
        if prod(shape) > _MANY:
            raise Undecided(value)
        places = torch.zeros(1, dtype=torch.int64)
        for digit in (digit for axis in layout for digit in axis):
            stride, number = self.binding.digit(digit)
            is_copied = stride > 0 and stride * number == self.binding.tokens
            own_size = number // self.binding.copies if is_copied else number
            places = (places.unsqueeze(-1) * own_size + torch.arange(number) % own_size).flatten()
        return field.random_at(name, places.reshape(shape))

    def _compute_beside(self, value: Value, layout: Layout) -> Elements | None:
        """The elements of a Value computed from its sources. None: they are random."""
        op, literal = value.op, value.literal
        if value.is_number:
            return torch.tensor(field.number(value.number, self.point), dtype=torch.int64)
        if op in ("leaf", "opaque", "write") or (
            op in ("constant", "count") and has_tokens(layout)
        ):
            return None
        if op == "constant":
            return field.elements_of(literal.tensor, self.point)
        if op == "count":
            return torch.arange(value.shape[0])
        layouts = [source_layout(value, place, layout) for place in range(len(value.sources))]
        if op == "gather" and layouts[0] is not None and layouts[1] is not None:
            return self._gather_beside(value, layouts[0], layouts[1], layout)
        operands = list[Elements]()
        for source, its_layout in zip(value.sources, layouts, strict=True):
            if its_layout is None:
                return None
            if op in ("reduce", "dot") and prod(self.binding.shape(its_layout)) > _MANY:
                return None
            operands.append(self.beside(source, its_layout))
        if op == "dot":
            left, right = map(self.dense, operands)
            return field.product(left, right, self.p)
        if op == "join":
            weights = [operand for operand in operands if isinstance(operand, Weight)]
            if len(weights) == len(operands):
                return Weight.joined(weights, literal)
            return torch.cat(list(map(self.dense, operands)), literal)
        if op in _OF_ONE_SOURCE:
            return self._move(value, operands[0], self.binding.shape(layout))
        return self._elementwise_beside(value, operands, layout)

    def _elementwise_beside(
        self, value: Value, operands: list[Elements], layout: Layout
    ) -> Elements | None:
        """An element-wise operation beside the activations. A product of weights is a weight; None
        for any other operation of weights.
        """
        if value.op == "cast" and is_widening(value):
            return operands[0]
        weights = [operand for operand in operands if isinstance(operand, Weight)]
        if not weights:
            return self._elementwise(value, list(map(self.dense, operands)))
        if len(weights) < len(operands) or value.op != "product":
            return None
        exponents, number = value.literal
        if number.roots or set(exponents) != {1}:
            return None
        shape = self.binding.shape(layout)
        product = reduce(Weight.times, [weight.expand(shape) for weight in weights])
        return product.scaled(field.fraction(number.ratio, self.p))

    def _gather_beside(
        self, value: Value, base_layout: Layout, index_layout: Layout, layout: Layout
    ) -> Elements | None:
        """Rows of a table beside the activations. None: they are random.

        Two rows stand for all rows of the table, unless the row numbers are literals.
        """
        (base, index), axis = value.sources, value.literal
        table = self.beside(base, base_layout)
        if index.op == "constant" and not has_tokens(index_layout):
            rows = table.index_select(axis, index.literal.tensor.reshape(-1))
            return rows.reshape(self.binding.shape(layout))
        if isinstance(table, Weight):
            return None
        numbers = self.dense(self.beside(index, index_layout))
        name = field.word(self.point.seed, "gather")
        columns = field.hashed(name, *table.movedim(axis, 0))
        leading, trailing = columns.shape[:axis], columns.shape[axis:]
        columns = columns.reshape(*leading, *[1] * numbers.dim(), *trailing)
        return field.hashed(name, numbers.reshape(*numbers.shape, *[1] * len(trailing)), columns)
