"""Compares symbolic sizes as expressions, and binds each symbol to a small number."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from functools import cache
from itertools import count
from typing import Any

import sympy
import torch
from torch.fx import Node

from mla_fusion.compat import (
    CeilToInt,
    FloorDiv,
    IntTrueDiv,
    Mod,
    bounds_of,
    expression_of,
    statically_known_true,
)
from mla_fusion.fx.kinds import shape_of, value_of

_PRIMES = tuple(sympy.primerange(5, 74))
_FEW = (3, 4, 2)


_SYMBOLIC = frozenset((torch.SymInt, torch.SymFloat, torch.SymBool))


def is_symbolic(value: Any) -> bool:
    """Returns True if the value is a SymInt, a SymFloat or a SymBool."""
    # isinstance takes microseconds for a fake tensor, and this is asked everywhere
    return type(value) in _SYMBOLIC


def has_symbols(sizes: Iterable[Any]) -> bool:
    """Returns True if any of the sizes is symbolic."""
    return not _SYMBOLIC.isdisjoint(map(type, sizes))


def bytes_of(tensor: torch.Tensor) -> Any:
    """Returns the bytes of a tensor's elements. ``nbytes`` fails if strides are symbolic."""
    return math.prod(tensor.shape) * tensor.element_size()


def describe(value: Any) -> object:
    """Returns dtype, shape, strides and device of a tensor, or the value as text."""
    if isinstance(value, torch.Tensor):
        sizes = value.shape, value.stride()
        is_open = has_symbols(sizes[0] + sizes[1])  # then text can be compared
        return value.dtype, str(sizes) if is_open else sizes, value.device, value.is_conj()
    return str(value)


def sizes_of(node: Node) -> tuple[Any, ...]:
    """Returns the shape of a node's tensor; () for anything else."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def is_size(node: Node) -> bool:
    """Returns True if the node holds a symbolic size."""
    return is_symbolic(value_of(node))


def same(a: Any, b: Any) -> bool:
    """Returns True if two sizes are equal for every value of their symbols. Never adds a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    a, b = expression(a), expression(b)
    return bool(a == b or a - b == 0)


def expression(size: Any) -> Any:
    """Returns the sympy expression of a size, or the number.

    A quotient that is whole for every value of its symbols is written without a division.
    """
    if not is_symbolic(size):
        return size
    expr = expression_of(size)
    return _without_quotients(expr) if expr.has(FloorDiv, IntTrueDiv) else expr


def known(size: Any) -> Any:
    """Returns the number of a size that torch knows to be constant; else the size itself."""
    return size if isinstance(size, int) or expression_of(size).free_symbols else int(size)


@cache
def _without_quotients(expr: sympy.Expr) -> sympy.Expr:
    """Returns ``s`` for ``s ** 2 // s``.

    These are the tokens of ``s`` sequences of length ``s``: torch may give both sizes one symbol.
    """

    def ratio(quotient: sympy.Expr) -> sympy.Expr:
        """Returns the exact ratio if it is no fraction, else the quotient."""
        exact = sympy.cancel(quotient.args[0] / quotient.args[1])
        return exact if exact.as_numer_denom()[1] == 1 else quotient

    expr = expr.replace(lambda part: isinstance(part, (FloorDiv, IntTrueDiv)), ratio)
    integers = (part for part in expr.atoms(CeilToInt) if part.args[0].is_integer)
    return expr.xreplace({part: part.args[0] for part in integers})


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Returns True if two shapes are equal for every value of their symbols."""
    return len(a) == len(b) and all(map(same, a, b))


def is_empty(node: Node) -> bool:
    """Returns True if the node holds a tensor without elements."""
    return any(isinstance(size, int) and size == 0 for size in sizes_of(node))


class Binding:
    """Binds each symbol to a small prime that is no literal of the graph, if its bounds allow one.

    Then a slice ``[:8]`` differs from the whole of a token axis whose example size was 8.
    """

    def __init__(self, literals: Collection[int] = ()) -> None:
        self._literals = literals
        self._primes = [prime for prime in _PRIMES if prime not in literals] or [*_PRIMES]
        self._numbers: dict[Any, int] = {}  # by symbol
        self._solved: dict[Any, Any] = {}  # what symbols, and quotients of them, are equal to
        self._divisors: dict[Any, int] = {}  # by symbol, where it stands for a size divided by that

    def equate(self, a: Any, b: Any) -> None:
        """Treats two sizes as equal from now on: the graph runs for no others.

        The equation is solved for one of these, and ignored if it has none:

        * a symbol: ``s == 2 * (s // 2)`` makes it twice its half
        * a symbol that a number divides: ``s % 16 == 0`` makes it 16 times another symbol
        """
        sides = self._expr(a), self._expr(b)
        _, difference = sympy.expand(sides[0] - sides[1]).as_content_primitive()
        if isinstance(difference, Mod) and difference.args[0].is_symbol:
            symbol, divisor = difference.args
            if divisor.is_Integer:
                quotient = _symbol_for(symbol)
                self._divisors[quotient] = int(divisor)
                self._solve({symbol: divisor * quotient})
            return
        quotients = sorted(difference.atoms(FloorDiv), key=str)
        # a lone symbol first: a summand would be a difference, which may be negative
        symbols = sorted(difference.free_symbols, key=lambda part: (part not in sides, str(part)))
        for part in symbols:
            factor = difference.coeff(part)
            other_side = sympy.expand(part - difference * factor)
            for quotient in quotients:  # s == n * (s // m), so n is m
                times = other_side / quotient
                if quotient.args[0] == part and times.is_symbol and times != quotient.args[1]:
                    self._solve({times: quotient.args[1]})
                    return self.equate(a, b)
            if factor**2 != 1:
                continue
            solution = {
                quotient: _symbol_for(quotient) for quotient in quotients if quotient.has(part)
            }
            other_side = other_side.xreplace(solution)
            if other_side.has(part) or any(
                quotient.xreplace({part: other_side}) != symbol
                for quotient, symbol in solution.items()
            ):
                continue
            self._solve(solution | {part: other_side})
            return

    def _solve(self, solution: dict[Any, Any]) -> None:
        """Adds a solution to those that are known."""
        solved = {part: expr.xreplace(solution) for part, expr in self._solved.items()}
        self._solved = solved | solution

    def admit(self, sizes: Iterable[Any]) -> None:
        """Binds symbols so that no difference among these sizes is less than 2.

        A graph that cuts n = 7 tokens needs more than the five that a symbol may stand for.
        """
        distinct = {expression_of(size): size for size in sizes if is_symbolic(size)}
        for expr, size in {self._expr(size): size for size in distinct.values()}.items():
            if not expr.is_Add or not any(part.could_extract_minus_sign() for part in expr.args):
                continue  # no difference
            rising = [
                symbol for symbol in expr.free_symbols if expr.subs(symbol, symbol + 1) - expr == 1
            ]
            lacking = 2 - self.size(size)
            if lacking > 0 and rising:
                symbol = min(rising, key=str)
                least, (_, most) = self._numbers[symbol] + lacking, bounds_of(size, symbol)
                taken = self._numbers.values()
                free = (prime for prime in self._primes if prime >= least and prime not in taken)
                self._numbers[symbol] = int(min(next(free, least), most))

    def varies(self, size: Any) -> bool:
        """Returns True if the size may be another number in another run."""
        return not isinstance(self.meaning(size), int)

    @property
    def numbers(self) -> dict[Any, Any]:
        """The symbols, and quotients of them, that are one number whenever the graph runs."""
        return {part: expr for part, expr in self._solved.items() if expr.is_Integer}

    def meaning(self, size: Any) -> Any:
        """Returns a number or an expression: the same for sizes that are equal in every run."""
        expr = self._expr(size)
        return int(expr) if expr.is_Integer else expr

    def _expr(self, size: Any) -> Any:
        """Returns the expression of a size, with the solutions of equations in it."""
        return sympy.sympify(expression(size)).xreplace(self._solved)

    def _with_number(self, symbol: Any, number: int) -> Binding:
        """Returns this binding with another number for a symbol."""
        other = copy(self)
        other._numbers = self._numbers | {symbol: number}
        return other

    def roomier(self, size: Any, least: int, step: int) -> Binding:
        """Returns a binding in which ``size`` is a multiple of ``step`` and at least ``least``.

        It is this one if the size is so already, or is an expression of symbols.
        """
        if self.size(size) >= least and self.size(size) % step == 0:
            return self
        taken = self._numbers.values()
        multiples = (n for n in count(-(-least // step) * step, step) if n not in taken)
        return self.resized(size, next(multiples))

    def resized(self, size: Any, number: int) -> Binding:
        """Returns this binding with another number for a size that is one symbol."""
        expr = self._expr(size)
        return self._with_number(expr, number) if expr.is_symbol else self

    def raised(self, size: Any, least: int) -> Binding:
        """Returns a binding in which a symbol of ``size`` is larger: the size is near ``least``.

        The symbol gets its largest number if that is less. Returns this one if nothing is larger.
        """
        now, expr = self.size(size), self._expr(size)
        for symbol in sorted(expr.free_symbols, key=str, reverse=True):  # of [B, S], the length
            if self._at(expr.subs(symbol, symbol + least)) <= now:
                continue
            _, largest = bounds_of(size, symbol)
            number = int(min(-(-least * self._numbers[symbol] // now), largest))
            if number > self._numbers[symbol]:
                return self._with_number(symbol, number)
        return self

    def size(self, value: Any) -> int:
        """Returns the number that stands for a size in a run."""
        if not is_symbolic(value):
            return int(value)
        expr = self._expr(value)
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._numbers:
                divisor = self._divisors.get(symbol, 1)
                self._numbers[symbol] = self._pick(*bounds_of(value, symbol), divisor)
        return int(self._at(expr))

    def _at(self, expr: Any) -> Any:
        """Returns the expression with its symbols bound."""
        # only its own symbols: sympy sorts all that are passed
        return expr.subs({symbol: self._numbers[symbol] for symbol in expr.free_symbols})

    def _pick(self, least: float, largest: float, divisor: int) -> int:
        """Returns a prime that stands for no other symbol; ``divisor`` times it is no literal.

        It is another number if the bounds allow no such prime (``cache[:batch]``,
        ``table[:, :128]``).
        """
        fit = [number for number in (*self._primes, *_FEW) if least <= number <= largest]
        taken = set(self._numbers.values())
        if divisor > 1:
            taken |= {number for number in fit if divisor * number in self._literals}
        if not fit:  # an int argument may be below 0, and then the least number is infinite
            return int(largest if math.isinf(least) else min(least + 1, largest))
        return next((number for number in fit if number not in taken), fit[0])

    def number(self, value: Any) -> Any:
        """Returns what stands for a symbolic value in a run: an int, a float or a bool."""
        kinds = {torch.SymFloat: float, torch.SymBool: bool}
        if type(value) in kinds:
            return kinds[type(value)](self._at(self._expr(value)))
        return self.size(value)

    def shape(self, shape: Iterable[Any]) -> tuple[int, ...]:
        """Returns the numbers that stand for the sizes of a shape."""
        return tuple(map(self.size, shape))

    def shape_of(self, node: Node) -> tuple[int, ...]:
        """Returns the numbers that stand for the sizes of a node's tensor."""
        return self.shape(shape_of(node))

    def count_of(self, node: Node) -> int:
        """Returns how many elements a node's tensor has."""
        return math.prod(self.shape_of(node))


def _symbol_for(part: Any) -> sympy.Dummy:
    """Returns a new symbol that stands for a part of an expression."""
    return sympy.Dummy(str(part), integer=True, positive=True)


def divides(by: int, size: Any) -> bool:
    """Returns True if the size is a multiple whenever the graph runs."""
    return statically_known_true(size % by == 0)
