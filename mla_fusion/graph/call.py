"""A call of an operator as its rule sees it: arguments by name, the sizes of the result, and
arithmetic that is exact where an activation takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from mla_fusion.fx.kinds import signature
from mla_fusion.graph import bounds
from mla_fusion.graph.form import Factor, Form, Term, Value, broadcast, filled_with
from mla_fusion.graph.numbers import ONE, Number, is_open, literal, number


@dataclass(frozen=True)
class Pair:
    """A complex tensor."""

    real: Value
    imag: Value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.real.shape

    def each(self, move: Callable[[Value], Value]) -> Pair:
        return Pair(move(self.real), move(self.imag))


class Size(int):
    """A symbolic size, bound to a number; ``name`` is its expression."""

    name: str

    def __new__(cls, bound: int, name: str) -> Size:
        size = super().__new__(cls, bound)
        size.name = name
        return size

    def __repr__(self) -> str:
        return self.name


class Departs(Exception):
    """A rule has no answer for this call: the operator is decomposed, or opaque."""


class Alike(Exception):
    """Two sizes, one of them symbolic, that are equal whenever the graph runs."""


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def operator(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of operators, named as their schemas are; ``aten::`` is left out."""

    def register(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
        return rule

    return register


def name_of(target: Any) -> str:
    """``namespace::name``, without that of aten; of what runs other graphs, its own."""
    return signature(target).name.removeprefix("aten::") or str(target)


class Call:
    """
    form     makes Values
    name     of the operator, without ``aten::``
    shape    of the result, or of each of several
    dtype    likewise
    """

    def __init__(self, form: Form, name: str, shape: Any, dtype: Any) -> None:
        self.form, self.name, self.shape, self.dtype = form, name, shape, dtype

    def value(self, given: Any) -> Value:
        """A Value, or a number of the call as one."""
        if isinstance(given, Value):
            return given
        if isinstance(given, Pair) or given is None:
            raise Departs
        if isinstance(given, Size):  # what it is bound to says nothing of it
            return self.form.leaf(f"size {given.name}", (), torch.int64, False)
        if given != given or abs(given) == float("inf"):
            return self.form.function("number", repr(given), dtype=self._dtype_of(given))
        return self.form.number(literal(given), self._dtype_of(given))

    def _dtype_of(self, given: float) -> torch.dtype:
        dtype = self.dtype if isinstance(self.dtype, torch.dtype) else torch.float32
        if isinstance(given, bool):
            return torch.bool
        if isinstance(given, int):
            return torch.int64 if not dtype.is_floating_point else dtype
        return dtype if dtype.is_floating_point else torch.float32

    def equate(self, one: int, other: int) -> None:
        """Two sizes that the operator takes for equal. Raises Alike, or Departs where they are
        not.
        """
        if one != other:
            raise Alike(one, other) if is_open(one) or is_open(other) else Departs

    def sum(self, terms: Iterable[Term], constant: Fraction | int = 0) -> Value:
        """Added up, in the call's dtype."""
        terms, form = list(terms), self.form
        dtype = self._one_dtype()
        if any(value.active for _, value in terms):
            return form.total([(times, form.bare(value)) for times, value in terms], constant)
        if not dtype.is_floating_point:
            found = form.total(terms, constant, dtype)
            return self._held(found, dtype, "sum", [value for _, value in terms])
        kept = [(times, value) for times, value in terms if not _is_zero(value)]
        if not constant and len(kept) == 1 and number(kept[0][0]).is_power_of_two:
            times, value = kept[0]
            shape = broadcast(value.shape for _, value in terms)
            return form.expand(form.scaled(form.cast(value, dtype), number(times)), shape)
        kept.sort(key=lambda term: (term[1].serial, term[0]))
        literals = tuple(times for times, _ in kept), Fraction(constant)
        values = [value for _, value in kept]
        found = form.function("sum", literals, *values, dtype=dtype)
        return form.expand(found, broadcast(value.shape for _, value in terms))

    def product(self, factors: Iterable[Factor], times: Number = ONE) -> Value:
        """Multiplied, in the call's dtype."""
        factors, form = list(factors), self.form
        dtype = self._one_dtype()
        shape = broadcast(value.shape for value, _ in factors)
        if any(value.active for value, _ in factors):
            return form.product([(form.bare(value), power) for value, power in factors], times)
        values: list[Factor] = []
        for value, power in factors:
            filled = filled_with(value)
            part = filled.literal[1].power(power) if filled is not None else None
            if part is None:
                values.append((value, power))
            else:
                times = times * part
        if not values or not times.ratio:
            return form.filled(times, shape, dtype)
        if not dtype.is_floating_point and all(
            power == int(power) and power > 0 for _, power in values
        ):
            found = form.product(values, times, dtype)
            return self._held(form.expand(found, shape), dtype, "product", [v for v, _ in values])
        if len(values) == 1 and values[0][1] == 1 and times.is_power_of_two:
            value = form.scaled(form.cast(values[0][0], dtype), times)
            return form.expand(value, shape)
        values.sort(key=lambda factor: (factor[0].serial, factor[1]))
        literals = tuple(Fraction(power) for _, power in values), times
        found = form.function("product", literals, *[value for value, _ in values], dtype=dtype)
        return form.expand(found, shape)

    def _held(self, found: Value, dtype: torch.dtype, name: str, values: Sequence[Value]) -> Value:
        """``found``, where the dtype holds each of its integers."""
        if bounds.fits(found, dtype):
            return found
        return self.form.function(f"{name} that overflows", (), found, dtype=dtype)

    def _one_dtype(self) -> torch.dtype:
        return self.dtype if isinstance(self.dtype, torch.dtype) else self.dtype[0]

    def number_of(self, given: Any) -> Number:
        """A literal; a Value that is one. Raises Departs."""
        if isinstance(given, Value):
            filled = filled_with(given)
            if filled is None:
                raise Departs
            found: Number = filled.literal[1]
            return found
        if isinstance(given, (int, float)) and not isinstance(given, Size):
            return literal(given)
        raise Departs

    def function(self, name: str, literals: object, *values: Value) -> Value:
        """Element by element; of an activation, what its operands are rounded to is left out."""
        dtype = self._one_dtype()
        if any(value.active for value in values):
            values = tuple(map(self.form.bare, values))
            if dtype.is_floating_point:
                dtype = torch.float32
        return self.form.function(name, literals, *values, dtype=dtype)

    def opaque(self, literals: object, values: Sequence[Value]) -> Any:
        """Of all that it reads; one for each result."""
        if isinstance(self.shape, list):
            return [
                self.form.opaque(self.name, (literals, place), values, shape, dtype)
                for place, (shape, dtype) in enumerate(zip(self.shape, self.dtype, strict=True))
            ]
        return self.form.opaque(self.name, literals, values, self.shape, self.dtype)


def _is_zero(value: Value) -> bool:
    filled = filled_with(value)
    return filled is not None and not filled.literal[1].ratio
