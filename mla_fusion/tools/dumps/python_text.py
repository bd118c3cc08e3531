"""Python text as data, parsed and never run: FX listings, and the code that torchair generates
beside a GE graph (``graph_dump.type = "py"``), one call per operator.

An FX listing is what ``GraphModule.print_readable`` writes for torchair, Inductor and TORCH_LOGS:
Python with annotations such as ``"bf16[8, 1024][1024, 1]cpu"`` or ``"Sym(s0)"``; strides and device
stand there only where the writer asked for them. What TORCH_LOGS or a mail writes in front of every
line of a listing is taken off.
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


class _Reader:
    """What the readers of both forms do: literals and names."""

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


def split(text: str) -> list[tuple[str, str]]:
    """Name and text of each graph in a file: a class at column 0, at its place in the file."""
    lines, graphs, end = text.split("\n"), list[tuple[str, str]](), 0
    for number, line in enumerate(lines, 1):
        head = CLASS.search(line)
        if head is None or number <= end:
            continue
        # ``class <lambda>`` is no Python
        body = [*[""] * (number - 1), "class Graph:" + line[head.end() :]]
        below = "".join(lines[number : number + 1])
        prefix = commonprefix((line, below)).rstrip()  # noqa: RUF071  # of characters
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
    """The nodes in order: placeholders, attributes, calls, then one of type "output"."""
    tree, reader = parse(text), _FxReader(text)
    members = (member for part in tree.body for member in getattr(part, "body", ()))
    functions = (member for member in members if isinstance(member, ast.FunctionDef))
    forward = next((function for function in functions if function.name == "forward"), None)
    if forward is None:
        raise DumpError("the listing has no forward", tree.body[0].lineno)
    for argument in forward.args.args[1:]:
        reader.add(argument, argument.arg, ("placeholder", (), {}), argument.annotation)
    for statement in forward.body:
        reader.take(statement)
    if not reader.operators or reader.operators[-1].type != "output":
        raise DumpError("the listing ends without a return: truncated", text.count("\n") + 1)
    return reader.operators


class _FxReader(_Reader):
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
                for name in names_in(named):
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
                raise unexpected(statement)

    def _call(self, node: ast.expr) -> Call:
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
        if name in self.names:
            raise DumpError(f"{name!r} is defined twice", node.lineno)
        kind, arguments, options = call
        named = [*enumerate(arguments), *options.items()]
        text = annotation.value if isinstance(annotation, ast.Constant) else ""
        self.operators.append(
            Operator(
                name,
                kind,
                list(edges_in([arguments, options])),
                [annotated(str(text))] if kind != "output" else [],
                {str(key): item for key, item in named if not edges_in(item)},  # are data
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


def read_ge(text: str) -> tuple[list[Operator], str]:
    """The operators in the order of the lines. The form does not name the graph.

    torchair writes a line as it converts a node and never again, so this form shows the graph
    before GE's passes: copies that the optimised graph has lost still stand in it. Shapes stand on
    Data alone. Constants stand in the calls, and are attributes here.
    """
    reader = _GeReader()
    for statement in parse(text).body:
        reader.take(statement)
    return reader.operators, ""


class _GeReader(_Reader):
    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign(targets=[target], value=ast.Call() as call):
                results = target.elts if isinstance(target, (ast.List, ast.Tuple)) else [target]
                self._add(call, names_in(results))
            case _:
                raise DumpError("a line that calls no GE operator", statement.lineno)

    def _add(self, call: ast.Call, results: list[str]) -> None:
        """The name of the operator is what the names of its results share."""
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
