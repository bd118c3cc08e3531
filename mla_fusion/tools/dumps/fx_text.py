"""FX listings: ``GraphModule.print_readable`` as torchair, Inductor and TORCH_LOGS write it.

The text is Python with annotations such as ``"bf16[8, 1024][1024, 1]cpu"`` or ``"Sym(s0)"``;
strides and device stand there only where the writer asked for them. Log prefixes before the class
are skipped.
"""

from __future__ import annotations

import ast
import operator as py
import re
from typing import Any

from mla_fusion.tools.dumps import dtypes, python_text
from mla_fusion.tools.dumps.model import DumpError, Edge, Operator, Value, dims
from mla_fusion.tools.dumps.python_text import edges_in

# of the type of a call of a tensor's method; only graphs before AOT autograd have those
METHOD = "Tensor."
CLASS = re.compile(r"class (?P<name>[\w<>.$-]+)\(torch\.nn\.Module\):")
_ANNOTATION = re.compile(
    r"^(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\[(?P<stride>[^\]]*)\])?(?P<device>[a-z]\w*(?::\d+)?)?$"
)
_SYMBOL = re.compile(r"^Sym\((?P<expr>.*)\)$")
# signs by their names in the syntax tree, and what the module operator calls them
_SIGNS = """
Add add, Sub sub, Mult mul, FloorDiv floordiv, Div truediv, Mod mod, Pow pow, BitAnd and_,
BitOr or_, Eq eq, NotEq ne, Lt lt, LtE le, Gt gt, GtE ge
"""
BINARY: dict[type[ast.AST], Any] = {
    vars(ast)[sign]: vars(py)[name] for sign, name in map(str.split, _SIGNS.split(","))
}
OPERATORS: dict[str, Any] = {one.__name__: one for one in (*BINARY.values(), py.neg, py.getitem)}
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # type, arguments by place and by name


def read(text: str) -> tuple[list[Operator], str]:
    """The nodes in order: placeholders, attributes, calls, then one of type "output"."""
    name, body = _listing(text)
    function = _forward(python_text.parse(body))
    reader = _Reader(body, _source)
    reader.placeholders(function)
    for statement in function.body:
        reader.take(statement)
    if not reader.operators or reader.operators[-1].type != "output":
        end = body.count("\n") + 1
        raise DumpError("the listing ends without a return: truncated", end, len(text))
    return reader.operators, name


def _listing(text: str) -> tuple[str, str]:
    """(class name, text) of the first class at its place in the file, its indentation and what
    stands around it removed.
    """
    found = CLASS.search(text)
    if found is None:
        raise DumpError("no class of an FX graph", 1)
    lines = text[found.end() :].split("\n")
    # ``class <lambda>`` is no Python; the class may also stand behind a log prefix, its body then
    # deeper or not.
    body = ["class Graph:" + lines[0], *lines[1:]]
    end = next(
        (i for i, line in enumerate(body) if i and line[:1] not in ("", " ", "\t", "#", ")", "\r")),
        len(body),
    )
    above = [""] * text.count("\n", 0, found.start())
    return found["name"], "\n".join(above + body[:end])


def _forward(module: ast.Module) -> ast.FunctionDef:
    for top in module.body:
        for item in top.body if isinstance(top, ast.ClassDef) else ():
            if isinstance(item, ast.FunctionDef) and item.name == "forward":
                return item
    raise DumpError("the listing has no forward", module.body[0].lineno)


def _source(line: str) -> str:
    where, _, code = line.partition("# File: ")[2].partition(", code: ")
    return f"{where}: {code}" if " in " in where else ""


class _Reader(python_text.Reader):
    def placeholders(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        if not given or given[0].arg != "self" or arguments.vararg or arguments.kwarg:
            raise DumpError("forward takes no self, or arguments without names", function.lineno)
        for item in given[1:]:
            self._add(item, item.arg, ("placeholder", (), {}), item.annotation)

    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Return(value=found):
                self._add(statement, "output", ("output", (self.value(found),), {}))
            case ast.Assign(targets=[ast.Subscript(value=whole, slice=place), *_], value=rows):
                # ``cache[slots] = rows``, as dynamo's graphs write it; the next line names it
                call: Call = "setitem", tuple(map(self.value, (whole, place, rows))), {}
                self._add(statement, f"setitem at line {statement.lineno}", call)
            case ast.Assign(value=ast.Constant()) | ast.Expr() | ast.Pass():
                pass  # "t = None": the value is dropped; a docstring
            case (
                ast.AnnAssign(target=target, value=ast.expr() as made)
                | ast.Assign(targets=[target], value=made)
            ):
                if not isinstance(target, ast.Name):
                    raise DumpError("a result that is no name", statement.lineno)
                annotation = getattr(statement, "annotation", None)
                self._add(statement, target.id, self._call(made), annotation)
            case _:
                raise python_text.unexpected(statement)

    def _call(self, node: ast.expr) -> Call:
        match node:
            case ast.Call(func=function):
                name, (arguments, options) = python_text.dotted(function), self.arguments(node)
                if not name:
                    raise DumpError("a call without a name", node.lineno)
                owner, _, method = name.rpartition(".")
                if owner in self.names:
                    return f"{METHOD}{method}", (self.names[owner], *arguments), options
                return name.removeprefix("torch.ops."), arguments, options
            case ast.Subscript(value=whole, slice=place):
                return "getitem", (self.value(whole), self.value(place)), {}
            case (
                ast.BinOp(left=left, op=op, right=right)
                | ast.Compare(left=left, ops=[op], comparators=[right])
            ) if type(op) in BINARY:
                return BINARY[type(op)].__name__, (self.value(left), self.value(right)), {}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return "neg", (self.value(operand),), {}
            case ast.Name(id=name) if name in self.names:
                return "alias", (self.names[name],), {}
        path = python_text.dotted(node)
        if not path.startswith("self."):
            raise python_text.unexpected(node)
        return "get_attr", (path.removeprefix("self."),), {}

    def _add(
        self,
        node: ast.stmt | ast.arg,
        name: str,
        call: Call,
        annotation: ast.expr | None = None,
    ) -> None:
        if name in self.names:
            raise DumpError(f"{name!r} is defined twice", node.lineno)
        kind, arguments, options = call
        given = {**{str(place): item for place, item in enumerate(arguments)}, **options}
        text = annotation.value if isinstance(annotation, ast.Constant) else ""
        self.operators.append(
            Operator(
                name,
                kind,
                list(edges_in([arguments, options])),
                [annotated(text if isinstance(text, str) else "")] if kind != "output" else [],
                {key: item for key, item in given.items() if not edges_in(item)},  # are data
                line=node.lineno,
                call=(arguments, options),
                source=self.source(node) if kind != "output" else "",
            )
        )
        self.names[name] = Edge(name)


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
    stride = dims(found["stride"]) if found["stride"] is not None else None
    dtype = dtypes.FX.get(found["dtype"], found["dtype"])
    return Value(dtype, dims(found["shape"]), "", found["device"] or "", stride)
