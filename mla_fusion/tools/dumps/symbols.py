"""Tensors without storage in the shapes that a dump states, symbolic sizes among them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache, partial
from time import monotonic
from typing import Any

import torch

from mla_fusion.compat import FakeTensorMode, new_size, symbolic_mode
from mla_fusion.tools.dumps import Value, names
from mla_fusion.tools.dumps.fx_text import BINARY

MOST_SECONDS = 120  # that the pass may work on the graph of a dump; 61 layers take a few
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    sign: BINARY[sign] for sign in (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
}
_CALLS: dict[str, Callable[..., Any]] = {"Max": torch.sym_max, "Min": torch.sym_min}
_HINT = 11  # as good a number of tokens as any: a prime that no model's dims contain
_LARGEST = 1 << 40
_LONGEST = 256  # characters of an expression
_FACTORS = 8  # products of more sums have too many terms


class TooSlow(BaseException):
    """Not an Exception, because torch and sympy catch those and try something else."""


class _Mode(FakeTensorMode):
    """Ends the work on a graph when its time is up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._deadline = monotonic() + MOST_SECONDS

    def check(self) -> None:
        if monotonic() > self._deadline:
            raise TooSlow

    def __torch_dispatch__(self, *call: Any, **options: Any) -> Any:
        self.check()
        return super().__torch_dispatch__(*call, **options)


class Tensors:
    """Makes fake tensors; a symbol of one name is the same size everywhere."""

    def __init__(self) -> None:
        self.mode = symbolic_mode(_Mode)
        self._symbol = cache(partial(new_size, self.mode, hint=_HINT, largest=_LARGEST))
        self._expression = cache(self._parsed)
        # layers repeat their shapes, and a tensor without storage can stand for many
        self._tensor = cache(self._make)

    def of(self, value: Value) -> Any:
        """The tensor or symbolic size that an annotation describes, or None where it does not say
        enough.
        """
        if value.dtype == "Sym":
            return self.size((value.shape or ("",))[0])
        return self._tensor(value)

    def _make(self, value: Value) -> Any:
        dtype = names.dtype(value.dtype)
        shape = [*map(self.size, value.shape or ())]
        stride = None if value.stride is None else [*map(self.size, value.stride)]
        if value.shape is None or dtype is None:
            return None
        if any(size is None for size in (*shape, *(stride or ()))):
            return None
        with self.mode:
            if stride is None:
                return torch.empty(shape, dtype=dtype)
            return torch.empty_strided(shape, stride, dtype=dtype)

    def size(self, dim: Any) -> Any:
        """A number, or the SymInt of an expression; None for what is no size."""
        if isinstance(dim, int):
            return dim if dim >= 0 else None
        return self._expression(dim)

    def _parsed(self, text: str) -> Any:
        if len(text) > _LONGEST or text.count("*") > _FACTORS:
            return None
        try:
            return self._evaluate(ast.parse(text.strip(), mode="eval").body)
        except Exception:  # of an expression that is none
            return None

    def _evaluate(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number)) if number < _LARGEST:
                return number
            case ast.Name(id=name):
                return self._symbol(name)
            case ast.BinOp(op=ast.Pow(), left=ast.Name(id=name), right=ast.Constant(value=2)):
                return self._symbol(name) * self._symbol(name)
            case ast.BinOp(left=left, op=op, right=right):
                found = _BINARY[type(op)](self._evaluate(left), self._evaluate(right))
                if isinstance(found, int) and abs(found) > _LARGEST:
                    raise ValueError("too large for a size")
                return found
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return _CALLS[name](*map(self._evaluate, arguments))
        raise ValueError("not a size")
