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
from mla_fusion.tools.dumps.model import Dim, DumpError, Edge, Operator, Value

_FRAME = re.compile(
    r'# File "(?P<file>[^"]+)", line (?P<line>\d+), in '
    r"(?P<function>\S+)\s+(?P<code>.*)$"
)
_ANNOTATED = re.compile(r"\b(\w+): torch\.\w+\[([^\]\n]{0,1000})\]")
_LIST_INPUTS = {
    "Pack",
    "ConcatV2",
    "ConcatD",
    "NetOutput",
    "IndexByTensor",
    "AddN",
    "IdentityN",
    "Stack",
}


def read(text: str) -> tuple[list[Operator], str]:
    """The operators in the order of the lines. The form does not name the graph."""
    reader = _Reader(_sources(text), _shapes(text))
    for statement in python_text.parse(text).body:
        reader.take(statement)
    return reader.operators, ""


def _sources(text: str) -> list[tuple[int, str]]:
    """(line, "file:line in function: code") of each comment that names the model's code."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        frame = _FRAME.match(line) if line.startswith("# File") else None
        if frame is not None:
            code = frame["code"].rstrip().rstrip("^").rstrip()
            found.append(
                (number, f"{frame['file']}:{frame['line']} in {frame['function']}: {code}")
            )
    return found


def _shapes(text: str) -> dict[str, tuple[Dim, ...]]:
    """torch's shapes of the values that the comments name, symbols among them."""
    found: dict[str, tuple[Dim, ...]] = {}
    for name, dims in _ANNOTATED.findall(text):
        found.setdefault(name, ge_text.dims(dims))
    return found


class _Reader:
    def __init__(self, sources: list[tuple[int, str]], shapes: dict[str, tuple[Dim, ...]]) -> None:
        self._shapes = shapes
        self.operators: list[Operator] = []
        self._sources, self._source = sources, ""
        self._names: dict[str, Edge] = {}
        self._taken: dict[str, int] = {}  # how many operators asked for the name

    def take(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return
        good = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        if (
            not good
            or not isinstance(statement, ast.Assign)
            or not isinstance(statement.value, ast.Call)
        ):
            raise DumpError("a line that calls no GE operator", statement.lineno)
        while self._sources and self._sources[0][0] < statement.lineno:
            self._source = self._sources.pop(0)[1]
        targets = self._targets(statement.targets[0])
        operator = self._operator(statement.value, targets)
        for index, name in enumerate(targets):
            self._names[name] = Edge(operator.name, index)

    def _targets(self, node: ast.expr) -> list[str]:
        elements = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
        names = [item.id for item in elements if isinstance(item, ast.Name)]
        if len(names) != len(elements) or not names:
            raise DumpError("results that are no names", node.lineno)
        return names

    def _operator(self, call: ast.Call, targets: list[str]) -> Operator:
        owner, _, kind = python_text.dotted(call.func).rpartition(".")
        if owner != "ge" or not kind:
            raise DumpError("a call of something else than a GE operator", call.lineno)
        given = {item.arg: self._value(item.value) for item in call.keywords if item.arg}
        stated = given.pop("node_name", None)
        if kind == "Const":
            content = self._value(call.args[0]) if call.args else None
            return self._const(content, given.get("dtype"), call.lineno, stated)
        inputs: list[Edge | None] = []
        for item in call.args:
            found = self._value(item)
            many = isinstance(found, list) and (
                kind in _LIST_INPUTS or any(isinstance(one, Edge) for one in found)
            )
            for one in found if many else [found]:
                inputs.append(self._edge(one, call.lineno))
        for name in [name for name, found in given.items() if isinstance(found, Edge)]:
            inputs.append(self._edge(given.pop(name), call.lineno))
        order = given.pop("dependencies", None)
        inputs += [Edge(edge.producer, -1) for edge in python_text.edges_in(order)]
        name = self._name(stated, targets, kind)
        operator = Operator(
            name,
            kind,
            inputs,
            self._outputs(name, kind, given, len(targets)),
            given,
            line=call.lineno,
            source=self._source,
        )
        self.operators.append(operator)
        return operator

    def _outputs(self, name: str, kind: str, given: dict[str, Any], count: int) -> list[Value]:
        if kind != "Data":
            return [Value() for _ in range(count)] if kind != "NetOutput" else []
        shape, number = given.get("shape"), given.get("dtype")
        dims: tuple[Dim, ...] | None = None
        if isinstance(shape, list):
            dims = tuple(dim for dim in shape if isinstance(dim, int))
        if name in self._shapes:
            dims = ge_text.agreed(dims, self._shapes[name])
        dtype = dtypes.from_number(number) if isinstance(number, int) else ""
        return [Value(dtype, dims, str(given.get("format", "ND")), str(given.get("placement", "")))]

    def _value(self, node: ast.expr) -> Any:
        inner = python_text.dotted(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and inner == "ge.Const":
            return Edge(self._operator(node, []).name)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._value(item) for item in node.elts]
        return python_text.value(node, self._names)

    def _edge(self, found: Any, line: int) -> Edge | None:
        if found is None or isinstance(found, Edge):
            return found
        return Edge(self._const(found, None, line).name)

    def _const(self, content: Any, number: Any, line: int, stated: Any = None) -> Operator:
        numbers, shape = _flat(content)
        dtype = dtypes.from_number(number) if isinstance(number, int) else _dtype_of(numbers)
        value = Value(dtype, shape, "ND")
        attributes = {"value": {"value": value, "numbers": numbers}}
        name = self._name(stated, [], "Const")
        operator = Operator(name, "Const", [], [value], attributes, line=line, source=self._source)
        self.operators.append(operator)
        return operator

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
