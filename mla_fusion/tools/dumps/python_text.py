"""Reads Python text as data, and never runs it.

The text is an FX listing, or the code that torchair generates beside a GE graph
(``graph_dump.type = "py"``), with a call for each operator.

``GraphModule.print_readable`` writes an FX listing for torchair, Inductor and TORCH_LOGS: Python
with annotations such as ``"bf16[8, 1024][1024, 1]cpu"`` or ``"Sym(s0)"``. Strides and device are
optional. What TORCH_LOGS or a mail writes in front of every line is removed.
"""

from __future__ import annotations

import ast
import operator as py
import re
import warnings
from os.path import commonprefix
from typing import Any

from mla_fusion.compat import tree_leaves
from mla_fusion.tools.dumps.model import (
    FX_DTYPES,
    Arguments,
    DumpError,
    Edge,
    Operator,
    Value,
    dims,
    numbered_dtype,
)

_WORDS = ("inf", "nan", "Ellipsis")
METHOD = "Tensor."  # begins the type of a call of a tensor's method, before AOT autograd
COLOUR = re.compile(r"\x1b\[[\d;]*m")
CLASS = re.compile(r"class (?P<name>[\w<>.$-]+)\(torch\.nn\.Module\):")
_BEHIND = re.compile(r" {0,3}[^\s#)]")  # a line that is no part of a class
_ANNOTATION = re.compile(r"(\w+)\[([^\]]*)\](?:\[([^\]]*)\])?([a-z]\w*(?::\d+)?)?$")
_SYMBOL = re.compile(r"Sym\((.*)\)$")
# names of signs in the syntax tree, and in the module operator
_SIGNS = """
Add add, Sub sub, Mult mul, FloorDiv floordiv, Div truediv, Mod mod, Pow pow, BitAnd and_,
BitOr or_, Eq eq, NotEq ne, Lt lt, LtE le, Gt gt, GtE ge
"""
BINARY: dict[type[ast.AST], Any] = {
    vars(ast)[sign]: vars(py)[name] for sign, name in map(str.split, _SIGNS.split(","))
}
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # type, arguments by place and by name
_INPUT: Call = ("placeholder", (), {})


def parse(text: str) -> ast.Module:
    """Returns the syntax tree. Raises DumpError if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged literals may be legal and odd
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise DumpError(f"not a whole listing: {getattr(error, 'msg', error)}", line) from None


class Word(str):
    """A dotted name that is data, such as ``torch.float32``."""


def dotted(node: ast.AST) -> str:
    """Returns the name of a chain of attributes, ``torch.ops.aten.mm.default``; "" for others."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


class _Reader:
    """Reads literals and names, for both forms."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.names: dict[str, Edge] = {}

    def value(self, node: ast.AST | None) -> Any:
        """Returns a literal, an :class:`Edge` for a known name, a :class:`Word` for a dotted name.

        Lists, tuples and dicts hold such values.
        """
        match node:
            case ast.Constant(value=literal):
                return literal
            case ast.Name(id=name):
                if name not in self.names and name not in _WORDS:
                    raise DumpError(f"{name!r} is not defined", node.lineno)
                return self.names.get(name, Word(name))
            case ast.Attribute() if name := dotted(node):
                return Word(name)
            case ast.List(elts=items):
                return list(map(self.value, items))
            case ast.Tuple(elts=items):
                return tuple(map(self.value, items))
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
        """Returns what ``device('npu')``, ``tensor([1, 2])`` or ``slice(None, 3)`` stands for."""
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
        """Returns the arguments of a call, by place and by name."""
        options = {item.arg: self.value(item.value) for item in node.keywords if item.arg}
        return tuple(map(self.value, node.args)), options


def unexpected(node: ast.AST | None) -> DumpError:
    """Returns the error for a node that no listing has."""
    return DumpError(f"unexpected {type(node).__name__} in the listing", getattr(node, "lineno", 0))


def names_in(nodes: list[ast.expr]) -> list[str]:
    """Returns the names that results get. Raises DumpError for anything else."""
    if names := [node.id for node in nodes if isinstance(node, ast.Name)]:
        return names
    raise DumpError("results that are no names", nodes[0].lineno if nodes else 1)


def edges_in(argument: Any) -> list[Edge]:
    """Returns the values in an argument, in order."""
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Edge)]


def split(text: str) -> list[tuple[str, str]]:
    """Returns name and text of each graph in a file.

    The text is a class at column 0, on the same line as in the file.
    """
    lines, graphs, end = text.split("\n"), list[tuple[str, str]](), 0
    for number, line in enumerate(lines, 1):
        head = CLASS.search(line)
        if head is None or number <= end:
            continue
        # ``class <lambda>`` is no Python
        body = [*[""] * (number - 1), "class Graph:" + line[head.end() :]]
        next_line = "".join(lines[number : number + 1])
        prefix = commonprefix((line, next_line)).rstrip()  # noqa: RUF071  # of characters
        for below in lines[number:]:
            code = below.removeprefix(prefix)
            code = code.removeprefix(" ") if prefix else code
            if not below.startswith(prefix) or _BEHIND.match(code):
                break
            body.append(code)
        end = len(body)
        graphs.append((head["name"], "\n".join(body)))
    return graphs


def read_fx(text: str) -> list[Operator]:
    """Returns the nodes in order: placeholders, attributes, calls, then one of type "output"."""
    tree, reader = parse(text), _FxReader(text)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    forward = next((function for function in functions if function.name == "forward"), None)
    if forward is None:
        raise DumpError("the listing has no forward", tree.body[0].lineno)
    for argument in forward.args.args[1:]:
        reader.add(argument, argument.arg, _INPUT, argument.annotation)
    for statement in forward.body:
        reader.take(statement)
    if not reader.operators or reader.operators[-1].type != "output":
        raise DumpError("the listing ends without a return: truncated", text.count("\n") + 1)
    return reader.operators


class _FxReader(_Reader):
    """Reads the statements of ``forward``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._sources = [""]  # by line: what the last comment above it says
        for line in text.split("\n"):
            where, _, code = line.partition("# File: ")[2].partition(", code: ")
            self._sources.append(f"{where}: {code}" if " in " in where else self._sources[-1])
        self._annotations: dict[str, ast.expr] = {}

    def take(self, statement: ast.stmt) -> None:
        """Adds the operators of a statement. Raises DumpError for one that no listing has."""
        match statement:
            case ast.Return(value=ast.Call(args=[results, *_])) | ast.Return(value=results):
                # the call is pytree.tree_unflatten(results, ..)
                self.add(statement, "output", ("output", (self.value(results),), {}))
            case ast.AnnAssign(target=ast.Name(id=name), value=None, annotation=annotation):
                self._annotations[name] = annotation
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call()):
                # in a joint graph the arguments of forward are lists of inputs, which
                # fx_pytree.tree_flatten_spec names
                self.operators.clear()
                for name in names_in(targets):
                    self.add(statement, name, _INPUT, self._annotations.get(name))
            case ast.Assign(targets=[ast.Subscript(value=whole, slice=place), *_], value=rows):
                # ``cache[slots] = rows``, as dynamo's graphs write it; the next line names it
                call: Call = "setitem", tuple(map(self.value, (whole, place, rows))), {}
                self.add(statement, f"setitem at line {statement.lineno}", call)
            case ast.Assign(value=ast.Constant()) | ast.Expr() | ast.Pass():
                pass  # "t = None": the value is dropped; a docstring
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.add(statement, name, self._call(value), statement.annotation)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.add(statement, name, self._call(value))
            case _:
                raise unexpected(statement)

    def _call(self, node: ast.expr) -> Call:
        """Returns what an expression calls, and with which arguments."""
        match node:
            case ast.Call(func=function):
                name, (arguments, options) = dotted(function), self.arguments(node)
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
        path = dotted(node)
        if not path.startswith("self."):
            raise unexpected(node)
        return "get_attr", (path.removeprefix("self."),), {}

    def add(
        self,
        node: ast.stmt | ast.arg,
        name: str,
        call: Call,
        annotation: ast.expr | None = None,
    ) -> None:
        """Adds the operator that makes a value. Raises DumpError for a name that is taken."""
        if name in self.names:
            raise DumpError(f"{name!r} is defined twice", node.lineno)
        kind, arguments, options = call
        named = [*enumerate(arguments), *options.items()]
        operator = Operator(
            name,
            kind,
            list(edges_in([arguments, options])),
            attributes={str(key): item for key, item in named if not edges_in(item)},
            line=node.lineno,
            call=(arguments, options),
        )
        if kind != "output":
            text = annotation.value if isinstance(annotation, ast.Constant) else ""
            operator.outputs.append(annotated(str(text)))
            operator.source = self._sources[node.lineno]
        self.operators.append(operator)
        self.names[name] = Edge(name)


def annotated(text: str) -> Value:
    """Returns the Value that an annotation describes; an empty one for any other text.

    A symbolic size has the dtype "Sym", and its expression is its only dimension.
    """
    if symbol := _SYMBOL.match(text):
        return Value("Sym", (symbol[1],))
    tensor = _ANNOTATION.match(text)
    if tensor is None:
        return Value()
    dtype, shape, stride, device = tensor.groups()
    strides = None if stride is None else dims(stride)
    return Value(FX_DTYPES.get(dtype, dtype), dims(shape), "", device or "", strides)


def read_ge(text: str) -> list[Operator]:
    """Returns the operators in the order of the lines.

    torchair writes a line when it converts a node, and never again. So the graph is the one before
    GE's passes, with copies that the optimised graph has lost. Only Data has a shape. Constants
    are arguments of calls, and become attributes.
    """
    reader = _GeReader()
    for statement in parse(text).body:
        reader.take(statement)
    return reader.operators


class _GeReader(_Reader):
    """Reads the lines of generated Python."""

    def take(self, statement: ast.stmt) -> None:
        """Adds the operator of a line. Raises DumpError for any other line."""
        match statement:
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign(targets=[target], value=ast.Call() as call):
                results = target.elts if isinstance(target, (ast.List, ast.Tuple)) else [target]
                self._add(call, names_in(results))
            case _:
                raise DumpError("a line that calls no GE operator", statement.lineno)

    def _add(self, call: ast.Call, results: list[str]) -> None:
        """Adds an operator. Its name is what the names of its results share."""
        module, _, kind = dotted(call.func).rpartition(".")
        if module != "ge":
            raise DumpError("a call of something else than ge", call.lineno)
        arguments, options = self.arguments(call)
        options.pop("node_name", None)
        order = edges_in(options.pop("dependencies", None))
        inputs: list[Edge | None] = []
        for place, argument in enumerate(arguments):
            edges = edges_in(argument)
            inputs += edges or [None]
            if not edges and argument is not None:
                options[str(place)] = argument
        inputs += [options.pop(key) for key in [*options] if isinstance(options[key], Edge)]
        inputs += [Edge(edge.producer, -1) for edge in order]
        shape = options.get("shape") if kind == "Data" else None
        value = Value(
            numbered_dtype(options.get("dtype")),
            tuple(map(int, shape)) if isinstance(shape, list) else None,
            placement=str(options.get("placement", "")),
        )
        name = results[0].rpartition("_")[0] or f"{kind} at line {call.lineno}"
        outputs = [value] * len(results)
        self.operators.append(Operator(name, kind, inputs, outputs, options, line=call.lineno))
        self.names |= {result: Edge(name, index) for index, result in enumerate(results)}
