"""The Python that torchair generates beside a GE graph (``graph_dump.type = "py"``): one call per
operator.

torchair writes a line as it converts a node and never again, so this form shows the graph before
GE's passes: copies that the optimised graph has lost still stand in it. Shapes stand on Data alone.
Literals among the inputs are the constants that torchair makes of them, and become Const operators
here too.
"""

from __future__ import annotations

import ast
from typing import Any

from mla_fusion.tools.dumps import dtypes, python_text
from mla_fusion.tools.dumps.model import Attributes, DumpError, Edge, Operator, Value

_LIST_INPUTS = ("Pack", "ConcatV2", "NetOutput")  # whose literals in a list are inputs, each


def read(text: str) -> tuple[list[Operator], str]:
    """The operators in the order of the lines. The form does not name the graph."""
    reader = _Reader()
    for statement in python_text.parse(text).body:
        reader.take(statement)
    return reader.operators, ""


class _Reader(python_text.Reader):
    def __init__(self) -> None:
        super().__init__()
        self._taken = set[str]()

    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign(targets=[target], value=ast.Call() as call):
                elements = target.elts if isinstance(target, (ast.List, ast.Tuple)) else [target]
                names = python_text.names_in(elements)
                # of several results, what their names share
                operator = self._operator(call, names[0].rpartition("_")[0])
                for index, name in enumerate(names):
                    self.names[name] = Edge(operator.name, index)
                operator.outputs *= len(names)
            case _:
                raise DumpError("a line that calls no GE operator", statement.lineno)

    def _operator(self, call: ast.Call, name: str) -> Operator:
        module, _, kind = python_text.dotted(call.func).rpartition(".")
        if module != "ge":
            raise DumpError("a call of something else than ge", call.lineno)
        arguments, given = self.arguments(call)
        given.pop("node_name", None)
        order = python_text.edges_in(given.pop("dependencies", None))
        if kind == "Const":
            arguments, given = (), {"value": str(arguments), **given}
        inputs: list[Edge | None] = []
        for found in arguments:
            many = isinstance(found, list) and (
                kind in _LIST_INPUTS or bool(python_text.edges_in(found))
            )
            inputs += [self._edge(one, call.lineno) for one in (found if many else [found])]
        inputs += [given.pop(key) for key in [*given] if isinstance(given[key], Edge)]
        inputs += [Edge(edge.producer, -1) for edge in order]
        return self._add(name or kind, kind, inputs, given, call.lineno)

    def _add(
        self, name: str, kind: str, inputs: list[Edge | None], given: Attributes, line: int
    ) -> Operator:
        name = f"{name}:{len(self.operators)}" if name in self._taken else name
        self._taken.add(name)
        shape = given.get("shape") if kind == "Data" else None
        value = Value(
            dtypes.from_number(given.get("dtype")),
            tuple(map(int, shape)) if isinstance(shape, list) else None,
            placement=str(given.get("placement", "")),
        )
        self.operators.append(Operator(name, kind, inputs, [value], given, line=line))
        return self.operators[-1]

    def constructed(self, node: ast.Call) -> Any:
        if python_text.dotted(node.func) == "ge.Const":
            return Edge(self._operator(node, "").name)
        return super().constructed(node)

    def _edge(self, found: Any, line: int) -> Edge | None:
        """Of a literal, that of the constant that torchair makes of it."""
        if found is None or isinstance(found, Edge):
            return found
        return Edge(self._add("Const", "Const", [], {"value": str(found)}, line).name)
