"""Symbolic sizes: a small concrete number for each symbol, and graph nodes that hold a symbolic size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73)


_SYMBOLIC = frozenset((torch.SymInt, torch.SymFloat, torch.SymBool))


def is_symbolic(value: Any) -> bool:
    return type(value) in _SYMBOLIC  # isinstance takes microseconds for a fake tensor, and this is asked everywhere


def same(a: Any, b: Any) -> bool:
    """Are two sizes equal for every value of their symbols? Never adds a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    expr_a, expr_b = (size.node.expr if is_symbolic(size) else size for size in (a, b))
    return bool(expr_a == expr_b) or (expr_a - expr_b) == 0


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


class Binding:
    """Binds each symbol to a small prime that no literal of the graph equals.

    A slice ``[:8]`` of a token axis whose example size was 8 is then told apart from the whole axis.
    """

    def __init__(self, literals: Iterable[int] = ()) -> None:
        taken = set(literals)
        self._free = [prime for prime in _PRIMES if prime not in taken] or list(_PRIMES)
        self._bound: dict[Any, int] = {}

    def size(self, value: Any) -> int:
        """The concrete size that stands for ``value`` in a probe."""
        if not is_symbolic(value):
            return int(value)
        expr = value.node.expr
        for symbol in sorted(getattr(expr, "free_symbols", ()), key=str):
            if symbol not in self._bound:
                self._bound[symbol] = self._free[len(self._bound) % len(self._free)]
        return int(expr.subs(self._bound)) if hasattr(expr, "subs") else int(expr)

    def number(self, value: Any) -> Any:
        if isinstance(value, torch.SymFloat):
            return float(value.node.expr.subs(self._bound)) if value.node.expr.free_symbols else float(value)
        if isinstance(value, torch.SymBool):
            return bool(value.node.expr.subs(self._bound))
        return self.size(value)

    def shape(self, shape: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.size(size) for size in shape)


class SizeNodes:
    """Finds, or makes, the graph node that holds a symbolic size."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[Any, Node] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if type(value) is torch.SymInt:
                self._nodes.setdefault(value.node.expr, node)

    def find(self, size: torch.SymInt) -> Node | None:
        return self._nodes.get(size.node.expr)
