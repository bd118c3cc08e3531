"""The Python that torchair generates beside a GE graph (``graph_dump.type = "py"``): one call per
operator.

torchair writes a line as it converts a node and never again, so this form shows the graph before
GE's passes: copies that the optimised graph has lost still stand in it. Shapes stand on Data alone.
Literals among the inputs are the constants that torchair makes of them, and become Const operators
here too.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from mla_fusion.tools.dumps import dtypes, ge_text, python_text
from mla_fusion.tools.dumps.model import Attributes, DumpError, Edge, Operator, Shape, Value, dims

_FRAME = re.compile(r'# File "([^"]+)", line (\d+), in (\S+)\s+(.*?)[\^ \t\r]*$')
_ANNOTATED = re.compile(r"\b(\w+): torch\.\w+\[([^\]\n]{0,1000})\]")
_LIST_INPUTS = frozenset(
    "Pack ConcatV2 ConcatD NetOutput IndexByTensor AddN IdentityN Stack".split()
)


def read(text: str) -> tuple[list[Operator], str]:
    """The operators in the order of the lines. The form does not name the graph."""
    reader = _Reader(text)
    for statement in python_text.parse(text).body:
        reader.take(statement)
    return reader.operators, ""


def _source(line: str) -> str:
    """Of a comment that names the model's code, ``file:line in function: code``."""
    frame = _FRAME.match(line)
    return frame.expand(r"\1:\2 in \3: \4") if frame is not None else ""


class _Reader(python_text.Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text, _source)
        # torch's shapes of the values that the comments name, symbols among them
        found = [(name, dims(sizes)) for name, sizes in _ANNOTATED.findall(text)]
        self._shapes = dict(reversed(found))
        self._taken: dict[str, int] = {}  # how many operators asked for the name

    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign(targets=[target], value=ast.Call() as call):
                names = _names(target)
                operator = self._operator(call, names)
                for index, name in enumerate(names):
                    self.names[name] = Edge(operator.name, index)
            case _:
                raise DumpError("a line that calls no GE operator", statement.lineno)

    def _operator(self, call: ast.Call, targets: list[str]) -> Operator:
        owner, _, kind = python_text.dotted(call.func).rpartition(".")
        if owner != "ge" or not kind:
            raise DumpError("a call of something else than a GE operator", call.lineno)
        arguments, given = self.arguments(call)
        stated = given.pop("node_name", None)
        if kind == "Const":
            return self._const(next(iter(arguments), None), given.get("dtype"), call, stated)
        inputs: list[Edge | None] = []
        for found in arguments:
            many = isinstance(found, (list, tuple)) and (
                kind in _LIST_INPUTS or any(isinstance(one, Edge) for one in found)
            )
            inputs += [self._edge(one, call) for one in (found if many else [found])]
        edges = [name for name, found in given.items() if isinstance(found, Edge)]
        inputs += [given.pop(name) for name in edges]
        order = given.pop("dependencies", None)
        inputs += [Edge(edge.producer, -1) for edge in python_text.edges_in(order)]
        name = self._name(stated, targets, kind)
        outputs = [self._data(name, given)] if kind == "Data" else [Value() for _ in targets]
        if kind == "NetOutput":
            outputs = []
        return self._add(call, Operator(name, kind, inputs, outputs, given))

    def _add(self, node: ast.expr, operator: Operator) -> Operator:
        operator.line, operator.source = node.lineno, self.source(node)
        self.operators.append(operator)
        return operator

    def _data(self, name: str, given: Attributes) -> Value:
        shape = given.get("shape")
        sizes: Shape | None = None
        if isinstance(shape, list):
            sizes = tuple(dim for dim in shape if isinstance(dim, int))
        if name in self._shapes:
            sizes = ge_text.agreed(sizes, self._shapes[name])
        dtype = dtypes.from_number(given.get("dtype"))
        return Value(dtype, sizes, str(given.get("format", "ND")), str(given.get("placement", "")))

    def constructed(self, node: ast.Call) -> Any:
        if python_text.dotted(node.func) == "ge.Const":
            return Edge(self._operator(node, []).name)
        return super().constructed(node)

    def _edge(self, found: Any, node: ast.expr) -> Edge | None:
        if found is None or isinstance(found, Edge):
            return found
        return Edge(self._const(found, None, node).name)

    def _const(self, content: Any, number: Any, node: ast.expr, stated: Any = None) -> Operator:
        numbers, shape = _flat(content)
        dtype = dtypes.from_number(number) if isinstance(number, int) else _dtype_of(numbers)
        value = Value(dtype, shape, "ND")
        attributes = {"value": {"value": value, "numbers": numbers}}
        name = self._name(stated, [], "Const")
        return self._add(node, Operator(name, "Const", [], [value], attributes))

    def _name(self, stated: Any, targets: list[str], kind: str) -> str:
        """The operator's own name; of several results, what their names share."""
        name = stated if isinstance(stated, str) and stated else ""
        if not name and targets and targets[0] != "_":
            name = targets[0].rpartition("_")[0] or targets[0]
        name = base = name or kind
        while name in self._taken:
            name = f"{base}_{self._taken[base]}"
            self._taken[base] += 1
        self._taken[name] = 1
        return name


def _names(target: ast.expr) -> list[str]:
    elements = target.elts if isinstance(target, (ast.List, ast.Tuple)) else [target]
    names = [item.id for item in elements if isinstance(item, ast.Name)]
    if len(names) != len(elements) or not names:
        raise DumpError("results that are no names", target.lineno)
    return names


def _flat(content: Any) -> tuple[list[Any] | None, tuple[int, ...]]:
    """Numbers and shape of a nested list."""
    if isinstance(content, bool | int | float):
        return [content], ()
    if not isinstance(content, (list, tuple)):
        return None, ()
    parts = [_flat(item) for item in content]
    inner = parts[0][1] if parts else ()
    numbers = [number for values, _ in parts for number in values or []]
    return numbers, (len(parts), *inner)


def _dtype_of(numbers: list[Any] | None) -> str:
    if not numbers or any(isinstance(number, float) for number in numbers):
        return "float32"
    return "bool" if all(isinstance(number, bool) for number in numbers) else "int64"
