"""Symbolic sizes: a small concrete number for each symbol, and graph nodes that hold a symbolic
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from copy import copy
from functools import cache, cached_property
from itertools import count
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from mla_fusion.compat import (
    CeilToInt,
    FloorDiv,
    IntTrueDiv,
    Mod,
    bounds_of,
    expression_of,
    statically_known_true,
    traced_with,
)
from mla_fusion.fx.kinds import shape_of, value_of

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73)
_FEW = (3, 4, 2)


_SYMBOLIC = frozenset((torch.SymInt, torch.SymFloat, torch.SymBool))


def is_symbolic(value: Any) -> bool:
    # isinstance takes microseconds for a fake tensor, and this is asked everywhere
    return type(value) in _SYMBOLIC


def has_symbols(sizes: Iterable[Any]) -> bool:
    """Is any of the sizes symbolic?"""
    return not _SYMBOLIC.isdisjoint(map(type, sizes))


def sizes_of(value: Any) -> tuple[Any, ...]:
    """Of a node that holds a tensor, or several (the first); () for anything else."""
    held = value_of(value) if isinstance(value, Node) else None
    if isinstance(held, (tuple, list)) and held:
        held = held[0]
    return tuple(held.shape) if isinstance(held, torch.Tensor) else ()


def is_size(node: Node) -> bool:
    """Does the node hold a symbolic size?"""
    return type(value_of(node)) in _SYMBOLIC


def same(a: Any, b: Any) -> bool:
    """Are two sizes equal for every value of their symbols? Never adds a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    expr_a, expr_b = expression(a), expression(b)
    return bool(expr_a == expr_b) or (expr_a - expr_b) == 0


def expression(size: Any) -> Any:
    """A size as sympy has it, quotients that are whole for every value of their symbols written
    without a division.
    """
    if not is_symbolic(size):
        return size
    found = expression_of(size)
    return _without_quotients(found) if found.has(FloorDiv, IntTrueDiv) else found


def known(size: Any) -> Any:
    """The number that a size is by what torch knows of its symbols; else the size."""
    return size if isinstance(size, int) or expression_of(size).free_symbols else int(size)


@cache
def _without_quotients(found: sympy.Expr) -> sympy.Expr:
    """``s ** 2 // s`` is ``s``: tokens of as many sequences as each is long, where torch gave both
    one symbol.
    """

    def ratio(quotient: sympy.Expr) -> sympy.Expr:
        exact = sympy.cancel(quotient.args[0] / quotient.args[1])
        return exact if exact.as_numer_denom()[1] == 1 else quotient

    found = found.replace(lambda part: isinstance(part, (FloorDiv, IntTrueDiv)), ratio)
    whole = found.atoms(CeilToInt)
    return found.xreplace({part: part.args[0] for part in whole if part.args[0].is_integer})


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def is_empty(node: Node) -> bool:
    """Returns True if the node holds a tensor without elements."""
    return any(isinstance(size, int) and size == 0 for size in sizes_of(node))


class Binding:
    """Binds each symbol to a small prime that no literal of the graph equals, where it can be as
    large.

    A slice ``[:8]`` of a token axis whose example size was 8 is then told apart from the whole
    axis.
    """

    def __init__(self, prepare: Callable[[Binding], None] | None = None) -> None:
        """``prepare`` is called with the first symbolic size that is asked for: most graphs have
        none.
        """
        self._prepare = prepare
        self._free = list(_PRIMES)
        self._bound: dict[Any, int] = {}
        self._solved: dict[Any, Any] = {}  # what symbols, and quotients of them, are equal to
        self._kept: set[Any] = set()  # symbols of such quotients
        self._literals: Collection[int] = ()
        self._steps: dict[Any, int] = {}  # symbols that stand for a size divided by so much

    def avoid(self, literals: Collection[int]) -> None:
        """Bind no symbol to these."""
        self._literals = literals
        self._free = [prime for prime in _PRIMES if prime not in literals] or list(_PRIMES)

    def equate(self, a: Any, b: Any) -> None:
        """Take two sizes for equal from here on: the graph runs for no others.

        Solved for a symbol (``s == 2 * (s // 2)`` makes it twice its half), or for a quotient that
        is a number then (``w // 2 == 64``) or another quotient; their symbols stay what the graph
        was traced with. A symbol that divides by a number (``s % 16 == 0``) is so many times
        another. An equation that has none of these is left.
        """
        _, difference = sympy.expand(self._expr(a) - self._expr(b)).as_content_primitive()
        if isinstance(difference, Mod) and difference.args[0].is_symbol:
            symbol, by = difference.args
            if by.is_Integer:
                whole = sympy.Dummy(str(symbol), integer=True, positive=True)
                self._steps[whole] = int(by)
                self._solve({symbol: by * whole})
            return
        quotients = sorted(difference.atoms(FloorDiv), key=str)
        for part in (*sorted(difference.free_symbols, key=str), *quotients):
            factor = difference.coeff(part)
            rest = sympy.expand(part - difference * factor)
            if factor**2 != 1 or not (part.is_symbol or rest.is_Integer or rest in quotients):
                continue
            inside = [one for one in quotients if one.has(part) and one != part]
            found = {one: sympy.Dummy(str(one), integer=True, positive=True) for one in inside}
            rest = rest.xreplace(found)
            if rest.has(part) or any(one.xreplace({part: rest}) != found[one] for one in inside):
                continue
            found[part] = rest
            self._kept |= set() if part.is_symbol else difference.free_symbols
            self._solve(found)
            return

    def _solve(self, found: dict[Any, Any]) -> None:
        self._solved = {was: now.xreplace(found) for was, now in self._solved.items()} | found

    def admit(self, sizes: Iterable[Any]) -> None:
        """Bind symbols so that no difference among these sizes is less than 2: five tokens, of
        which n = 7 are cut.
        """
        distinct = {expression_of(size): size for size in sizes if is_symbolic(size)}
        differences = {
            expr: size for size in distinct.values() if _is_difference(expr := self._expr(size))
        }
        for expr, size in differences.items():
            rising = [
                symbol for symbol in expr.free_symbols if expr.subs(symbol, symbol + 1) - expr == 1
            ]
            short = 2 - self.size(size)
            if short > 0 and rising:
                symbol = min(rising, key=str)
                least, (_, most) = self._bound[symbol] + short, bounds_of(size, symbol)
                free = (
                    number
                    for number in self._free
                    if number >= least and number not in self._bound.values()
                )
                self._bound[symbol] = int(min(next(free, least), most))

    def same(self, a: Any, b: Any) -> bool:
        """Are two sizes equal whenever the graph runs? Never adds a guard."""
        return same(a, b) or bool(self.meaning(a) == self.meaning(b))

    def varies(self, size: Any) -> bool:
        """May the size be another one in another run?"""
        return is_symbolic(size) and not isinstance(self.meaning(size), int)

    @property
    def numbers(self) -> dict[Any, Any]:
        """The symbols, and quotients of them, that are one number whenever the graph runs."""
        return {was: now for was, now in self._solved.items() if now.is_Integer}

    def meaning(self, size: Any) -> Any:
        """A number or an expression: one for sizes that are equal whenever the graph runs."""
        found = self._expr(size) if is_symbolic(size) else size
        return int(found) if getattr(found, "is_Integer", False) else found

    def _expr(self, size: Any) -> Any:
        if self._prepare is not None:
            prepare, self._prepare = self._prepare, None
            prepare(self)
        return sympy.sympify(expression(size)).xreplace(self._solved)

    def roomier(self, size: Any, least: int, step: int = 1) -> Binding:
        """This binding, or one in which ``size``, a symbol that stands for less, stands for
        ``least`` or more; of a ``step`` for a multiple of it.
        """
        if not is_symbolic(size) or not self._expr(size).is_symbol:
            return self
        if self.size(size) >= least and self.size(size) % step == 0:
            return self
        other, taken = copy(self), self._bound.values()
        free = (n for n in count(-(-least // step) * step, step) if n not in taken)
        other._bound = self._bound | {self._expr(size): next(free)}
        return other

    def raised(self, size: Any, least: int) -> Binding:
        """This binding, or one in which ``size`` is ``least`` or near it: one of its symbols stands
        for more.

        Where the graph runs for no more than so many, it stands for that.
        """
        if not is_symbolic(size):
            return self
        now, expr = self.size(size), self._expr(size)
        for symbol in sorted(expr.free_symbols, key=str, reverse=True):  # of [B, S], the length
            if self._at(expr.subs(symbol, symbol + least)) <= now:
                continue
            _, largest = bounds_of(size, symbol)
            wanted = -(-least * self._bound[symbol] // now)
            number = wanted if largest >= wanted else int(largest)
            if number > self._bound[symbol]:
                other = copy(self)
                other._bound = self._bound | {symbol: number}
                return other
        return self

    def size(self, value: Any) -> int:
        """The concrete size that stands for ``value`` in a probe."""
        if not is_symbolic(value):
            return int(value)
        expr = self._expr(value)
        for symbol in sorted(getattr(expr, "free_symbols", ()), key=str):
            if symbol not in self._bound:
                kept = symbol in self._kept
                step, bounds = self._steps.get(symbol, 1), bounds_of(value, symbol)
                found = traced_with(value, symbol) if kept else self._pick(*bounds, step)
                self._bound[symbol] = found
        return int(self._at(expr))

    def _at(self, expr: Any) -> Any:
        """The expression with its own symbols bound: sympy sorts all that it is given."""
        symbols = getattr(expr, "free_symbols", ())
        return expr.subs({symbol: self._bound[symbol] for symbol in symbols}) if symbols else expr

    def _pick(self, least: float, largest: float, step: int) -> int:
        """A prime that stands for no other symbol; another number where the graph runs for none of
        these (``cache[:batch]``, ``table[:, :128]``). A ``step`` times it is no literal either.
        """
        fit = [number for number in (*self._free, *_FEW) if least <= number <= largest]
        taken = set(self._bound.values())
        taken |= {number for number in fit if step > 1 and step * number in self._literals}
        free = (number for number in fit if number not in taken)
        return next(free, fit[0] if fit else _between(least, largest))

    def number(self, value: Any) -> Any:
        if isinstance(value, torch.SymFloat):
            return (
                float(self._at(self._expr(value)))
                if expression_of(value).free_symbols
                else float(value)
            )
        if isinstance(value, torch.SymBool):
            return bool(self._at(self._expr(value)))
        return self.size(value)

    def shape(self, shape: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.size(size) for size in shape)

    def shape_of(self, node: Node) -> tuple[int, ...]:
        return self.shape(shape_of(node))

    def count_of(self, node: Node) -> int:
        """How many elements it has."""
        return math.prod(self.shape_of(node))


def _between(least: float, largest: float) -> int:
    """A number within the bounds, of which one may be infinite: an int argument may be below 0."""
    return int(largest if math.isinf(least) else min(least + 1, largest))


def _is_difference(expr: Any) -> bool:
    return bool(expr.is_Add) and any(part.could_extract_minus_sign() for part in expr.args)


def divides(by: int, size: Any) -> bool:
    """Is the size a multiple whenever the graph runs?"""
    return statically_known_true(size % by == 0)


class SizeNodes:
    """Finds, or makes, the graph node that holds a symbolic size."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def find(self, size: torch.SymInt) -> Node | None:
        return self._nodes.get(expression(size))

    @cached_property
    def _nodes(self) -> dict[Any, Node]:
        found: dict[Any, Node] = {}
        for node in self._graph.nodes:
            value = value_of(node)
            if type(value) is torch.SymInt:
                found.setdefault(expression(value), node)
        return found
