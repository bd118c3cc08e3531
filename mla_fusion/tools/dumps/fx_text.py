"""FX listings: ``GraphModule.print_readable`` as torchair, Inductor and TORCH_LOGS write it.

The text is Python with annotations such as ``"bf16[8, 1024][1024, 1]cpu"`` or ``"Sym(s0)"``;
strides and device stand there only where the writer asked for them. Log prefixes before the class
are skipped.
"""

from __future__ import annotations

import ast
import operator as py
import re
from collections.abc import Callable
from typing import Any

from mla_fusion.tools.dumps import dtypes, python_text
from mla_fusion.tools.dumps.model import Dim, DumpError, Edge, Operator, Value, dim

# of the type of a call of a tensor's method; only graphs before AOT autograd have those
METHOD = "Tensor."
CLASS = re.compile(r"class (?P<name>[\w<>.$-]+)\(torch\.nn\.Module\):")
_ANNOTATION = re.compile(
    r"^(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\[(?P<stride>[^\]]*)\])?(?P<device>[a-z]\w*(?::\d+)?)?$"
)
_SYMBOL = re.compile(r"^Sym\((?P<expr>.*)\)$")
_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Div: "truediv",
    ast.Mod: "mod",
    ast.Pow: "pow", ast.BitAnd: "and_", ast.BitOr: "or_", ast.Eq: "eq", ast.NotEq: "ne",
    ast.Lt: "lt", ast.LtE: "le",
    ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip


def read(text: str) -> tuple[list[Operator], str]:
    """The nodes in order: placeholders, attributes, calls, then one of type "output"."""
    start, name, body = _listing(text)
    module = python_text.parse(body, start)
    function = _forward(module, start)
    reader = _Reader(start, _sources(body))
    try:
        reader.placeholders(function.args)
        for statement in function.body:
            reader.take(statement)
    except DumpError as error:  # lines of the cut-out listing, but those of the reader's own checks
        raise DumpError(error.message, error.line + start - 1, error.offset) from None
    if not reader.operators or reader.operators[-1].type != "output":
        raise DumpError(
            "the listing ends without a return: truncated",
            start + len(body.split("\n")) - 1,
            len(text),
        )
    return reader.operators, name


def _listing(text: str) -> tuple[int, str, str]:
    """(line, class name, text) of the first class, its indentation and what stands around it
    removed.
    """
    found = CLASS.search(text)
    if found is None:
        raise DumpError("no class of an FX graph", 1)
    head = text.rfind("\n", 0, found.start()) + 1
    lines = text[found.end() :].split("\n")
    # ``class <lambda>`` is no Python; the class may also stand behind a log prefix, its body then
    # deeper or not.
    body = ["class Graph:" + lines[0], *lines[1:]]
    end = next(
        (i for i, line in enumerate(body) if i and line[:1] not in ("", " ", "\t", "#", ")", "\r")),
        len(body),
    )
    return text.count("\n", 0, head) + 1, found["name"], "\n".join(body[:end])


def _forward(module: ast.Module, start: int) -> ast.FunctionDef:
    tops = [item for item in module.body if isinstance(item, ast.ClassDef)]
    functions = [item for top in tops for item in top.body if isinstance(item, ast.FunctionDef)]
    for function in functions:
        if function.name == "forward":
            return function
    raise DumpError("the listing has no forward", start)


def _sources(body: str) -> list[tuple[int, str]]:
    found = []
    for number, line in enumerate(body.split("\n"), 1):
        where, _, code = line.partition("# File: ")[2].partition(", code: ")
        if " in " in where:
            found.append((number, f"{where}: {code}"))
    return found


class _Reader:
    def __init__(self, start: int, sources: list[tuple[int, str]]) -> None:
        self.operators: list[Operator] = []
        self._start, self._sources, self._source = start, sources, ""
        self._names: dict[str, Edge] = {}

    def placeholders(self, arguments: ast.arguments) -> None:
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        if not given or given[0].arg != "self" or arguments.vararg or arguments.kwarg:
            raise DumpError("forward takes no self, or arguments without names", 2)
        for item in given[1:]:
            self._add(Operator(item.arg, "placeholder", line=self._line(item)), item.annotation)

    def take(self, statement: ast.stmt) -> None:
        while self._sources and self._sources[0][0] < statement.lineno:
            self._source = self._sources.pop(0)[1]
        if isinstance(statement, ast.Return):
            return self._output(statement)
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            return self._assign(statement.target, statement.value, statement.annotation)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
            return self._setitem(statement.targets[0], statement.value)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            return None  # "t = None": the value is dropped
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            return self._assign(statement.targets[0], statement.value, None)
        if isinstance(statement, (ast.Expr, ast.Pass)):
            return None  # a docstring
        raise DumpError(f"unexpected {type(statement).__name__} in the listing", statement.lineno)

    def _line(self, node: ast.AST) -> int:
        return getattr(node, "lineno", 1) + self._start - 1

    def _output(self, statement: ast.Return) -> None:
        found = (
            python_text.value(statement.value, self._names) if statement.value is not None else None
        )
        edges: list[Edge | None] = list(python_text.edges_in(found))
        self._add(
            Operator("output", "output", edges, line=self._line(statement), call=((found,), {})),
            None,
        )

    def _assign(self, target: ast.expr, expression: ast.expr, annotation: ast.expr | None) -> None:
        if not isinstance(target, ast.Name):
            raise DumpError("a result that is no name", target.lineno)
        kind, arguments, options = self._call(expression)
        edges: list[Edge | None] = list(python_text.edges_in([arguments, options]))
        attributes = _literals(arguments, options)
        line = self._line(target)
        operator = Operator(
            target.id, kind, edges, [], attributes, line=line, call=(arguments, options)
        )
        operator.source = self._source
        self._add(operator, annotation)

    def _setitem(self, target: ast.Subscript, expression: ast.expr) -> None:
        """``cache[slots] = rows``, as dynamo's graphs write it; the line after it names the
        result.
        """
        parts = (target.value, target.slice, expression)
        arguments = tuple(python_text.value(part, self._names) for part in parts)
        edges: list[Edge | None] = list(python_text.edges_in(list(arguments)))
        name = f"setitem at line {self._line(target)}"
        self._add(
            Operator(name, "setitem", edges, line=self._line(target), call=(arguments, {})), None
        )

    def _call(self, node: ast.expr) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        value: Callable[[ast.AST], Any] = lambda item: python_text.value(item, self._names)  # noqa: E731
        if isinstance(node, ast.Call):
            name = python_text.dotted(node.func)
            if not name:
                raise DumpError("a call without a name", node.lineno)
            options = {item.arg: value(item.value) for item in node.keywords if item.arg}
            arguments = tuple(value(item) for item in node.args)
            owner, _, method = name.rpartition(".")
            if owner in self._names:
                return f"{METHOD}{method}", (self._names[owner], *arguments), options
            return name.removeprefix("torch.ops."), arguments, options
        if isinstance(node, ast.Subscript):
            return "getitem", (value(node.value), value(node.slice)), {}
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)], (value(node.left), value(node.right)), {}
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
            return _BINARY[type(node.ops[0])], (value(node.left), value(node.comparators[0])), {}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return "neg", (value(node.operand),), {}
        name = python_text.dotted(node)
        if name.startswith("self."):
            return "get_attr", (name.removeprefix("self."),), {}
        if isinstance(node, ast.Name) and node.id in self._names:
            return "alias", (self._names[node.id],), {}
        raise DumpError(f"unexpected {type(node).__name__} in the listing", node.lineno)

    def _add(self, operator: Operator, annotation: ast.expr | None) -> None:
        if operator.name in self._names:
            raise DumpError(f"{operator.name!r} is defined twice", operator.line - self._start + 1)
        text = (
            annotation.value
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
            else ""
        )
        operator.outputs = [annotated(text)] if operator.type != "output" else []
        self._names[operator.name] = Edge(operator.name)
        self.operators.append(operator)


def _literals(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are data, by name or place."""
    placed = {str(place): item for place, item in enumerate(arguments)}
    named = {**placed, **options}
    return {name: item for name, item in named.items() if not python_text.edges_in(item)}


def annotated(text: str) -> Value:
    """The Value that an annotation describes; an empty one where it is not understood.

    A symbolic size has the dtype "Sym" and its expression as its only dimension.
    """
    symbol = _SYMBOL.match(text)
    if symbol is not None:
        return Value("Sym", (symbol["expr"],))
    found = _ANNOTATION.match(text)
    if found is None:
        return Value()
    stride = _dims(found["stride"]) if found["stride"] is not None else None
    dtype = dtypes.FX.get(found["dtype"], found["dtype"])
    return Value(dtype, _dims(found["shape"]), "", found["device"] or "", stride)


def _dims(text: str) -> tuple[Dim, ...]:
    """Sizes between commas that stand outside parentheses, as in ``Max(1, s0)``."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return tuple(dim(part.strip()) for part in parts if part.strip())


OPERATORS = {name: getattr(py, name) for name in _BINARY.values()} | {
    "neg": py.neg,
    "getitem": py.getitem,
}
