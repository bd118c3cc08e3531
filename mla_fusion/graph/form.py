"""Values: one form for what a graph computes. Equal Values are one object.

``graph/read.py`` reads an FX graph into Values with the constructors of ``Form``.
``targets/prolog.py`` writes the kernel with the same constructors. ``exact/prove.py`` compares the
two, and ``graph/lower.py`` turns Values back into nodes.

The operations:

leaf       an input of the graph, an attribute, or what a proof puts in place of a Value
constant   a tensor of literals
count      positions along one axis: 0, 1, ..
sum        coefficients times Values, added up, plus a number
product    Values to rational exponents, multiplied, times a number
function   one element from the elements at its place; only its name and literals are known
opaque     a computation of all elements of its sources; only its name and literals are known
reduce     the sum along axes
dot        [.., t, k] times [.., k, m]
reshape, permute, expand, slice, join
gather     rows of an axis, by their numbers
write      rows [t, width] into [n, width], by row numbers [t]
cast

Constructors are the only way to make a Value, and they bring it to one normal order: number, then
sum and product, then move. A number stands in front of a move or a sum along axes. A move stands
inside a single power. A sum of sums becomes one sum if the inner one is short. No other rule copies
a part of the graph.

A Value is ``active`` if it is computed from a product with a weight. Float arithmetic on active
Values is exact arithmetic of real numbers. Float arithmetic on other Values (tables, scales,
weights) is a function: equal steps on equal operands are equal, and nothing more is assumed.
Exceptions are moves, negation and products with powers of two. Beside an active Value the operand's
last rounding is left out, as that of the result is (``Form.bare``).
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, reduce
from hashlib import blake2b
from itertools import accumulate, groupby
from math import isfinite, prod
from operator import attrgetter
from typing import Any

import torch

from mla_fusion.graph.numbers import MINUS_ONE, ONE, ZERO, Exponent, Number, is_open, number
from mla_fusion.graph.numbers import literal as read_literal

Shape = tuple[int, ...]
MOVES = frozenset(("reshape", "permute", "expand", "slice", "join"))
REAL = torch.float32  # dtype of every active Value: its rounding is not compared
BYTES = frozenset(("int8", "fp8", "hifloat8", "of format"))  # functions of one byte an element
_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))
_SHORT = 4  # most terms of a sum that is merged into another sum


class Array:
    """A tensor of literals. Two Arrays are equal if their bytes are.

    key  a hash of the bytes, the same in every process
    """

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().cpu().contiguous()
        flat = self.tensor.reshape(-1)
        self.key: bytes = blake2b(flat.view(torch.uint8).numpy().tobytes()).digest()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self.key == other.key


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """One operation on other Values.

    op       the operation's name
    sources  the Values it reads
    literal  its other arguments: the name of a leaf; name and literals of a function or an opaque;
             exponents and number of a product; coefficients and number of a sum; axes
    active   True if the Value is computed from a product with a weight
    model    True if it is computed from parameters, buffers and literals alone
    weight   True if it is ``model`` and reads at least one parameter or buffer
    kind     an integer that is equal for equal operation, literal, shape, dtype, model and active;
             the name of a leaf and the sources do not count
    serial   its place in the order in which the Form made its Values
    """

    op: str
    sources: tuple[Value, ...]
    literal: Any
    shape: Shape
    dtype: torch.dtype
    serial: int
    active: bool
    model: bool
    weight: bool
    kind: int

    def __repr__(self) -> str:
        sources = ", ".join(f"%{source.serial}" for source in self.sources)
        return f"%{self.serial} {self.op}({sources}) {self.literal} {list(self.shape)}"

    @property
    def is_number(self) -> bool:
        """True for a scalar Value of a number."""
        return self.op == "product" and not self.sources

    @property
    def function(self) -> str:
        """The name of a function; "" for any other operation."""
        return self.literal[0] if self.op == "function" else ""

    @property
    def operands(self) -> list[tuple[Value, Any]]:
        """The sources of a product with their exponents, of a sum with their coefficients."""
        return list(zip(self.sources, self.literal[0], strict=True))

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def number(self) -> Any:
        """The number in front of a product, or the one that a sum adds."""
        return self.literal[1]

    @property
    def is_multiple(self) -> bool:
        """True for a number times one Value."""
        return self.op == "product" and self.literal[0] == (1,)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point


Term = tuple[Exponent, Value]
Factor = tuple[Value, Exponent]


class Form:
    """Makes and interns Values: equal arguments return the same object.

    assumed      assumptions about numbers, as sentences for the report; the reader clears the list
    keeps_parts  True: memory with rows put into a part of it is a join, not a write by row numbers
    """

    def __init__(self, keeps_parts: bool = False) -> None:
        self.keeps_parts = keeps_parts
        self._values: dict[object, Value] = {}
        self._operations: dict[object, int] = {}
        self._bare: dict[tuple[Value, bool], Value] = {}
        self._split: dict[Value, tuple[Number, Value]] = {}
        self.assumed: list[str] = []

    def make(
        self,
        op: str,
        sources: Sequence[Value] = (),
        literal: Any = None,
        shape: Sequence[int] = (),
        dtype: torch.dtype = REAL,
        *,
        model: bool | None = None,
    ) -> Value:
        """Returns the interned Value of an operation, without bringing it to the normal order.

        ``model`` must be passed for a leaf; otherwise it follows from the sources.
        """
        shape, sources = tuple(shape), tuple(sources)
        operation = self._operation_number(op, literal, shape, dtype)
        key = operation, sources
        value = self._values.get(key)
        if value is None:
            if model is None:
                model = False not in [source.model for source in sources]
            is_leaf = op == "leaf"
            weight = model and (is_leaf or True in [source.weight for source in sources])
            is_product = op == "dot" and sources[1].weight and not sources[0].model
            active = is_product or True in [source.active for source in sources]
            if is_leaf:
                operation = self._operation_number(op, None, shape, dtype)
            kind, serial = 4 * operation + 2 * model + active, len(self._values) + 1
            value = Value(op, sources, literal, shape, dtype, serial, active, model, weight, kind)
            self._values[key] = value
        return value

    def _operation_number(self, *operation: object) -> int:
        """Returns one integer for each distinct operation."""
        return self._operations.setdefault(operation, len(self._operations))

    # -- where Values begin

    def leaf(self, name: str, shape: Sequence[int], dtype: torch.dtype, model: bool) -> Value:
        """An input or an attribute. ``model``: it belongs to the model."""
        return self.make("leaf", (), name, shape, dtype, model=model)

    def activation(self, name: str, shape: Sequence[int]) -> Value:
        """A leaf that stands for a product with a weight: it is active."""
        value = self.leaf(name, shape, REAL, False)
        if not value.active:
            value.active, value.kind = True, value.kind + 1
        return value

    def number(self, ratio: Number | Exponent, dtype: torch.dtype = REAL) -> Value:
        """A scalar Value of a number."""
        ratio = ratio if isinstance(ratio, Number) else number(ratio)
        return self.make("product", (), ((), ratio), (), dtype)

    def filled(self, ratio: Number | Exponent, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """A Value of ``shape`` whose elements are all one number."""
        return self.expand(self.number(ratio, dtype), shape)

    def constant(self, tensor: torch.Tensor) -> Value:
        """The Value of a tensor of literals; a filled Value if all elements are one finite
        number.
        """
        first = tensor.reshape(-1)[:1]
        if tensor.numel() and bool((tensor == first).all()):
            element = first.item()
            if isfinite(element):
                return self.filled(read_literal(element, tensor.dtype), tensor.shape, tensor.dtype)
        return self.make("constant", (), Array(tensor), tensor.shape, tensor.dtype)

    def count(self, size: int) -> Value:
        """The positions 0 .. size - 1, shape [size]."""
        if size == 1:
            return self.filled(0, (1,), torch.int64)
        return self.make("count", (), None, (size,), torch.int64)

    # -- sums and products

    def total(
        self, terms: Iterable[Term], constant: Exponent = 0, dtype: torch.dtype = REAL
    ) -> Value:
        """The sum of coefficients times Values, plus a constant; operands are broadcast."""
        terms = list(terms)
        shape = broadcast(value.shape for _, value in terms)
        coefficient_of = defaultdict[Value, Exponent](int)
        for coefficient, value in terms:
            factor, unscaled = self.split(value)
            if unscaled is not value and not factor.roots:
                coefficient, value = coefficient * factor.ratio, unscaled
            inner = strip(value, "expand")
            if inner.is_number and not inner.number.roots:
                constant += coefficient * inner.number.ratio
            elif value.op == "sum" and len(value.sources) <= _SHORT:
                constant += coefficient * value.number
                for source, inner_coefficient in value.operands:
                    coefficient_of[source] += coefficient * inner_coefficient
            else:
                coefficient_of[value] += coefficient
        items = _by_serial(coefficient_of)
        if not items:
            return self.filled(constant, shape, dtype)
        if len(items) == 1 and not constant:
            ((value, coefficient),) = items
            return self.expand(self.scaled(value, number(coefficient)), shape)
        values, coefficients = zip(*items, strict=True)
        common = coefficients[0]
        if not constant and common != 1 and {*coefficients} == {common}:
            unscaled_sum = self.total([(1, value) for value in values], 0, dtype)
            return self.expand(self.scaled(unscaled_sum, number(common)), shape)
        literal = coefficients, constant
        own_shape = broadcast(value.shape for value in values)
        return self.expand(self.make("sum", values, literal, own_shape, dtype), shape)

    def product(
        self, factors: Iterable[Factor], times: Number = ONE, dtype: torch.dtype = REAL
    ) -> Value:
        """The product of Values to exponents, times a number; operands are broadcast."""
        factors = list(factors)
        shape = broadcast(value.shape for value, _ in factors)
        exponent_of = defaultdict[Value, Exponent](int)
        stack = factors[::-1]
        while stack:
            value, exponent = stack.pop()
            value = strip(value, "expand")  # factors are broadcast
            if _is_dequantised(value):
                inner, value = self.split(value)
                power = inner.power(exponent)
                if power is None:
                    value = self.scaled(value, inner)
                else:
                    times = times * power
            elif value.op == "product":
                power = value.number.power(exponent)
                is_sign_kept = len(value.sources) <= 1 and all(
                    inner_exponent.denominator > 1 or inner_exponent.numerator % 2
                    for _, inner_exponent in value.operands
                )
                if power is not None and (exponent.denominator == 1 or is_sign_kept):
                    times = times * power
                    stack += [
                        (source, inner_exponent * exponent)
                        for source, inner_exponent in value.operands
                    ]
                    continue
            elif value.op == "sum" and exponent.denominator > 1:  # one form for each radicand
                lead = value.literal[0][0]
                power = number(lead).power(exponent) if lead != 1 else None
                if power is not None:
                    times, value = times * power, self.total([(Fraction(1) / lead, value)])
            exponent_of[value] += exponent
        if not times.ratio:
            return self.filled(0, shape, dtype)
        items = _by_serial(exponent_of)
        if len(items) == 1 and items[0][1] == 1 and times == ONE:
            return self.expand(items[0][0], shape)
        values = [value for value, _ in items]
        exponents = [exponent for _, exponent in items]
        if any(part.denominator > 1 or part < 0 for part in exponents):
            dtype = dtype if dtype.is_floating_point else REAL
        literal = tuple(exponents), times
        own_shape = broadcast(value.shape for value in values)
        return self.expand(self.make("product", values, literal, own_shape, dtype), shape)

    def scaled(self, value: Value, times: Number) -> Value:
        """``times`` times the Value."""
        if times == ONE:
            return value
        if value.op in ("product", "expand") or not times.ratio:
            return self.product([(value, 1)], times, value.dtype)
        return self.make("product", (value,), ((1,), times), value.shape, value.dtype)

    def negated(self, value: Value) -> Value:
        """The Value times -1."""
        return self.scaled(value, MINUS_ONE)

    def power(self, value: Value, exponent: Exponent) -> Value:
        """The Value to an exponent."""
        return self.product([(value, exponent)], ONE, value.dtype)

    def times(self, *values: Value) -> Value:
        """The product of the Values."""
        return self.product([(value, 1) for value in values])

    def plus(self, *values: Value) -> Value:
        """The sum of the Values."""
        return self.total([(1, value) for value in values])

    def split(self, value: Value) -> tuple[Number, Value]:
        """Returns the number in front of a Value, and the Value without it."""
        if value.op not in ("product", "expand"):
            return ONE, value
        parts = self._split.get(value)
        if parts is None:
            parts = self._split[value] = self._split_number(value)
        return parts

    def _split_number(self, value: Value) -> tuple[Number, Value]:
        """Computes the result of ``split`` for a product or an expand."""
        if value.op == "product" and value.sources and value.number != ONE:
            exponents, times = value.literal
            unscaled = value.sources[0]
            if exponents != (1,):
                literal = exponents, ONE
                unscaled = self.make("product", value.sources, literal, value.shape, value.dtype)
            # integers times a fraction are floats, and no integers again
            return (times, unscaled) if unscaled.is_float == value.is_float else (ONE, value)
        if value.op == "expand":
            inner = value.sources[0]
            if inner.is_number:
                if inner.number in (ONE, ZERO):
                    return ONE, value
                return inner.number, self.filled(1, value.shape, value.dtype)
            times, unscaled = self.split(inner)
            if times != ONE:
                return times, self.expand(unscaled, value.shape)
        return ONE, value

    # -- functions

    def function(
        self, name: str, *values: Value, literals: object = (), dtype: torch.dtype = REAL
    ) -> Value:
        """A named function of the elements at one place; operands are broadcast."""
        shape = broadcast(value.shape for value in values)
        return self.make("function", values, (name, literals), shape, dtype)

    def opaque(
        self,
        name: str,
        literals: object,
        values: Sequence[Value],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Value:
        """A named function of all elements of the operands, of which nothing else is known."""
        return self.make("opaque", values, (name, literals), shape, dtype)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The Value in another dtype.

        Left out: a cast between float dtypes of an active Value, and a widening cast that is
        undone. A cast of a number or a move is applied to the number or the moved Value. A cast of
        integers to wider ones is applied to what they are computed from: their dtype holds them.
        """
        if value.dtype == dtype:
            return value
        is_among_floats = value.is_float and dtype.is_floating_point and dtype.itemsize > 1
        if is_among_floats and value.active:
            return value
        if value.op == "cast":
            (source,) = value.sources
            if is_among_floats and source.dtype == dtype and is_widening(value):
                return source
            if source.op == "leaf" and (source.dtype, value.dtype) == (torch.int64, torch.int32):
                self.assumed.append(f"input {source.literal} holds numbers below 2**31")
                return self.cast(source, dtype)
        inner = strip(value, "expand")
        if inner.is_number and dtype.is_floating_point:
            number = inner.number
            if value.is_float and dtype.itemsize > value.dtype.itemsize:
                rounded = torch.tensor(float(number), dtype=value.dtype).item()
                number = number if rounded == float(number) else read_literal(rounded, dtype)
            return self.filled(number, value.shape, dtype)
        is_exact = value.op in ("sum", "product") or value.function == "quotient"
        if is_exact and {value.dtype, dtype} <= _INTEGERS and dtype.itemsize > value.dtype.itemsize:
            sources = [self.cast(source, dtype) for source in value.sources]
            return self.rebuilt(value, sources, dtype)
        if value.op in MOVES and value.op != "join":
            return self.rebuilt(value, [self.cast(value.sources[0], dtype)])
        return self.make("cast", (value,), dtype, value.shape, dtype)

    def bare(self, value: Value, may_narrow: bool = True) -> Value:
        """Returns the operand as exact arithmetic with an active Value reads it.

        A Value that is not active loses casts that change no number. With ``may_narrow`` it also
        loses its last narrowing cast: that rounding belongs to the active operand's, which is not
        compared. Moves, gathers and single factors pass this on to their source.
        """
        if value.active:
            return value
        bare_value = self._bare.get((value, may_narrow))
        if bare_value is None:
            if value.op == "cast":
                source, bare_value = value.sources[0], value
                if source.dtype == torch.int8 and is_widening(value):
                    bare_value = source
                elif (
                    source.is_float
                    and value.is_float
                    and (is_widening(value) or (may_narrow and value.dtype.itemsize > 1))
                ):
                    bare_value = self.bare(source, may_narrow and is_widening(value))
            elif value.op in MOVES or value.is_multiple:
                bare_value = self.rebuilt(
                    value, [self.bare(source, may_narrow) for source in value.sources]
                )
            elif value.op == "gather":
                base, index = value.sources
                bare_value = self.rebuilt(value, [self.bare(base, may_narrow), index])
            elif (
                may_narrow
                and value.function == "product"
                and all(source.shape != value.shape for source in value.sources)
            ):  # of scales of rows and scales of columns; its own rounding is left out, too
                exponents, times = value.literal[1]
                sources = [self.bare(source, False) for source in value.sources]
                bare_value = self.product(zip(sources, exponents, strict=True), times)
            else:
                bare_value = value
            self._bare[value, may_narrow] = bare_value
        return bare_value

    # -- sums along axes

    def reduce(self, value: Value, axes: Iterable[int], keep: bool = False) -> Value:
        """The sum along axes. ``keep`` keeps them with size 1."""
        rank = len(value.shape)
        axes = tuple(sorted({axis % rank for axis in axes}))
        kept_shape = tuple(1 if axis in axes else n for axis, n in enumerate(value.shape))
        shape = tuple(n for axis, n in enumerate(value.shape) if axis not in axes)
        times, unscaled = self.split(value)
        filled = filled_with(unscaled)
        if filled is not None:
            size = prod(value.shape[axis] for axis in axes)
            total = self.times_count(self.expand(filled, shape), size)
        elif not axes:
            total = unscaled
        else:
            total = self.make("reduce", (unscaled,), axes, shape, value.dtype)
        return self.scaled(self.reshape(total, kept_shape) if keep else total, times)

    def mean(self, value: Value, axes: Sequence[int], keep: bool = True) -> Value:
        """The sum along axes, divided by the number of elements."""
        size = prod(value.shape[axis] for axis in axes)
        return self.times_count(self.reduce(value, axes, keep), size, -1)

    def times_count(self, value: Value, size: int, power: int = 1, less: int = 0) -> Value:
        """Returns the Value times ``(size - less) ** power``, where ``size`` counts elements.

        A symbolic size is bound to an arbitrary number, so it is a leaf here and not that number.
        """
        if not is_open(size):
            return self.scaled(value, number(Fraction(size - less) ** power))
        count = self.total([(1, self.leaf(f"size {size}", (), torch.int64, False))], -less)
        return self.product([(value, 1), (count, power)], ONE, value.dtype)

    def dot(self, left: Value, right: Value) -> Value:
        """The product [.., t, k] times [.., k, m] with equal leading axes, or with one matrix.

        ``right`` is [.., k, m], or [k, m] for all rows.

        A weight stands on the right. A matrix that is the same for all rows has no leading axes.
        Rows that are the same for several weights are multiplied by these side by side.
        """
        if left.weight and not right.model:
            return self.transposed(self.dot(self.transposed(right), self.transposed(left)))
        if len(right.shape) > 2:
            if repeated := self._unrepeated_matrix(right):
                return self._dot_with_repeated(left, *repeated)
            if right.weight and (repeated := self._unrepeated_matrix(left)):
                matrix, lead = self.transposed(repeated[0]), repeated[1]
                return self.transposed(
                    self._dot_with_repeated(self.transposed(right), matrix, lead)
                )
        if len(right.shape) == 2:
            rows = self.reshape(left, (prod(left.shape[:-1]), left.shape[-1]))
            return self.reshape(self._dot(rows, right), (*left.shape[:-1], right.shape[-1]))
        return self._dot(left, right)

    def _dot(self, left: Value, right: Value) -> Value:
        """The product of two operands whose leading axes need no regrouping."""
        left_element, right_element = filled_with(left), filled_with(right)
        shape = *left.shape[:-1], right.shape[-1]
        if left_element and right_element:
            term = self.times(left_element, right_element)
            return self.expand(self.times_count(term, left.shape[-1]), shape)
        if right.weight and not left.model:  # no number is taken out of the kernel's x
            return self.make("dot", (left, right), None, shape, REAL)
        (left_number, left), (right_number, right) = self.split(left), self.split(right)
        dtype = REAL if left.is_float else left.dtype
        return self.scaled(
            self.make("dot", (left, right), None, shape, dtype), left_number * right_number
        )

    def _unrepeated_matrix(self, right: Value) -> tuple[Value, Shape] | None:
        """Finds the matrix that an operand repeats along leading axes.

        Returns the matrix with size 1 on each repeated axis, and the sizes of the leading axes
        after the repetition. None if no leading axis is repeated.
        """
        *lead, last = range(len(right.shape))
        if right.op == "permute" and right.literal == (*lead[:-1], last, lead[-1]):
            repeated = self._unrepeated_matrix(right.sources[0])
            return repeated and (self.transposed(repeated[0]), repeated[1])
        inner = right
        while inner.op == "reshape" and inner.sources[0].shape[-2:] == right.shape[-2:]:
            inner = inner.sources[0]
        if inner.op != "expand" or inner.shape[-2:] != right.shape[-2:]:
            return (right, right.shape[:-2]) if 1 in right.shape[:-2] else None
        matrix = inner.sources[0]
        matrix = self.reshape(matrix, (1,) * (len(inner.shape) - len(matrix.shape)) + matrix.shape)
        return (matrix, inner.shape[:-2]) if matrix.shape[-2:] == inner.shape[-2:] else None

    def _dot_with_repeated(self, left: Value, matrix: Value, lead: Shape) -> Value:
        """Multiplies with a repeated matrix: the axes that repeat it become rows of ``left``.

        matrix  the matrix before it is repeated, size 1 on each repeated axis
        lead    sizes of the leading axes after the repetition
        """
        result_shape = *left.shape[:-1], matrix.shape[-1]
        left = self.reshape(left, (*lead, *left.shape[-2:]))
        rank = len(lead)
        own_axes = [axis for axis in range(rank) if matrix.shape[axis] == lead[axis] != 1]
        repeated_axes = [axis for axis in range(rank) if axis not in own_axes]
        order = *own_axes, *repeated_axes, rank, rank + 1
        rows = self.permute(left, order)
        sizes = rows.shape
        matrices = self.reshape(matrix, (*(lead[axis] for axis in own_axes), *matrix.shape[-2:]))
        flat = *sizes[: len(own_axes)], prod(sizes[len(own_axes) : -1]), sizes[-1]
        product = self.dot(self.reshape(rows, flat), matrices)
        product = self.reshape(product, (*sizes[:-1], matrix.shape[-1]))
        return self.reshape(self.permuted_back(product, order), result_shape)

    # -- moves

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """The elements in order, in another shape. One size may be -1. Raises ValueError."""
        shape = tuple(shape)
        if -1 in shape:
            product_of_known = prod(size for size in shape if size != -1)
            shape = tuple(value.numel // product_of_known if size == -1 else size for size in shape)
        if value.shape == shape:
            return value
        if value.numel != prod(shape):
            raise ValueError(f"{list(value.shape)} as {list(shape)}")
        times, value = self.split(value)
        value = strip(value, "reshape")
        if value.shape == shape:
            return self.scaled(value, times)
        filled = filled_with(value)
        if filled is not None:
            result = self.expand(filled, shape)
        elif _is_power(value):
            result = self.power(self.reshape(value.sources[0], shape), value.literal[0][0])
        elif (inner_shape := _unrepeated_shape(value, shape)) is not None:
            result = self.expand(self.reshape(value.sources[0], inner_shape), shape)
        else:
            result = self.make("reshape", (value,), None, shape, value.dtype)
        return self.scaled(result, times)

    def cut(self, value: Value, size: int) -> Value:
        """The last axis as rows of ``size`` elements."""
        *lead, whole = value.shape
        return self.reshape(value, (*lead, whole // size, size))

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """The axes in another order."""
        order = tuple(axis % len(value.shape) for axis in order)
        times, value = self.split(value)
        while value.op == "permute":
            order, value = tuple(value.literal[axis] for axis in order), value.sources[0]
        shape = tuple(value.shape[axis] for axis in order)
        long_axes = [axis for axis in order if value.shape[axis] != 1]
        if long_axes == sorted(long_axes):  # axes of size 1 alone change places
            result = self.reshape(value, shape)
        elif filled_with(value) is not None:
            result = self.expand(value.sources[0], shape)
        elif _is_power(value):
            result = self.power(self.permute(value.sources[0], order), value.literal[0][0])
        else:
            result = self.make("permute", (value,), order, shape, value.dtype)
        return self.scaled(result, times)

    def permuted_back(self, value: Value, order: Sequence[int]) -> Value:
        """The Value of which ``permute`` with this order makes ``value``."""
        return self.permute(value, [order.index(axis) for axis in range(len(order))])

    def transposed(self, value: Value, first_axis: int = -2, second_axis: int = -1) -> Value:
        """Two axes exchanged."""
        order = list(range(len(value.shape)))
        order[first_axis], order[second_axis] = order[second_axis], order[first_axis]
        return self.permute(value, order)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """The Value broadcast to a shape. Raises ValueError if it does not broadcast."""
        shape = tuple(shape)
        if value.shape == shape:
            return value
        if broadcast((value.shape, shape)) != shape:
            raise ValueError(f"{list(value.shape)} to {list(shape)}")
        value = strip(value, "expand")
        if prod(shape) == value.numel and not value.is_number:
            return self.reshape(value, shape)
        return self.make("expand", (value,), None, shape, value.dtype)

    def slice(
        self, value: Value, axis: int, start: int | None, stop: int | None, step: int = 1
    ) -> Value:
        """Elements start, start + step, .. below stop of an axis, by the rules of Python."""
        return self.take(value, axis, range(*slice(start, stop, step).indices(value.shape[axis])))

    def select(self, value: Value, axis: int, place: int) -> Value:
        """The elements at one place of an axis, without the axis. Raises IndexError."""
        axis %= len(value.shape)
        part = self.take(value, axis, [range(value.shape[axis])[place]])
        return self.reshape(part, with_axis(value.shape, axis))

    def take(self, value: Value, axis: int, places: Sequence[int]) -> Value:
        """Elements of an axis at literal places.

        The selection moves inside joins, products and slices.
        """
        axis, places = axis % len(value.shape), _as_range(places)
        if places == range(value.shape[axis]):
            return value
        shape = with_axis(value.shape, axis, len(places))
        times, value = self.split(value)
        inside = self._take_inside(value, axis, places, shape)
        return self.scaled(inside or self._make_selection(value, axis, places, shape), times)

    def _take_inside(
        self, value: Value, axis: int, places: Sequence[int], shape: Shape
    ) -> Value | None:
        """A selection of a Value whose operation lets it move inside; None for others."""
        if value.op == "slice" and value.literal[0] == axis:
            _, start, step = value.literal
            inner_places = range(start, start + value.shape[axis] * step, step)
            return self.take(value.sources[0], axis, _chosen(inner_places, places))
        if value.op == "join" and value.literal == axis:
            return self._take_of_join(value, axis, places)
        if value.op == "gather" and value.literal == axis:
            base, index = value.sources
            if index.op == "constant" and len(index.shape) == 1:
                return self.take(base, axis, _chosen(index.literal.tensor.tolist(), places))
        if value.op == "reshape":
            inner, inner_axis = value.sources[0], _inner_axis(value, axis)
            is_joined = (inner.op, inner.literal) == ("join", inner_axis)
            if inner_axis is not None and (inner.op == "expand" or is_joined):
                return self.reshape(self.take(inner, inner_axis, places), shape)
        if value.op == "product":
            return self._take_of_product(value, axis, places, shape)
        if value.op == "expand":
            inner = value.sources[0]
            inner_axis = axis - len(value.shape) + len(inner.shape)
            if inner_axis >= 0 and inner.shape[inner_axis] != 1:
                inner = self.take(inner, inner_axis, places)
            return self.expand(inner, shape)
        if value.op == "constant":
            numbers = torch.tensor(list(places), dtype=torch.int64)
            return self.constant(value.literal.tensor.index_select(axis, numbers))
        return None

    def _make_selection(
        self, value: Value, axis: int, places: Sequence[int], shape: Shape
    ) -> Value:
        """A slice, a join of a few slices, or a gather."""
        if isinstance(places, range):
            literal = axis, places.start, places.step
            return self.make("slice", (value,), literal, shape, value.dtype)
        breaks = [at for at in range(1, len(places)) if places[at] != places[at - 1] + 1]
        if value.op != "join" and len(breaks) < _SHORT:
            ends = zip((0, *breaks), (*breaks, len(places)), strict=True)
            runs = [range(places[start], places[end - 1] + 1) for start, end in ends]
            return self.join([self.take(value, axis, run) for run in runs], axis)
        tensor = Array(torch.tensor(places, dtype=torch.int64))
        index = self.make("constant", (), tensor, (len(places),), torch.int64)
        return self.make("gather", (value, index), axis, shape, value.dtype)

    def _take_of_join(self, value: Value, axis: int, places: Sequence[int]) -> Value | None:
        """A join of selections, one for each run of places in one part.

        None for many runs, and for a range with another step than 1 in several parts.
        """
        runs, start = list[tuple[Value, Sequence[int]]](), 0
        if isinstance(places, range):
            for part in value.sources:
                end = start + part.shape[axis]
                run = places[bisect_left(places, start) : bisect_left(places, end)]
                if run:
                    runs.append((part, range(run.start - start, run.stop - start, run.step)))
                start = end
            if not runs or (len(runs) > 1 and places.step != 1):
                return None
        else:
            starts = list(accumulate((part.shape[axis] for part in value.sources), initial=0))
            for at, group in groupby(places, lambda place: bisect(starts, place) - 1):
                runs.append((value.sources[at], [place - starts[at] for place in group]))
            if len(runs) > max(4, len(value.sources)):
                return None
        return self.join([self.take(part, axis, run) for part, run in runs], axis)

    def _take_of_product(
        self, value: Value, axis: int, places: Sequence[int], shape: Shape
    ) -> Value | None:
        """A selection of a product whose factors are joins or constant along the axis; None for
        others.
        """
        factors = list[Factor]()
        for source, exponent in value.operands:
            inner_axis = axis - len(value.shape) + len(source.shape)
            inner: Value | None = source
            if inner_axis >= 0 and source.shape[inner_axis] != 1:
                is_join = source.op == "join" and source.literal == inner_axis
                inner = self._take_of_join(source, inner_axis, places) if is_join else None
            if inner is None:
                return None
            factors.append((inner, exponent))
        return self.expand(self.product(factors, value.number), shape)

    def join(self, values: Sequence[Value], axis: int) -> Value:
        """The Values side by side along an axis. Neighbouring slices of one Value become one
        slice.
        """
        axis %= len(values[0].shape)
        values = [value for value in values if value.shape[axis]] or list(values[:1])
        values = self._merge_slices(values, axis)
        first = values[0]
        if len(values) == 1:
            return first
        shape = with_axis(first.shape, axis, sum(value.shape[axis] for value in values))
        filled = filled_with(first)
        if filled is not None and all(filled_with(value) is filled for value in values):
            return self.expand(filled, shape)
        numbers, unscaled = zip(*map(self.split, values), strict=True)
        if len({*numbers}) == 1 and numbers[0] != ONE:
            return self.scaled(self.join(unscaled, axis), numbers[0])
        if all(_is_power(value) and value.literal == first.literal for value in values):
            inner = self.join([value.sources[0] for value in values], axis)
            return self.power(inner, first.literal[0][0])
        if first.op == "dot" and axis == len(first.shape) - 1:  # chunks of one product
            left = first.sources[0]
            if all(value.op == "dot" and value.sources[0] is left for value in values):
                return self._dot(left, self.join([value.sources[1] for value in values], axis))
        dtype = reduce(_promoted, (value.dtype for value in values))
        return self.make("join", values, axis, shape, dtype)

    def _merge_slices(self, values: Sequence[Value], axis: int) -> list[Value]:
        """Merges consecutive slices of one Value into one slice."""
        merged: list[Value] = []
        for value in values:
            if (
                merged
                and (previous := merged[-1]).op == value.op == "slice"
                and previous.sources == value.sources
                and previous.literal[::2] == value.literal[::2] == (axis, 1)
                and previous.literal[1] + previous.shape[axis] == value.literal[1]
            ):
                end = value.literal[1] + value.shape[axis]
                merged[-1] = self.slice(value.sources[0], axis, previous.literal[1], end)
            else:
                merged.append(value)
        return merged

    # -- by the numbers of rows

    def gather(self, base: Value, axis: int, index: Value) -> Value:
        """Rows of ``axis``, by their numbers; the axes of ``index`` stand in its place."""
        axis %= len(base.shape)
        shape = with_axis(base.shape, axis, *index.shape)
        if index.op == "constant" and len(index.shape) == 1:
            return self.take(base, axis, index.literal.tensor.tolist())
        filled = filled_with(index)
        if filled is not None and index.numel == 1:
            place = int(filled.number.ratio)
            return self.reshape(self.slice(base, axis, place, place + 1), shape)
        times, base = self.split(base)
        return self.scaled(self.make("gather", (base, index), axis, shape, base.dtype), times)

    def write(self, base: Value, index: Value, rows: Value, mode: str | None = None) -> Value:
        """``base`` [n, width] with ``rows`` [t, width] written at the row numbers ``index`` [t].

        mode  the layout of a paged cache whose rows are not in order; None if they are
        """
        return self.make("write", (base, index, rows), mode, base.shape, base.dtype)

    # -- the same operation on other Values

    def rebuilt(
        self, value: Value, sources: Sequence[Value], dtype: torch.dtype | None = None
    ) -> Value:
        """The operation of ``value`` on other sources, in normal order.

        dtype  of the result of arithmetic; None: that of ``value``

        Returns ``value`` itself if the sources are the same.
        """
        is_same = all(source is old for source, old in zip(sources, value.sources, strict=True))
        if is_same and dtype is None:
            return value
        op, literal, shape, dtype = value.op, value.literal, value.shape, dtype or value.dtype
        if op == "sum":
            terms = zip(literal[0], sources, strict=True)
            return self.expand(self.total(terms, literal[1], dtype), shape)
        if op == "product":
            factors = zip(sources, literal[0], strict=True)
            return self.expand(self.product(factors, literal[1], dtype), shape)
        if op == "function":
            name, literals = literal
            return self.expand(self.function(name, *sources, literals=literals, dtype=dtype), shape)
        if op == "dot":
            return self.dot(*sources)
        if op in ("reshape", "expand"):
            return getattr(self, op)(sources[0], shape)
        if op in ("permute", "reduce", "cast"):
            return getattr(self, op)(sources[0], literal)
        if op == "slice":
            axis, start, step = literal
            return self.take(sources[0], axis, range(start, start + shape[axis] * step, step))
        if op == "join":
            return self.join(sources, literal)
        if op == "gather":
            return self.gather(sources[0], literal, sources[1])
        return self.make(op, sources, literal, shape, dtype)

    def substituted(self, value: Value, replacements: Mapping[Value, Value]) -> Value:
        """Rebuilds ``value`` with some Values replaced by others."""
        rebuilt_values = dict(replacements)
        for step in order([value], rebuilt_values):
            rebuilt_values[step] = self.rebuilt(
                step, [rebuilt_values[source] for source in step.sources]
            )
        return rebuilt_values[value]

    def renamed(self, value: Value, replacements: dict[Value, Value]) -> Value:
        """Rebuilds ``value`` on Values of the same structure, with ``make`` alone: nothing is
        normalised.

        replacements  by the Value they replace; each rebuilt Value is added

        Raises LookupError for a leaf without a replacement.
        """
        for step in order([value], replacements):
            if step.op == "leaf":
                raise LookupError(step)
            sources = [replacements[source] for source in step.sources]
            replacements[step] = self.make(step.op, sources, step.literal, step.shape, step.dtype)
        return replacements[value]


serial: Callable[[Value], int] = attrgetter("serial")


def _by_serial(number_of: dict[Value, Exponent]) -> list[Factor]:
    """The Values whose number is not 0, with it, in the order in which they were made."""
    entries = (entry for entry in number_of.items() if entry[1])
    return sorted(entries, key=lambda entry: entry[0].serial)


def broadcast(shapes: Iterable[Shape]) -> Shape:
    """The broadcast shape by numpy's rule. Raises ValueError for sizes that differ."""
    return _broadcast(frozenset(shapes))


@lru_cache(maxsize=4096)
def _broadcast(shapes: frozenset[Shape]) -> Shape:
    """The broadcast shape of distinct shapes."""
    sizes: list[int] = []
    for shape in sorted(shapes, key=len, reverse=True):
        sizes = sizes or [1] * len(shape)
        for axis in range(1, len(shape) + 1):
            if shape[-axis] != 1:
                if sizes[-axis] not in (1, shape[-axis]):
                    raise ValueError(sizes[-axis], shape[-axis])
                sizes[-axis] = shape[-axis]
    return tuple(sizes)


def with_axis(axes: Sequence[Any], axis: int, *others: Any) -> tuple[Any, ...]:
    """The axes with others in place of one."""
    return (*axes[:axis], *others, *axes[axis + 1 :])


def strip(value: Value, *operations: str) -> Value:
    """The first Value that ``value`` is made of by other operations than these."""
    while value.op in operations:
        value = value.sources[0]
    return value


def strip_reshapes(value: Value) -> Value:
    """The Value without reshapes around it."""
    return strip(value, "reshape")


def order(
    values: Iterable[Value],
    inputs: Container[Value] = (),
    is_followed: Callable[[Value], bool] | None = None,
) -> list[Value]:
    """The Values that ``values`` are computed from, sources first.

    It stops at ``inputs``, which are not in the result, and at Values that are not followed.
    """
    reached, stack = set[Value](), list(values)
    while stack:
        value = stack.pop()
        if value in reached or value in inputs or not (is_followed is None or is_followed(value)):
            continue
        reached.add(value)
        stack += value.sources
    return sorted(reached, key=serial)


def nearest(values: Iterable[Value], targets: Container[Value]) -> list[Value]:
    """The Values of ``targets`` that ``values`` read first on each path, by order of sources."""
    result, seen = list[Value](), set[Value]()
    stack = list(values)[::-1]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in targets:
            result.append(value)
        else:
            stack += value.sources[::-1]
    return result


def numbered(
    values: Iterable[Value], inputs: Iterable[Value] = (), since: int = 0
) -> tuple[object, list[Value]]:
    """A key for the structure of Values of one Form, and all Values that they are computed from.

    Keys are equal if the Values differ only in the names of leaves. Then the n-th Value of one list
    corresponds to the n-th of the other.

    inputs  Values of which the key has only shape, ``model`` and dtype (no dtype for floats of more
            than a byte)
    since   a serial number: an active Value made earlier is an input, too
    """
    numbers: dict[Value, int] = {}
    names: dict[Any, int] = {}
    parts = list[object]()
    for value in inputs:
        if value not in numbers:
            numbers[value] = len(numbers)
            is_wide = value.is_float and value.dtype.itemsize > 1
            parts.append((value.shape, value.model, None if is_wide else value.dtype))
    roots = list(values)
    stack = roots[::-1]
    while stack:
        value = stack[-1]
        if value in numbers:
            stack.pop()
            continue
        if value.active and value.serial < since:
            parts.append((value.shape, value.dtype))
        else:
            places = list(map(numbers.get, value.sources))
            if None in places:
                stack += [source for source in value.sources if source not in numbers][::-1]
                continue
            is_leaf = value.op == "leaf"
            name = names.setdefault(value.literal, len(names)) if is_leaf else None
            parts.append((value.kind, name, *places))
        numbers[value] = len(numbers)
        stack.pop()
    return (tuple(parts), tuple([numbers[value] for value in roots])), list(numbers)


def filled_with(value: Value) -> Value | None:
    """The number that each element of a Value is, as a scalar Value; None for other Values."""
    inner = strip(value, "expand")
    return inner if inner.is_number else None


def is_zero(value: Value) -> bool:
    """True for a Value filled with 0."""
    filled = filled_with(value)
    return filled is not None and not filled.number.ratio


def _as_range(places: Sequence[int]) -> Sequence[int]:
    """The places as a range, if they rise in equal steps."""
    if isinstance(places, range):
        return places
    step = places[1] - places[0] if len(places) > 1 else 1
    run = range(places[0], places[0] + len(places) * step, step) if step > 0 else places
    return run if list(run) == list(places) else places


def _chosen(items: Sequence[int], places: Sequence[int]) -> Sequence[int]:
    """The items at these places."""
    if isinstance(places, range):
        return items[places.start : places.stop : places.step]
    return [items[place] for place in places]


def _inner_axis(value: Value, axis: int) -> int | None:
    """The axis of a reshape's source that is ``axis`` of its result.

    None unless all axes in front of it are the same in both, or all axes behind it.
    """
    shape, inner = value.shape, value.sources[0].shape
    inner_axis = axis - len(shape) + len(inner)
    if inner_axis >= 0 and inner[inner_axis:] == shape[axis:]:
        return inner_axis
    return axis if inner[: axis + 1] == shape[: axis + 1] else None


def _unrepeated_shape(value: Value, shape: Shape) -> Shape | None:
    """The shape that the source of an expand takes if the expand is reshaped to ``shape``.

    It is the trailing part of ``shape`` that holds the source once. None if the source is a
    constant, or repeated along other axes than leading ones.
    """
    if value.op != "expand" or value.sources[0].op == "constant":
        return None
    inner = value.sources[0].shape
    while inner[:1] == (1,):
        inner = inner[1:]
    if not inner or value.shape[-len(inner) :] != inner:
        return None
    starts = (at for at in range(len(shape)) if prod(shape[at:]) == prod(inner))
    first = next(starts, None)
    return None if first is None else shape[first:]


def _is_power(value: Value) -> bool:
    """True for a power of one Value, with no number in front."""
    return value.op == "product" and len(value.sources) == 1 and value.number == ONE


def _is_dequantised(value: Value) -> bool:
    """True for a product of bytes times the scales of its operands.

    A projection is one factor with these scales. Active scales must have been made before the
    product of bytes; a later active factor is not a scale.
    """
    if value.op != "product":
        return False
    sources = list(map(strip_reshapes, value.sources))
    for source in sources:
        if (source.op == "dot" and _is_quantised(source.sources[0])) or _is_dequantised(source):
            return all(not factor.active or factor.serial <= source.serial for factor in sources)
    return False


def _is_quantised(rows: Value) -> bool:
    """True if the rows have one byte an element, by their dtype or as a quantising function."""
    rows = strip(rows, "reshape", "expand")
    return rows.function in BYTES or rows.dtype.itemsize == 1


def _promoted(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The dtype of numbers of both dtypes. Bytes beside wider floats are such floats."""
    narrow, wide = sorted(
        (first, second), key=lambda dtype: (dtype.itemsize, dtype.is_floating_point)
    )
    is_byte = narrow.itemsize == 1 and wide.is_floating_point
    return wide if is_byte else torch.promote_types(narrow, wide)


def is_widening(cast: Value) -> bool:
    """True if a cast keeps every number of the source's dtype."""
    source, dtype = cast.sources[0].dtype, cast.dtype
    if source == torch.bool or dtype == torch.bool:
        return dtype != torch.bool
    if dtype.is_floating_point:
        if not source.is_floating_point:
            return torch.finfo(dtype).eps <= 2.0 ** (1 - 8 * source.itemsize)
        ranges = torch.finfo(source), torch.finfo(dtype)
        return ranges[1].eps <= ranges[0].eps and ranges[1].max >= ranges[0].max
    if source.is_floating_point:
        return False
    limits = torch.iinfo(source), torch.iinfo(dtype)
    return limits[1].min <= limits[0].min and limits[1].max >= limits[0].max
