"""The call of an operator as its rule sees it.

``graph/read.py`` binds the arguments of a node by name and passes them to the rule with a ``Call``.
The rule makes the Values of the result. ``Call`` knows shape and dtype of the result, and has the
arithmetic that is exact if an operand is active. ``operator`` registers a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import Any

import torch

from mla_fusion.compat import bounds_of, expression_of
from mla_fusion.fx.kinds import Signature, signature
from mla_fusion.graph import bounds
from mla_fusion.graph.form import (
    MOVES,
    Factor,
    Form,
    Term,
    Value,
    broadcast,
    filled_with,
    is_zero,
    order,
    serial,
    strip,
)
from mla_fusion.graph.numbers import ONE, Number, is_open, literal


@dataclass(frozen=True)
class Pair:
    """A complex tensor as two Values of real numbers."""

    real: Value
    imag: Value

    def each(self, move: Callable[[Value], Value]) -> Pair:
        """The pair with ``move`` applied to both parts."""
        return Pair(move(self.real), move(self.imag))


class Size(int):
    """A symbolic size, bound to a number.

    name        its expression
    polynomial  the same in symbols; a quotient, remainder or minimum in it is a symbol, too
    symbolic    torch's own object
    """

    name: str
    polynomial: Any
    symbolic: Any

    def __new__(cls, bound: int, name: str, polynomial: Any, symbolic: Any) -> Size:
        size = super().__new__(cls, bound)
        size.name, size.polynomial, size.symbolic = name, polynomial, symbolic
        return size

    @property
    def is_count(self) -> bool:
        """True if it is at least 1 in every run, as the size of a tensor is.

        A difference, or an int that the graph is given, may be 0 or negative.
        """
        return bounds_of(self.symbolic, expression_of(self.symbolic))[0] >= 1

    def __repr__(self) -> str:
        return self.name


class Departs(Exception):
    """Raised by a rule that has no answer for the call: it is decomposed, or made opaque."""


class EqualSizes(Exception):
    """Raised with two sizes, one of them symbolic, that are equal whenever the graph runs."""


_LARGEST_BLOCK = 1 << 15  # what row numbers of 32 bits may be multiplied by
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def operator(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of operators, by their schema names without ``aten::``."""

    def register(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
        return rule

    return register


def name_of(target: Any) -> str:
    """The operator's name ``namespace::name``, without ``aten::``.

    A higher-order operator has no schema; its own name is returned.
    """
    return signature(target).name.removeprefix("aten::") or str(target)


def rule_names_of(schema: Signature) -> dict[str, str]:
    """The names of arguments in rules, by their names in the schema: the first operand is ``x``."""
    names = {name: name for name, _ in schema.arguments}
    operand = next((name for name in names if name in ("self", "input", "a")), "x")
    return names if "x" in names else {name: "x" if name == operand else name for name in names}


def axes_of(value: Value, dim: Any) -> list[int]:
    """The axes that an argument ``dim`` names, from 0 on; all of them for None or []."""
    if dim is None or dim == []:
        return list(range(len(value.shape)))
    axes = dim if isinstance(dim, (list, tuple)) else [dim]
    return [axis % len(value.shape) for axis in axes]


class Call:
    """One call, without its arguments.

    form     makes Values
    name     the operator's name, without ``aten::``
    shape    the shape of the result; a list of shapes for several results, None for one that is no
             tensor or that a listing leaves out
    dtype    the dtype of the result; a list of dtypes for several results
    """

    def __init__(self, form: Form, name: str, shape: Any, dtype: Any) -> None:
        self.form, self.name, self.shape, self.dtype = form, name, shape, dtype

    def value(self, operand: Any) -> Value:
        """Returns a Value for an operand that is a Value or a Python number.

        Raises Departs for a complex operand and for None.
        """
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Pair) or operand is None:
            raise Departs
        if isinstance(operand, Size):  # the number that it is bound to is arbitrary
            return self._value_of_size(operand)
        if not isfinite(operand):
            return self.form.function(
                "number", literals=repr(operand), dtype=self._dtype_of(operand)
            )
        is_wide = self.dtype == torch.float64  # no other arithmetic rounds what float32 holds
        number = literal(operand, torch.float64 if is_wide else None)
        return self.form.number(number, self._dtype_of(operand))

    def _value_of_size(self, size: Size) -> Value:
        """A symbolic size as a sum of products of symbols. A symbol of torch's is a leaf."""
        form, terms = self.form, list[Term]()
        for term, times in size.polynomial.expand().as_coefficients_dict().items():
            factors = list[Factor]()
            for part, power in term.as_powers_dict().items():
                if not part.is_Integer:
                    name, is_torch_symbol = str(part), part.name.isidentifier()
                    symbol = (
                        form.leaf(f"size {name}", (), torch.int64, False)
                        if is_torch_symbol
                        else form.function("number", literals=name, dtype=torch.int64)
                    )
                    factors.append((symbol, int(power)))
            terms.append((int(times), form.product(factors, dtype=torch.int64)))
        return form.total(terms, dtype=torch.int64)

    def _dtype_of(self, operand: float) -> torch.dtype:
        """The dtype of a Python number in this call."""
        dtype = self.dtype if isinstance(self.dtype, torch.dtype) else torch.float32
        if isinstance(operand, bool):
            return torch.bool
        if dtype.is_floating_point:
            return dtype
        return torch.int64 if isinstance(operand, int) else torch.float32

    def equate(self, size: int, other_size: int) -> None:
        """Requires two sizes to be equal.

        Raises EqualSizes if they differ and one is symbolic. Raises Departs if two numbers differ.
        """
        if size != other_size:
            raise EqualSizes(size, other_size) if is_open(size) or is_open(other_size) else Departs

    def sum(self, terms: Iterable[Term], constant: Fraction | int = 0) -> Value:
        """The sum of coefficients times Values, plus a constant, in the call's dtype.

        It is exact if a term is active, or if the integers fit the dtype. Otherwise it is a
        function.
        """
        terms, form = list(terms), self.form
        dtype = self.dtype
        if any(value.active for _, value in terms):
            bare_terms = [(times, form.bare(value)) for times, value in terms]
            return self._exact(form.total(bare_terms, constant))
        if not dtype.is_floating_point:
            total = form.total(terms, constant, dtype)
            return self.function_if_overflow(total, "sum")
        shape = broadcast(value.shape for _, value in terms)
        nonzero = [(times, value) for times, value in terms if not is_zero(value)]
        nonzero.sort(key=lambda term: (term[1].serial, term[0]))
        literals = tuple(Fraction(times) for times, _ in nonzero), Fraction(constant)
        values = [value for _, value in nonzero]
        total = form.function("sum", *values, literals=literals, dtype=dtype)
        return form.expand(total, shape)

    def product(self, factors: Iterable[Factor], times: Number = ONE) -> Value:
        """The product of Values to exponents, times a number, in the call's dtype.

        It is exact if a factor is active, or if the integers fit the dtype. Otherwise it is a
        function.
        """
        factors, form = list(factors), self.form
        dtype = self.dtype
        if any(value.active for value, _ in factors):
            bare_factors = [(form.bare(value), power) for value, power in factors]
            return self._exact(form.product(bare_factors, times))
        shape = broadcast(value.shape for value, _ in factors)
        operands: list[Factor] = []
        for value, power in factors:
            filled_value = filled_with(value)
            if filled_value is not None and dtype.is_floating_point:
                filled_value = form.cast(filled_value, dtype)
            number_of_value = ONE if filled_value is None else filled_value.number
            factor_number = number_of_value.power(power)
            is_exact = power == 1 or not dtype.is_floating_point or number_of_value.is_power_of_two
            if filled_value is None or factor_number is None or not is_exact:
                operands.append((value, power))
            else:
                times = times * factor_number
        if not operands or not times.ratio:
            return form.filled(times, shape, dtype)
        if not dtype.is_floating_point and all(
            power == int(power) and power > 0 for _, power in operands
        ):
            result = form.product(operands, times, dtype)
            return self.function_if_overflow(form.expand(result, shape), "product")
        if len(operands) == 1 and operands[0][1] == 1 and times.is_power_of_two:
            value = form.scaled(form.cast(operands[0][0], dtype), times)
            return form.expand(value, shape)
        operands.sort(key=lambda factor: (factor[0].serial, factor[1]))
        literals = tuple(Fraction(power) for _, power in operands), times
        values = [value for value, _ in operands]
        result = form.function("product", *values, literals=literals, dtype=dtype)
        return form.expand(result, shape)

    def _exact(self, value: Value) -> Value:
        """Returns what exact arithmetic makes of an activation.

        Raises Departs if no activation is left in it, for the roundings of the others are left out,
        and for integers of one or two bytes, which may wrap.
        """
        is_short = not self.dtype.is_floating_point and self.dtype.itemsize < 4
        if is_short or not (value.active or filled_with(value) is not None):
            raise Departs
        return value

    def plus(self, *values: Value) -> Value:
        """The sum of the Values."""
        return self.sum([(1, value) for value in values])

    def times(self, *values: Value) -> Value:
        """The product of the Values."""
        return self.product([(value, 1) for value in values])

    def function_if_overflow(self, value: Value, name: str) -> Value:
        """Returns ``value`` if the dtype holds each of its integers; a function of it otherwise.

        name      of the operator
        """
        if bounds.fits(value, self.dtype):
            return value
        if self.dtype == torch.int32 and _are_row_numbers(value):
            self._assume(value, "are below 2**31")
            return value
        return self.form.function(f"{name} that overflows", value, dtype=self.dtype)

    def is_not_negative(self, value: Value) -> bool:
        """True if no element is negative. It is assumed of row numbers that are made of inputs."""
        if bounds.least_integer(value) >= 0:
            return True
        if not _are_row_numbers(value):
            return False
        self._assume(value, "are not negative")
        return True

    def _assume(self, value: Value, what: str) -> None:
        """Notes an assumption about row numbers."""
        leaves = (leaf for leaf in order([value]) if leaf.op == "leaf" and not leaf.is_float)
        names = ", ".join(leaf.literal for leaf in leaves)
        self.form.assumed.append(f"row numbers made of {names} {what}")

    def number_of(self, operand: Any) -> Number:
        """Returns the number of an operand that is a literal, or a Value filled with one number.

        Raises Departs for any other operand, and for a symbolic size.
        """
        if isinstance(operand, Value):
            filled = filled_with(operand)
            if filled is None:
                raise Departs
            return filled.number
        if isinstance(operand, (int, float)) and not isinstance(operand, Size):
            return literal(operand)
        raise Departs

    def ratio_of(self, operand: Any) -> Fraction:
        """Returns the rational number of an operand (``number_of``). Raises Departs."""
        operand_number = self.number_of(operand)
        if operand_number.roots:
            raise Departs
        return operand_number.ratio

    def function(self, name: str, *values: Value, literals: object = ()) -> Value:
        """A named function of the operands' elements, in the call's dtype.

        If an operand is active, the operands' rounding and the float dtype of the result are left
        out.
        """
        dtype = self.dtype
        if any(value.active for value in values):
            values = tuple(map(self.form.bare, values))
            if dtype.is_floating_point:
                dtype = torch.float32
        return self.form.function(name, *values, literals=literals, dtype=dtype)

    def symmetric(self, name: str, x: Any, other: Any) -> Value:
        """A named function of two operands in any order."""
        values = sorted((self.value(x), self.value(other)), key=serial)
        return self.function(name, *values)

    def opaque(self, literals: object, values: Sequence[Value]) -> Any:
        """An opaque Value of the operands; a list of them for several results."""
        if isinstance(self.shape, list):
            results = enumerate(zip(self.shape, self.dtype, strict=True))
            return [
                None
                if shape is None
                else self.form.opaque(self.name, (literals, place), values, shape, dtype)
                for place, (shape, dtype) in results
            ]
        return self.form.opaque(self.name, literals, values, self.shape, self.dtype)


def _are_row_numbers(value: Value) -> bool:
    """True for an integer of the graph's inputs, such as a block number, times a number as small as
    a block, and for sums of these.
    """
    value = strip(value, "gather", "cast", *MOVES)
    if value.function == "quotient":
        return _are_row_numbers(value.sources[0])
    if value.is_multiple:
        factors = [value.number.ratio]
    elif value.op == "sum":
        factors = value.literal[0]
    else:
        return value.op in ("leaf", "count", "constant") and not value.is_float
    return max(map(abs, factors)) <= _LARGEST_BLOCK and all(map(_are_row_numbers, value.sources))
