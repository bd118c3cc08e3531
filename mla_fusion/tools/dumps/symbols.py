"""Tensors without storage in the shapes that a dump states, symbolic sizes among them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from mla_fusion.compat import new_size, symbolic_mode
from mla_fusion.tools.dumps import Value, budget, names
from mla_fusion.tools.dumps.fx_text import BINARY

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    **{sign: BINARY[sign] for sign in (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)},
    ast.Pow: lambda base, exponent: base ** _small(base, exponent),
}
_CALLS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "FloorDiv": operator.floordiv,
}
_HINT = 11  # as good a number of tokens as any: a prime that no model's dims contain
_LARGEST = 1 << 40
_LONGEST = 256  # characters of an expression
_DEGREE = 4  # sums to a higher power have too many terms
_SYMBOLIC = 8  # sizes of one tensor that may be symbolic, since their product is one expression


def _small(base: Any, exponent: Any) -> int:
    most = 8 if isinstance(base, int) else _DEGREE
    if not isinstance(exponent, int) or not 0 <= exponent <= most:
        raise ValueError("no exponent of a size")
    return exponent


class Tensors:
    """Makes fake tensors; a symbol of one name is the same size everywhere."""

    def __init__(self) -> None:
        self.mode = symbolic_mode(budget.Mode, budget.weigh)
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
        if value.shape is None or dtype is None or len(value.shape) > names.MOST_AXES:
            return None
        if sum(isinstance(size, str) for size in value.shape) > _SYMBOLIC:
            return None
        shape = self.sizes(value.shape)
        stride = self.sizes(value.stride) if value.stride is not None else None
        if shape is None or (stride is not None and len(stride) != len(shape)):
            return None
        if stride is None:
            return budget.called(self.mode, torch.empty, (shape,), {"dtype": dtype})
        return budget.called(self.mode, torch.empty_strided, (shape, stride), {"dtype": dtype})

    def sizes(self, dims: Sequence[Any]) -> list[Any] | None:
        found = [self.size(dim) for dim in dims]
        return None if any(size is None for size in found) else found

    def size(self, dim: Any) -> Any:
        """A number, or the SymInt of an expression; None for what is no size."""
        if isinstance(dim, int):
            return dim if dim >= 0 else None
        return self._expression(dim)

    def _parsed(self, text: str) -> Any:
        if len(text) > _LONGEST or text.count("*") > 2 * _DEGREE:
            return None
        try:
            return self._evaluate(ast.parse(text.strip(), mode="eval").body)
        except (
            SyntaxError,
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ):
            return None

    def _evaluate(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < _LARGEST:
            return node.value
        if isinstance(node, ast.Name):
            return self._symbol(node.id)
        if isinstance(node, ast.BinOp):
            found = _BINARY[type(node.op)](self._evaluate(node.left), self._evaluate(node.right))
            if isinstance(found, int) and abs(found) > _LARGEST:
                raise ValueError("too large for a size")
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._evaluate(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return _CALLS[node.func.id](*map(self._evaluate, node.args))
        raise ValueError(f"not a size: {ast.dump(node)}")
