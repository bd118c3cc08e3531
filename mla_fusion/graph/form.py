"""Values: what a graph computes, in one form. Equal Values are one object.

The operations:

leaf       an input of the graph, an attribute, or what is drawn in its place
constant   a tensor of literals
count      positions along one axis: 0, 1, ..
sum        number times Value, added up, and a number
product    Values to rational exponents, and a number in front
function   element by element, of which nothing more is known than its name and literals
opaque     of all that it reads
reduce     the sum along axes
dot        [.., t, k] times [.., k, m]
reshape, permute, expand, slice, join
gather     rows of an axis, by their numbers
write      rows [t, width] into [n, width], by row numbers [t]
cast

The normal order is: number, then sum and product, then move. So a number stands in front of what is
moved or added up, and a move stands inside a single power. Constructors keep that order, and are
the only way to make a Value. A sum of sums is one sum where the inner one is short; no other rule
takes a cone twice.

Float arithmetic is exact where an activation takes part: a Value is ``active`` where a product with
a weight is among what it is made of. Of floats beside that (tables, scales, what is done to a
weight) the same steps of the same Values are equal, and nothing else (but moves, negation and
products with powers of two).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch

from mla_fusion.graph.numbers import MINUS_ONE, ONE, ZERO, Exponent, Number, is_open, number
from mla_fusion.graph.numbers import literal as read_literal

Shape = tuple[int, ...]
MOVES = frozenset(("reshape", "permute", "expand", "slice", "join"))
REAL = torch.float32  # of every active Value: what rounds it is not compared
BYTES = frozenset(("int8", "fp8", "hifloat8", "of format"))  # functions that give elements of one
_SHORT = 4  # terms of a sum that becomes part of another


class Array:
    """A tensor of literals, equal to one of the same elements."""

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().cpu().contiguous()
        flat = self.tensor.reshape(-1)
        flat = flat.to(torch.uint8 if flat.dtype == torch.bool else flat.dtype)
        self.key: bytes = flat.view(torch.uint8).numpy().tobytes()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self.key == other.key

    def __repr__(self) -> str:
        return f"Array({tuple(self.tensor.shape)})"


class Value:
    """One operation on other Values.

    literal  what the operation takes beside them: names of a leaf, function or opaque; exponents
             and the number of a product; coefficients and the number of a sum; axes
    active   is a product with a weight among what it is made of?
    model    is it made of parameters, and literals, alone?
    weight   is it model, and not literals alone?
    kind     a number for all of this but the sources, and the name of a leaf
    """

    __slots__ = (
        "active",
        "dtype",
        "kind",
        "literal",
        "model",
        "op",
        "serial",
        "shape",
        "sources",
        "weight",
    )

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
        read = ", ".join(f"%{source.serial}" for source in self.sources)
        return f"%{self.serial} {self.op}({read}) {self.literal} {list(self.shape)}"

    @property
    def is_number(self) -> bool:
        return self.op == "product" and not self.sources

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point


Term = tuple[Fraction, Value]
Factor = tuple[Value, Exponent]


class Form:
    """Makes Values.

    assumed  what was taken for granted of numbers since somebody last looked, for the report
    """

    def __init__(self) -> None:
        self._known: dict[object, Value] = {}
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
        shape = tuple(shape)
        operation = self._number_of(op, literal, shape, dtype)
        key = operation, *[source.serial for source in sources]
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Value()
            found.op, found.sources, found.literal = op, tuple(sources), literal
            found.shape, found.dtype, found.serial = shape, dtype, len(self._known)
            found.model = all(source.model for source in sources) if model is None else model
            is_leaf = op == "leaf"
            found.weight = found.model and (is_leaf or any(one.weight for one in sources))
            is_product = op == "dot" and sources[1].weight and not sources[0].model
            found.active = is_product or any(source.active for source in sources)
            if is_leaf:
                operation = self._number_of(op, None, shape, dtype)
            found.kind = 4 * operation + 2 * found.model + found.active
        return found

    def _number_of(self, *operation: object) -> int:
        found = self._operations.get(operation)
        if found is None:
            found = self._operations[operation] = len(self._operations)
        return found

    # -- where Values begin

    def leaf(self, name: str, shape: Sequence[int], dtype: torch.dtype, model: bool) -> Value:
        return self.make("leaf", (), name, shape, dtype, model=model)

    def activation(self, name: str, shape: Sequence[int]) -> Value:
        """A leaf that stands for a product."""
        found = self.make("leaf", (), name, shape, REAL, model=False)
        if not found.active:
            found.active, found.kind = True, found.kind + 1
        return found

    def number(self, of: Number | Exponent, dtype: torch.dtype = REAL) -> Value:
        of = of if isinstance(of, Number) else number(of)
        return self.make("product", (), ((), of), (), dtype)

    def filled(self, of: Number | Exponent, shape: Sequence[int], dtype: torch.dtype) -> Value:
        return self.expand(self.number(of, dtype), shape)

    def constant(self, tensor: torch.Tensor) -> Value:
        first = tensor.reshape(-1)[:1]
        if tensor.numel() and bool((tensor == first).all()):
            only = first.item()
            if only == only and abs(only) != float("inf"):
                return self.filled(read_literal(only, tensor.dtype), tensor.shape, tensor.dtype)
        return self.make("constant", (), Array(tensor), tensor.shape, tensor.dtype)

    def count(self, size: int, dtype: torch.dtype = torch.int64) -> Value:
        return (
            self.make("count", (), None, (size,), dtype)
            if size != 1
            else self.filled(0, (1,), dtype)
        )

    # -- sums and products

    def total(
        self, terms: Iterable[Term], constant: Exponent = 0, dtype: torch.dtype = REAL
    ) -> Value:
        """The sum of coefficients times Values, and of a number."""
        terms, constant = list(terms), _fraction(constant)
        shape = broadcast(value.shape for _, value in terms)
        found: dict[Value, Fraction] = {}
        for coefficient, value in terms:
            factor, rest = self.split(value)
            if rest is not value and not factor.roots:
                coefficient, value = coefficient * factor.ratio, rest
            inner = value.sources[0] if value.op == "expand" else value
            if inner.is_number and not inner.literal[1].roots:
                constant += coefficient * inner.literal[1].ratio
            elif value.op == "sum" and len(value.sources) <= _SHORT:
                coefficients, offset = value.literal
                constant += coefficient * offset
                for one, source in zip(coefficients, value.sources, strict=True):
                    _add(found, source, coefficient * one)
            else:
                _add(found, value, coefficient)
        items = sorted(((v, c) for v, c in found.items() if c), key=lambda item: item[0].serial)
        if not items:
            return self.filled(constant, shape, dtype)
        if len(items) == 1 and not constant:
            ((value, coefficient),) = items
            return self.expand(self.scaled(value, number(coefficient)), shape)
        values = [value for value, _ in items]
        common = items[0][1]
        if not constant and common != 1 and all(times == common for _, times in items):
            whole = self.total([(Fraction(1), value) for value in values], 0, dtype)
            return self.expand(self.scaled(whole, number(common)), shape)
        literal = tuple(coefficient for _, coefficient in items), constant
        own = broadcast(value.shape for value in values)
        return self.expand(self.make("sum", values, literal, own, dtype), shape)

    def product(
        self, factors: Iterable[Factor], times: Number = ONE, dtype: torch.dtype = REAL
    ) -> Value:
        """A number times Values to exponents."""
        factors = list(factors)
        shape = broadcast(value.shape for value, _ in factors)
        found: dict[Value, Fraction] = {}
        stack = [(value, _fraction(exponent)) for value, exponent in reversed(factors)]
        while stack:
            value, exponent = stack.pop()
            while value.op == "expand":  # factors are broadcast
                value = value.sources[0]
            if _is_brought_back(value):
                inner, value = self.split(value)
                power = inner.power(exponent)
                if power is None:
                    value = self.scaled(value, inner)
                else:
                    times = times * power
            elif value.op == "product":
                exponents, inner = value.literal
                power = inner.power(exponent)
                is_one = len(value.sources) <= 1 and all(
                    one.denominator > 1 or one.numerator % 2 for one in exponents
                )
                if power is not None and (exponent.denominator == 1 or is_one):
                    times = times * power
                    pairs = zip(value.sources, exponents, strict=True)
                    stack += [(source, one * exponent) for source, one in pairs]
                    continue
            elif value.op == "sum" and exponent.denominator > 1:  # one form for each radicand
                lead = value.literal[0][0]
                power = Number(lead).power(exponent) if lead != 1 else None
                if power is not None:
                    times, value = times * power, self.total([(1 / lead, value)])
            _add(found, value, exponent)
        if not times.ratio:
            return self.filled(0, shape, dtype)
        items = sorted(((v, e) for v, e in found.items() if e), key=lambda item: item[0].serial)
        if len(items) == 1 and items[0][1] == 1 and times == ONE:
            return self.expand(items[0][0], shape)
        values = [value for value, _ in items]
        literal = tuple(exponent for _, exponent in items), times
        own = broadcast(value.shape for value in values)
        return self.expand(self.make("product", values, literal, own, dtype), shape)

    def scaled(self, value: Value, times: Number) -> Value:
        if times is ONE or times == ONE:
            return value
        return self.product([(value, 1)], times, value.dtype)

    def negated(self, value: Value) -> Value:
        return self.scaled(value, MINUS_ONE)

    def power(self, value: Value, exponent: Exponent) -> Value:
        return self.product([(value, exponent)], ONE, value.dtype)

    def times(self, *values: Value) -> Value:
        return self.product([(value, 1) for value in values])

    def plus(self, *values: Value) -> Value:
        return self.total([(Fraction(1), value) for value in values])

    def split(self, value: Value) -> tuple[Number, Value]:
        """The number in front, and the rest."""
        if value.op not in ("product", "expand"):
            return ONE, value
        found = self._split.get(value)
        if found is None:
            found = self._split[value] = self._parts(value)
        return found

    def _parts(self, value: Value) -> tuple[Number, Value]:
        if value.op == "product" and value.sources and value.literal[1] != ONE:
            exponents, times = value.literal
            pairs = zip(value.sources, exponents, strict=True)
            return times, self.product(pairs, ONE, value.dtype)
        if value.op == "expand":
            inner = value.sources[0]
            if inner.is_number:
                times = inner.literal[1]
                if times in (ONE, ZERO):
                    return ONE, value
                return times, self.filled(1, value.shape, value.dtype)
            times, rest = self.split(inner)
            if times != ONE:
                return times, self.expand(rest, value.shape)
        return ONE, value

    # -- functions

    def function(
        self, name: str, literals: object, *values: Value, dtype: torch.dtype = REAL
    ) -> Value:
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
        return self.make("opaque", values, (name, literals), shape, dtype)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Of an activation, a cast between floats is left out; so is one there and back."""
        if value.dtype == dtype:
            return value
        if value.is_float and dtype.is_floating_point and _is_wide(dtype):
            if value.active:
                return value
            if value.op == "cast" and value.sources[0].dtype == dtype and _widens(value):
                return value.sources[0]
        if _is_narrowed_input(value):
            self.assumed.append(f"input {value.sources[0].literal} holds numbers below 2**31")
            return self.cast(value.sources[0], dtype)
        inner = value.sources[0] if value.op == "expand" else value
        if inner.is_number and (dtype.is_floating_point or _holds(inner.literal[1], dtype)):
            return self.filled(inner.literal[1], value.shape, dtype)
        if value.op in MOVES and value.op != "join":
            return self.again(value, [self.cast(value.sources[0], dtype)])
        return self.make("cast", (value,), dtype, value.shape, dtype)

    def bare(self, value: Value, may_narrow: bool = True) -> Value:
        """Without its last rounding, and without casts that round nothing: what is beside an
        activation is rounded as the activation is.
        """
        if value.active:
            return value
        known = self._bare.get((value, may_narrow))
        if known is None:
            if value.op == "cast":
                source, known = value.sources[0], value
                if source.dtype == torch.int8:
                    known = source
                elif (
                    source.is_float
                    and value.is_float
                    and (_widens(value) or (may_narrow and _is_wide(value.dtype)))
                ):
                    known = self.bare(source, may_narrow and _widens(value))
            elif value.op in MOVES:
                known = self.again(value, [self.bare(one, may_narrow) for one in value.sources])
            elif value.op == "gather":
                base, index = value.sources
                known = self.again(value, [self.bare(base, may_narrow), index])
            elif value.op == "product" and len(value.sources) == 1 and value.literal[0] == (1,):
                known = self.again(value, [self.bare(value.sources[0], may_narrow)])
            elif may_narrow and _is_outer(value):  # what it is rounded to, too
                exponents, times = value.literal[1]
                sources = [self.bare(one, False) for one in value.sources]
                known = self.product(zip(sources, exponents, strict=True), times)
            else:
                known = value
            self._bare[value, may_narrow] = known
        return known

    # -- sums along axes

    def reduce(self, value: Value, axes: Iterable[int], keep: bool = False) -> Value:
        rank = len(value.shape)
        axes = tuple(sorted({axis % rank for axis in axes}))
        kept = tuple(1 if axis in axes else n for axis, n in enumerate(value.shape))
        shape = tuple(n for axis, n in enumerate(value.shape) if axis not in axes)
        times, rest = self.split(value)
        filled = _filled_with(rest)
        if filled is not None:
            size = prod(value.shape[axis] for axis in axes)
            found = self.counted(self.expand(filled, shape), size)
        elif not axes:
            found = rest
        else:
            found = self.make("reduce", (rest,), axes, shape, value.dtype)
        return self.scaled(self.reshape(found, kept) if keep else found, times)

    def mean(self, value: Value, axes: Sequence[int], keep: bool = True) -> Value:
        size = prod(value.shape[axis] for axis in axes)
        return self.counted(self.reduce(value, axes, keep), size, -1)

    def counted(self, value: Value, size: int, power: int = 1, less: int = 0) -> Value:
        """Times a number of elements, less so many, or divided by it. What a symbolic size is bound
        to says nothing of it.
        """
        if not is_open(size):
            return self.scaled(value, number(Fraction(size - less) ** power))
        count = self.leaf(f"size {size}", (), torch.int64, False)
        count = self.total([(Fraction(1), count)], -less) if less else count
        return self.product([(value, 1), (count, power)], ONE, value.dtype)

    def dot(self, left: Value, right: Value) -> Value:
        """[.., t, k] times [.., k, m], of equal leading axes; or times [k, m] for all of them.

        A weight stands on the right; one for all rows has no leading axes.
        """
        if left.weight and not right.model:
            return self.transposed(self.dot(self.transposed(right), self.transposed(left)))
        if len(right.shape) > 2:
            one = self._unrepeated(right)
            if one is not None:
                return self._dot_of_repeated(left, *one)
        if len(right.shape) == 2:
            rows = self.reshape(left, (prod(left.shape[:-1]), left.shape[-1]))
            found = self._dot(rows, right)
            return self.reshape(found, (*left.shape[:-1], right.shape[-1]))
        return self._dot(left, right)

    def _dot(self, left: Value, right: Value) -> Value:
        fills = _filled_with(left), _filled_with(right)
        shape = *left.shape[:-1], right.shape[-1]
        if fills[0] is not None and fills[1] is not None:
            only = self.product([(fills[0], 1), (fills[1], 1)])
            return self.expand(self.counted(only, left.shape[-1]), shape)
        if right.weight and not left.model:  # no number is taken out of the kernel's x
            return self.make("dot", (left, right), None, shape, REAL)
        (one, left), (other, right) = self.split(left), self.split(right)
        dtype = REAL if left.is_float else left.dtype
        return self.scaled(self.make("dot", (left, right), None, shape, dtype), one * other)

    def _unrepeated(self, right: Value) -> tuple[Value, Shape] | None:
        """Of a matrix that is repeated along leading axes: it before that, with axes of size 1, and
        the axes after.
        """
        inner = right
        while inner.op == "reshape" and inner.sources[0].shape[-2:] == right.shape[-2:]:
            inner = inner.sources[0]
        if inner.op != "expand" or inner.shape[-2:] != right.shape[-2:]:
            return (right, right.shape[:-2]) if 1 in right.shape[:-2] else None
        one = inner.sources[0]
        one = self.reshape(one, (1,) * (len(inner.shape) - len(one.shape)) + one.shape)
        return (one, inner.shape[:-2]) if one.shape[-2:] == inner.shape[-2:] else None

    def _dot_of_repeated(self, left: Value, one: Value, lead: Shape) -> Value:
        """Axes along which a matrix is one and the same become rows of the other."""
        after = *left.shape[:-1], one.shape[-1]
        left = self.reshape(left, (*lead, *left.shape[-2:]))
        rank = len(lead)
        own = [axis for axis in range(rank) if one.shape[axis] == lead[axis] != 1]
        same = [axis for axis in range(rank) if axis not in own]
        order = *own, *same, rank, rank + 1
        rows = self.permute(left, order)
        sizes = rows.shape
        matrices = self.reshape(one, (*(lead[axis] for axis in own), *one.shape[-2:]))
        flat = *sizes[: len(own)], prod(sizes[len(own) : -1]), sizes[-1]
        found = self.dot(self.reshape(rows, flat), matrices)
        found = self.reshape(found, (*sizes[:-1], one.shape[-1]))
        back = [order.index(axis) for axis in range(rank + 2)]
        return self.reshape(self.permute(found, back), after)

    # -- moves

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        if -1 in shape:
            known = prod(size for size in shape if size != -1)
            shape = tuple(prod(value.shape) // known if size == -1 else size for size in shape)
        if value.shape == shape:
            return value
        if prod(value.shape) != prod(shape):
            raise ValueError(f"{list(value.shape)} as {list(shape)}")
        times, value = self.split(value)
        while value.op == "reshape":
            value = value.sources[0]
        if value.shape == shape:
            return self.scaled(value, times)
        filled = _filled_with(value)
        if filled is not None:
            found = self.expand(filled, shape)
        elif _is_power(value):
            found = self.power(self.reshape(value.sources[0], shape), value.literal[0][0])
        elif value.op == "constant":
            found = self.constant(value.literal.tensor.reshape(shape))
        elif (own := _repeated(value, shape)) is not None:
            found = self.expand(self.reshape(value.sources[0], own), shape)
        else:
            found = self.make("reshape", (value,), None, shape, value.dtype)
        return self.scaled(found, times)

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        order = tuple(axis % len(value.shape) for axis in order)
        times, value = self.split(value)
        while value.op == "permute":
            order, value = tuple(value.literal[axis] for axis in order), value.sources[0]
        shape = tuple(value.shape[axis] for axis in order)
        if order == tuple(range(len(order))):
            found = value
        elif [n for n in shape if n != 1] == [n for n in value.shape if n != 1] and [
            axis for axis in order if value.shape[axis] != 1
        ] == [axis for axis, n in enumerate(value.shape) if n != 1]:
            found = self.reshape(value, shape)  # axes of size 1 alone change places
        elif _filled_with(value) is not None:
            found = self.expand(value.sources[0], shape)
        elif _is_power(value):
            found = self.power(self.permute(value.sources[0], order), value.literal[0][0])
        elif value.op == "constant":
            found = self.constant(value.literal.tensor.permute(order))
        else:
            found = self.make("permute", (value,), order, shape, value.dtype)
        return self.scaled(found, times)

    def transposed(self, value: Value, one: int = -2, other: int = -1) -> Value:
        order = list(range(len(value.shape)))
        order[one], order[other] = order[other], order[one]
        return self.permute(value, order)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        if value.shape == shape:
            return value
        if broadcast((value.shape, shape)) != shape:
            raise ValueError(f"{list(value.shape)} to {list(shape)}")
        while value.op == "expand":
            value = value.sources[0]
        if prod(shape) == prod(value.shape) and not value.is_number:
            return self.reshape(value, shape)
        return self.make("expand", (value,), None, shape, value.dtype)

    def slice(self, value: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        axis %= len(value.shape)
        start, stop, step = slice(start, stop, step).indices(value.shape[axis])
        size = len(range(start, stop, step))
        if size == value.shape[axis]:
            return value
        shape = tuple(size if at == axis else n for at, n in enumerate(value.shape))
        times, value = self.split(value)
        if value.op == "slice" and value.literal[0] == axis:
            _, first, by = value.literal
            start, step, value = first + start * by, step * by, value.sources[0]
        if value.op == "join" and value.literal == axis:
            inside = self._of_part(value, axis, start, size, step)
            if inside is not None:
                return self.scaled(inside, times)
        if value.op == "reshape":
            inner = value.sources[0]
            own = _axis_inside(value, axis)
            is_joined = (inner.op, inner.literal) == ("join", own)
            if own is not None and (inner.op == "expand" or is_joined):
                part = self.slice(inner, own, start, start + (size - 1) * step + 1, step)
                return self.scaled(self.reshape(part, shape), times)
        if value.op == "product":
            inside = self._of_factors(value, axis, start, size, step)
            if inside is not None:
                return self.scaled(inside, times)
        if value.op == "expand":
            inner = value.sources[0]
            own = axis - len(value.shape) + len(inner.shape)
            if own >= 0 and inner.shape[own] != 1:
                inner = self.slice(inner, own, start, start + (size - 1) * step + 1, step)
            found = self.expand(inner, shape)
        elif value.op == "constant":
            places = torch.arange(size) * step + start
            found = self.constant(value.literal.tensor.index_select(axis, places))
        else:
            found = self.make("slice", (value,), (axis, start, step), shape, value.dtype)
        return self.scaled(found, times)

    def _of_part(self, value: Value, axis: int, start: int, size: int, step: int) -> Value | None:
        """A slice of one part of a join, or a join of slices of several."""
        at, found = 0, list[Value]()
        last = start + (size - 1) * step
        for part in value.sources:
            end = at + part.shape[axis]
            if at <= start and last < end:
                return self.slice(part, axis, start - at, last + 1 - at, step)
            if step == 1 and start < end and at <= last:
                found.append(self.slice(part, axis, max(start - at, 0), min(last + 1, end) - at))
            at = end
        return self.join(found, axis) if found else None

    def _of_factors(
        self, value: Value, axis: int, start: int, size: int, step: int
    ) -> Value | None:
        """A slice of a product of joins with what is the same along the axis."""
        factors = list[tuple[Value, Fraction]]()
        for source, exponent in zip(value.sources, value.literal[0], strict=True):
            own = axis - len(value.shape) + len(source.shape)
            inner: Value | None = source
            if own >= 0 and source.shape[own] != 1:
                is_join = source.op == "join" and source.literal == own
                inner = self._of_part(source, own, start, size, step) if is_join else None
            if inner is None:
                return None
            factors.append((inner, exponent))
        return self.product(factors, value.literal[1])

    def join(self, values: Sequence[Value], axis: int) -> Value:
        axis %= len(values[0].shape)
        values = [value for value in values if value.shape[axis]] or list(values[:1])
        values = self._neighbours(values, axis)
        first = values[0]
        if len(values) == 1:
            return first
        size = sum(value.shape[axis] for value in values)
        shape = tuple(size if at == axis else n for at, n in enumerate(first.shape))
        filled = _filled_with(first)
        if filled is not None and all(_filled_with(value) is filled for value in values):
            return self.expand(filled, shape)
        if all(value.op == "constant" for value in values):
            return self.constant(torch.cat([value.literal.tensor for value in values], axis))
        numbers = {self.split(value)[0] for value in values}
        if len(numbers) == 1 and numbers != {ONE}:
            rests = [self.split(value)[1] for value in values]
            return self.scaled(self.join(rests, axis), numbers.pop())
        if all(_is_power(value) and value.literal == first.literal for value in values):
            inner = self.join([value.sources[0] for value in values], axis)
            return self.power(inner, first.literal[0][0])
        if first.op == "dot" and axis == len(first.shape) - 1:  # chunks of one product
            left = first.sources[0]
            if all(value.op == "dot" and value.sources[0] is left for value in values):
                return self._dot(left, self.join([value.sources[1] for value in values], axis))
        return self.make("join", values, axis, shape, first.dtype)

    def _neighbours(self, values: Sequence[Value], axis: int) -> list[Value]:
        """Slices of one Value that follow on each other are one slice."""
        found: list[Value] = []
        for value in values:
            before = found[-1] if found else None
            if (
                before is not None
                and before.op == value.op == "slice"
                and before.sources == value.sources
                and before.literal[0] == value.literal[0] == axis
                and before.literal[2] == value.literal[2] == 1
                and before.literal[1] + before.shape[axis] == value.literal[1]
            ):
                start = before.literal[1]
                found[-1] = self.slice(
                    before.sources[0], axis, start, value.literal[1] + value.shape[axis]
                )
            else:
                found.append(value)
        return found

    # -- by the numbers of rows

    def gather(self, base: Value, axis: int, index: Value) -> Value:
        """Rows of ``axis``; the axes of ``index`` stand in its place."""
        axis %= len(base.shape)
        shape = (*base.shape[:axis], *index.shape, *base.shape[axis + 1 :])
        if index.op == "constant" and len(index.shape) == 1:
            return self.take(base, axis, index.literal.tensor.tolist())
        if index.op == "count":
            return self.slice(base, axis, 0, index.shape[0])
        filled = _filled_with(index)
        if filled is not None and len(index.shape) <= 1:
            only = int(filled.literal[1].ratio)
            row = self.slice(base, axis, only, only + 1)
            if not index.shape:
                return self.reshape(row, shape)
            return self.expand(row, shape)
        times, base = self.split(base)
        if _filled_with(base) is not None:
            return self.scaled(self.expand(base.sources[0], shape), times)
        found = self.make("gather", (base, index), axis, shape, base.dtype)
        return self.scaled(found, times)

    def take(self, value: Value, axis: int, places: Sequence[int]) -> Value:
        """Elements of an axis at literal places, taken as far up as they can be."""
        axis %= len(value.shape)
        size = len(places)
        step = places[1] - places[0] if size > 1 else 1
        if step > 0 and list(places) == list(range(places[0], places[0] + size * step, step)):
            return self.slice(value, axis, places[0], places[-1] + 1, step)
        shape = tuple(size if at == axis else n for at, n in enumerate(value.shape))
        times, value = self.split(value)
        found = self._taken(value, axis, places, shape)
        if found is None:
            index = self.make(
                "constant",
                (),
                Array(torch.tensor(places, dtype=torch.int64)),
                (size,),
                torch.int64,
                model=True,
            )
            found = self.make("gather", (value, index), axis, shape, value.dtype)
        return self.scaled(found, times)

    def _taken(self, value: Value, axis: int, places: Sequence[int], shape: Shape) -> Value | None:
        if value.op == "constant":
            return self.constant(
                value.literal.tensor.index_select(axis, torch.tensor(places, dtype=torch.int64))
            )
        if value.op == "expand":
            inner = value.sources[0]
            own = axis - len(value.shape) + len(inner.shape)
            if own >= 0 and inner.shape[own] != 1:
                inner = self.take(inner, own, places)
            return self.expand(inner, shape)
        if value.op == "slice" and value.literal[0] == axis:
            _, start, step = value.literal
            return self.take(value.sources[0], axis, [start + step * place for place in places])
        if value.op == "gather" and value.literal == axis:
            base, index = value.sources
            if index.op == "constant" and len(index.shape) == 1:
                inner_places = index.literal.tensor.tolist()
                return self.take(base, axis, [inner_places[place] for place in places])
        if value.op == "join" and value.literal == axis:
            return self._taken_of_parts(value, axis, places)
        breaks = [at for at in range(1, len(places)) if places[at] != places[at - 1] + 1]
        if len(breaks) < _SHORT:
            ends = zip((0, *breaks), (*breaks, len(places)), strict=True)
            runs = [(places[start], places[end - 1] + 1) for start, end in ends]
            return self.join([self.slice(value, axis, *run) for run in runs], axis)
        return None

    def _taken_of_parts(self, value: Value, axis: int, places: Sequence[int]) -> Value | None:
        """A join of what is taken of each part, where each is a run of places."""
        ends, at = list[int](), 0
        for part in value.sources:
            at += part.shape[axis]
            ends.append(at)
        runs: list[tuple[int, list[int]]] = []
        for place in places:
            which = next(k for k, end in enumerate(ends) if place < end)
            start = ends[which] - value.sources[which].shape[axis]
            if not runs or runs[-1][0] != which:
                runs.append((which, []))
            runs[-1][1].append(place - start)
        if len(runs) > max(4, len(value.sources)):
            return None
        return self.join([self.take(value.sources[k], axis, run) for k, run in runs], axis)

    def write(self, base: Value, index: Value, rows: Value, mode: str | None = None) -> Value:
        """``base`` [n, width] with ``rows`` [t, width] at the row numbers ``index`` [t].

        mode  how a paged cache holds rows, where that is not row by row
        """
        return self.make("write", (base, index, rows), mode, base.shape, base.dtype)

    # -- the same operation on other Values

    def again(self, value: Value, sources: Sequence[Value]) -> Value:
        """The operation of ``value`` on other sources; numbers fold as they do when it is made."""
        if all(one is other for one, other in zip(sources, value.sources, strict=True)):
            return value
        op, literal = value.op, value.literal
        if op == "sum":
            terms = zip(literal[0], sources, strict=True)
            return self.expand(self.total(terms, literal[1], value.dtype), value.shape)
        if op == "product":
            factors = zip(sources, literal[0], strict=True)
            return self.expand(self.product(factors, literal[1], value.dtype), value.shape)
        if op == "function":
            name, literals = literal
            made = self.function(name, literals, *sources, dtype=value.dtype)
            return self.expand(made, value.shape)
        if op == "dot":
            return self.dot(*sources)
        if op == "reshape":
            return self.reshape(sources[0], value.shape)
        if op == "permute":
            return self.permute(sources[0], literal)
        if op == "expand":
            return self.expand(sources[0], value.shape)
        if op == "slice":
            axis, start, step = literal
            last = start + (value.shape[axis] - 1) * step
            return self.slice(sources[0], axis, start, last + 1, step)
        if op == "join":
            return self.join(sources, literal)
        if op == "reduce":
            return self.reduce(sources[0], literal)
        if op == "gather":
            return self.gather(sources[0], literal, sources[1])
        if op == "cast":
            return self.cast(sources[0], literal)
        return self.make(op, sources, literal, value.shape, value.dtype)

    def substituted(self, value: Value, others: Mapping[Value, Value]) -> Value:
        """``value`` made of some Values in place of others."""
        done = dict(others)
        for one in order([value], done):
            done[one] = self.again(one, [done[source] for source in one.sources])
        return done[value]

    def renamed(self, value: Value, others: dict[Value, Value]) -> Value:
        """``value`` made of Values of the same structure in place of others; what is made on the
        way is added to these. Raises LookupError for a leaf that is not among them.
        """
        for one in order([value], others):
            if one.op == "leaf":
                raise LookupError(one)
            sources = [others[source] for source in one.sources]
            same = all(new is old for new, old in zip(sources, one.sources, strict=True))
            others[one] = (
                one if same else self.make(one.op, sources, one.literal, one.shape, one.dtype)
            )
        return others[value]


def _fraction(of: Exponent) -> Fraction:
    return of if type(of) is Fraction else Fraction(of)


def _add(found: dict[Value, Fraction], value: Value, number: Fraction) -> None:
    before = found.get(value)
    found[value] = number if before is None else before + number


def broadcast(shapes: Iterable[Sequence[int]]) -> Shape:
    """Numpy's rule. Raises ValueError for sizes that differ."""
    shapes = list(shapes)
    if all(shape == shapes[0] for shape in shapes[1:]):
        return tuple(shapes[0]) if shapes else ()
    found: list[int] = []
    for shape in shapes:
        if len(shape) > len(found):
            found = [1] * (len(shape) - len(found)) + found
        for axis in range(1, len(shape) + 1):
            if shape[-axis] != 1:
                if found[-axis] not in (1, shape[-axis]):
                    raise ValueError(f"sizes {found[-axis]} and {shape[-axis]} of one axis")
                found[-axis] = shape[-axis]
    return tuple(found)


def order(values: Iterable[Value], known: Iterable[Value] = ()) -> list[Value]:
    """All that the Values are made of, sources first and one Value after the other, down to what is
    known.
    """
    found, seen = list[Value](), set(known)
    stack = [(value, False) for value in list(values)[::-1]]
    while stack:
        value, is_ready = stack.pop()
        if is_ready:
            found.append(value)
        elif value not in seen:
            seen.add(value)
            stack.append((value, True))
            stack += [(source, False) for source in value.sources if source not in seen]
    return found


def met(values: Iterable[Value], known: Container[Value]) -> list[Value]:
    """What is known of all that the Values are made of, in the order in which they name it."""
    found, seen = list[Value](), set[Value]()
    stack = list(values)[::-1]
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in known:
            found.append(one)
        else:
            stack += one.sources[::-1]
    return found


def numbered(
    values: Iterable[Value], known: Iterable[Value] = (), since: int = 0
) -> tuple[object, list[Value]]:
    """The structure of Values of one Form, equal for what differs in the names of leaves alone; and
    all that they are made of: of two equal structures, the n-th of one is the n-th of the other.

    known  stand for themselves, whatever they are made of, and floats whatever their dtype
    since  the serial number of a Value: so do activations that were made before it
    """
    numbers: dict[Value, int] = {}
    names: dict[Any, int] = {}
    parts = list[object]()
    for value in known:
        if value not in numbers:
            numbers[value] = len(numbers)
            is_wide = value.is_float and value.dtype.itemsize > 1
            parts.append((value.shape, value.model, None if is_wide else value.dtype))
    wanted = list(values)
    stack = wanted[::-1]
    while stack:
        value = stack[-1]
        if value in numbers:
            stack.pop()
            continue
        if value.active and value.serial < since:
            parts.append((value.shape, value.dtype))
        else:
            above = [source for source in value.sources if source not in numbers]
            if above:
                stack += above[::-1]
                continue
            is_leaf = value.op == "leaf"
            name = names.setdefault(value.literal, len(names)) if is_leaf else None
            parts.append((value.kind, name, *[numbers[source] for source in value.sources]))
        numbers[value] = len(numbers)
        stack.pop()
    return (tuple(parts), tuple([numbers[value] for value in wanted])), list(numbers)


def _is_narrowed_input(value: Value) -> bool:
    """Is it an int64 input, cast to int32?"""
    if value.op != "cast" or value.dtype != torch.int32:
        return False
    return value.sources[0].op == "leaf" and value.sources[0].dtype == torch.int64


def _filled_with(value: Value) -> Value | None:
    """The number that each element is."""
    inner = value.sources[0] if value.op == "expand" else value
    return inner if inner.is_number else None


filled_with = _filled_with


def _axis_inside(value: Value, axis: int) -> int | None:
    """The axis of what a Value reshapes that is one of its own, with the same axes in front of it
    or behind it.
    """
    shape, inner = value.shape, value.sources[0].shape
    own = axis - len(shape) + len(inner)
    if own >= 0 and inner[own:] == shape[axis:]:
        return own
    return axis if inner[: axis + 1] == shape[: axis + 1] else None


def _repeated(value: Value, shape: Shape) -> Shape | None:
    """Of what is repeated along leading axes alone: the axes of ``shape`` that hold it once. What a
    constant has for each token is followed through its own axes.
    """
    if value.op != "expand" or value.sources[0].op == "constant":
        return None
    inner = value.sources[0].shape
    while inner[:1] == (1,):
        inner = inner[1:]
    if not inner or value.shape[-len(inner) :] != inner:
        return None
    sizes = (at for at in range(len(shape)) if prod(shape[at:]) == prod(inner))
    first = next(sizes, None)
    return None if first is None else shape[first:]


def _is_power(value: Value) -> bool:
    """Is it a power of one Value of its own shape, with no number in front?"""
    return (
        value.op == "product"
        and len(value.sources) == 1
        and value.literal[1] == ONE
        and value.sources[0].shape == value.shape
    )


def _is_outer(value: Value) -> bool:
    """Is it a product of rows' and columns' scales, beside activations?"""
    is_product = value.op == "function" and value.literal[0] == "product"
    return is_product and all(one.shape != value.shape for one in value.sources)


def _is_brought_back(value: Value) -> bool:
    """Is it a product of bytes, times their scales? That is one factor: what a projection gives.
    Activations among the scales are older than the product.
    """
    if value.op != "product":
        return False
    for one in value.sources:
        if (one.op == "dot" and _is_of_bytes(one.sources[0])) or _is_brought_back(one):
            others = (other for other in value.sources if other is not one)
            return all(not other.active or other.serial < one.serial for other in others)
    return False


def _is_of_bytes(rows: Value) -> bool:
    while rows.op in ("reshape", "expand"):
        rows = rows.sources[0]
    is_quantised = rows.op == "function" and rows.literal[0] in BYTES
    return is_quantised or rows.dtype.itemsize == 1


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.itemsize > 1


def _widens(cast: Value) -> bool:
    """Does a cast between floats keep every number?"""
    before, after = torch.finfo(cast.sources[0].dtype), torch.finfo(cast.dtype)
    return bool(after.eps <= before.eps and after.max >= before.max)


def _holds(given: Number, dtype: torch.dtype) -> bool:
    if dtype == torch.bool or given.roots or given.ratio.denominator != 1:
        return False
    ends = torch.iinfo(dtype)
    return ends.min <= given.ratio <= ends.max
