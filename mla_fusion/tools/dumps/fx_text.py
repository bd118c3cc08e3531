"""FX listings: ``GraphModule.print_readable`` as torchair, Inductor and TORCH_LOGS write it.

The text is Python with annotations such as ``"bf16[8, 1024][1024, 1]cpu"`` or ``"Sym(s0)"``;
strides and device stand there only where the writer asked for them. What TORCH_LOGS or a mail
writes in front of every line of a listing is taken off.
"""

from __future__ import annotations

import ast
import operator as py
import re
from os.path import commonprefix
from typing import Any

from mla_fusion.tools.dumps import python_text
from mla_fusion.tools.dumps.model import FX_DTYPES, DumpError, Edge, Operator, Value, dims
from mla_fusion.tools.dumps.python_text import edges_in

# of the type of a call of a tensor's method; only graphs before AOT autograd have those
METHOD = "Tensor."
COLOUR = re.compile(r"\x1b\[[\d;]*m")
CLASS = re.compile(r"class (?P<name>[\w<>.$-]+)\(torch\.nn\.Module\):")
_BEHIND = re.compile(r" {0,3}[^\s#)]")  # a line that is no part of a class
_ANNOTATION = re.compile(r"(\w+)\[([^\]]*)\](?:\[([^\]]*)\])?([a-z]\w*(?::\d+)?)?$")
_SYMBOL = re.compile(r"Sym\((.*)\)$")
# signs by their names in the syntax tree, and what the module operator calls them
_SIGNS = """
Add add, Sub sub, Mult mul, FloorDiv floordiv, Div truediv, Mod mod, Pow pow, BitAnd and_,
BitOr or_, Eq eq, NotEq ne, Lt lt, LtE le, Gt gt, GtE ge
"""
BINARY: dict[type[ast.AST], Any] = {
    vars(ast)[sign]: vars(py)[name] for sign, name in map(str.split, _SIGNS.split(","))
}
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # type, arguments by place and by name


def split(text: str) -> list[tuple[str, str]]:
    """Name and text of each graph in a file: a class at column 0, at its place in the file."""
    lines, found, place = text.split("\n"), list[tuple[str, str]](), 0
    while place < len(lines):
        head = CLASS.search(lines[place])
        place += 1
        if head is None:
            continue
        # ``class <lambda>`` is no Python
        body = [*[""] * (place - 1), "class Graph:" + head.string[head.end() :]]
        below = "".join(lines[place : place + 1])
        shared = commonprefix((head.string, below)).rstrip()  # noqa: RUF071  # of characters
        while place < len(lines) and lines[place].startswith(shared):
            line = lines[place].removeprefix(shared)
            line = line.removeprefix(" ") if shared else line
            if _BEHIND.match(line):
                break
            body.append(line)
            place += 1
        found.append((head["name"], "\n".join(body)))
    return found


def read(text: str) -> list[Operator]:
    """The nodes in order: placeholders, attributes, calls, then one of type "output"."""
    function = _forward(python_text.parse(text))
    reader = _Reader(text)
    for item in function.args.args[1:]:
        reader.add(item, item.arg, ("placeholder", (), {}), item.annotation)
    for statement in function.body:
        reader.take(statement)
    if not reader.operators or reader.operators[-1].type != "output":
        raise DumpError("the listing ends without a return: truncated", text.count("\n") + 1)
    return reader.operators


def _forward(module: ast.Module) -> ast.FunctionDef:
    match module.body:
        case [ast.ClassDef(body=items)]:
            for item in items:
                if isinstance(item, ast.FunctionDef) and item.name == "forward":
                    return item
    raise DumpError("the listing has no forward", module.body[0].lineno)


class _Reader(python_text.Reader):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._sources = [""]  # by line: what the last comment above it says
        for line in text.split("\n"):
            where, _, code = line.partition("# File: ")[2].partition(", code: ")
            self._sources.append(f"{where}: {code}" if " in " in where else self._sources[-1])
        self._annotations: dict[str, ast.expr] = {}

    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Return(value=ast.Call(args=[found, *_])) | ast.Return(value=found):
                # the call is pytree.tree_unflatten(results, ..)
                self.add(statement, "output", ("output", (self.value(found),), {}))
            case ast.AnnAssign(target=ast.Name(id=name), value=None, annotation=found):
                self._annotations[name] = found
            case ast.Assign(targets=[ast.Tuple(elts=named)], value=ast.Call()):
                # a joint graph: the arguments of forward are lists of inputs, named here by
                # fx_pytree.tree_flatten_spec
                self.operators.clear()
                for name in python_text.names_in(named):
                    found = self._annotations.get(name)
                    self.add(statement, name, ("placeholder", (), {}), found)
            case ast.Assign(targets=[ast.Subscript(value=whole, slice=place), *_], value=rows):
                # ``cache[slots] = rows``, as dynamo's graphs write it; the next line names it
                call: Call = "setitem", tuple(map(self.value, (whole, place, rows))), {}
                self.add(statement, f"setitem at line {statement.lineno}", call)
            case ast.Assign(value=ast.Constant()) | ast.Expr() | ast.Pass():
                pass  # "t = None": the value is dropped; a docstring
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as made)
                | ast.Assign(targets=[ast.Name(id=name)], value=made)
            ):
                annotation = getattr(statement, "annotation", None)
                self.add(statement, name, self._call(made), annotation)
            case _:
                raise python_text.unexpected(statement)

    def _call(self, node: ast.expr) -> Call:
        match node:
            case ast.Call(func=function):
                name, (arguments, options) = python_text.dotted(function), self.arguments(node)
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

    def add(
        self,
        node: ast.stmt | ast.arg,
        name: str,
        call: Call,
        annotation: ast.expr | None = None,
    ) -> None:
        if name in self.names:
            raise DumpError(f"{name!r} is defined twice", node.lineno)
        kind, arguments, options = call
        given = [*enumerate(arguments), *options.items()]
        text = annotation.value if isinstance(annotation, ast.Constant) else ""
        self.operators.append(
            Operator(
                name,
                kind,
                list(edges_in([arguments, options])),
                [annotated(str(text))] if kind != "output" else [],
                {str(key): item for key, item in given if not edges_in(item)},  # are data
                line=node.lineno,
                call=(arguments, options),
                source=self._sources[node.lineno] if kind != "output" else "",
            )
        )
        self.names[name] = Edge(name)


def annotated(text: str) -> Value:
    """The Value that an annotation describes; an empty one where it is not understood.

    A symbolic size has the dtype "Sym" and its expression as its only dimension.
    """
    symbol = _SYMBOL.match(text)
    if symbol is not None:
        return Value("Sym", (symbol[1],))
    found = _ANNOTATION.match(text)
    if found is None:
        return Value()
    dtype, shape, stride, device = found.groups()
    strides = None if stride is None else dims(stride)
    return Value(FX_DTYPES.get(dtype, dtype), dims(shape), "", device or "", strides)
