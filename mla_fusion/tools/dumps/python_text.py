"""Python text as data: parsed, never run. Shared by the readers of generated GE code and of FX
listings.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from mla_fusion.compat import tree_leaves
from mla_fusion.tools.dumps.model import Arguments, DumpError, Edge, Operator

_WORDS = ("inf", "nan", "Ellipsis")


def parse(text: str) -> ast.Module:
    """The syntax tree. Raises DumpError where there is none."""
    try:
        with warnings.catch_warnings():
            # of literals that are legal and odd, as damage makes them
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise DumpError(f"not a whole listing: {getattr(error, 'msg', error)}", line) from None


class Word(str):
    """A dotted name that is data, such as ``torch.float32``."""

    __slots__ = ()


def dotted(node: ast.AST) -> str:
    """``torch.ops.aten.mm.default`` of a chain of attributes; "" for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


class Reader:
    """What the readers of both listings do: literals and names."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.names: dict[str, Edge] = {}

    def value(self, node: ast.AST | None) -> Any:
        """A literal, a list, an :class:`Edge` for a known name, a :class:`Word` for a dotted
        one.
        """
        match node:
            case ast.Constant(value=found):
                return found
            case ast.Name(id=name) if name in self.names or name in _WORDS:
                return self.names.get(name, Word(name))
            case ast.Name(id=name):
                raise DumpError(f"{name!r} is not defined", node.lineno)
            case ast.Attribute() if name := dotted(node):
                return Word(name)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Dict(keys=keys) if all(isinstance(key, ast.Constant) for key in keys):
                return dict(zip(map(self.value, keys), map(self.value, node.values), strict=True))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id=name)):
                return Word(f"-{name}")
            case ast.Call():
                return self.constructed(node)
        raise unexpected(node)

    def constructed(self, node: ast.Call) -> Any:
        """``device(type='npu', index=0)``, ``tensor([1, 2])``, ``slice(None, 3)``: by name and
        arguments.
        """
        arguments, options = self.arguments(node)
        match dotted(node.func).rpartition(".")[2]:
            case "device":
                where = options.get("type", arguments[0] if arguments else "cpu")
                return Word(f"device:{where}")
            case "slice" if 1 <= len(arguments) <= 3:
                return slice(*arguments)
            case "tensor" | "Const" if arguments:
                return arguments[0]
        raise unexpected(node)

    def arguments(self, node: ast.Call) -> Arguments:
        """What a call is given, by place and by name."""
        options = {item.arg: self.value(item.value) for item in node.keywords if item.arg}
        return tuple(map(self.value, node.args)), options


def unexpected(node: ast.AST | None) -> DumpError:
    return DumpError(f"unexpected {type(node).__name__} in the listing", getattr(node, "lineno", 0))


def names_in(nodes: list[ast.expr]) -> list[str]:
    """The names that are given results. Raises DumpError for anything else."""
    if names := [node.id for node in nodes if isinstance(node, ast.Name)]:
        return names
    raise DumpError("results that are no names", nodes[0].lineno if nodes else 1)


def edges_in(found: Any) -> list[Edge]:
    """The values that an argument mentions, in order."""
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Edge)]
