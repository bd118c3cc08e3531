"""Python text as data: parsed, never run. Shared by the readers of generated GE code and of FX
listings.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from mla_fusion.tools.dumps.model import DumpError, Edge


def parse(text: str, first_line: int = 1) -> ast.Module:
    """The syntax tree. Raises DumpError where there is none; ``first_line`` is the text's place in
    its file.
    """
    try:
        with warnings.catch_warnings():
            # of literals that are legal and odd, as damage makes them
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        line = (error.lineno or 1) - 1
        offset = sum(len(item) + 1 for item in text.split("\n")[:line]) + (error.offset or 1) - 1
        raise DumpError(f"not a whole listing: {error.msg}", first_line + line, offset) from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise DumpError(f"not a listing: {error}", first_line) from None


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


def value(node: ast.AST, names: dict[str, Edge]) -> Any:
    """A literal, a list, an :class:`Edge` for a known name, a :class:`Word` for a dotted one."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id] if node.id in names else _word(node, node.id)
    if isinstance(node, ast.Attribute):
        return Word(dotted(node)) if dotted(node) else _refuse(node)
    if isinstance(node, ast.List):
        return [value(item, names) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(value(item, names) for item in node.elts)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {value(key, names): value(item, names) for key, item in pairs if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _negative(node, names)
    if isinstance(node, ast.Call):
        return _constructor(node, names)
    return _refuse(node)


def _negative(node: ast.UnaryOp, names: dict[str, Edge]) -> Any:
    found = value(node.operand, names)
    if isinstance(found, Word):
        return Word(f"-{found}")
    return -found if isinstance(found, (int, float, complex)) else _refuse(node)


def _constructor(node: ast.Call, names: dict[str, Edge]) -> Any:
    """``device(type='npu', index=0)``, ``tensor([1, 2])``, ``slice(None, 3)``: by name and
    arguments.
    """
    name = dotted(node.func).rpartition(".")[2]
    arguments = [value(item, names) for item in node.args]
    options = {item.arg: value(item.value, names) for item in node.keywords if item.arg}
    if name == "device":
        where = options.get("type", arguments[0] if arguments else "cpu")
        return Word(f"device:{where}")
    if name == "slice":
        return slice(*arguments) if 1 <= len(arguments) <= 3 else _refuse(node)
    if name in ("tensor", "Size", "array", "float", "int", "bool") and arguments:
        return arguments[0]
    return _refuse(node)


def _word(node: ast.AST, name: str) -> Any:
    known = name in ("inf", "nan", "true", "false", "Ellipsis")
    return Word(name) if known else _refuse(node, f"{name!r} is not defined")


def _refuse(node: ast.AST, why: str = "") -> Any:
    raise DumpError(
        why or f"unexpected {type(node).__name__} in the listing", getattr(node, "lineno", 0)
    )


def edges_in(found: Any) -> list[Edge]:
    """The values that an argument mentions, in order."""
    if isinstance(found, Edge):
        return [found]
    if isinstance(found, (list, tuple)):
        return [edge for item in found for edge in edges_in(item)]
    if isinstance(found, dict):
        return [edge for item in found.values() for edge in edges_in(item)]
    return []
