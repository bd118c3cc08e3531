"""The Python that torchair generates beside a GE graph (``graph_dump.type = "py"``): one call per
operator.

torchair writes a line as it converts a node and never again, so this form shows the graph before
GE's passes: copies that the optimised graph has lost still stand in it. Shapes stand on Data alone.
Constants stand in the calls, and are attributes here.
"""

from __future__ import annotations

import ast

from mla_fusion.tools.dumps import python_text
from mla_fusion.tools.dumps.model import DumpError, Edge, Operator, Value, numbered_dtype


def read(text: str) -> tuple[list[Operator], str]:
    """The operators in the order of the lines. The form does not name the graph."""
    reader = _Reader()
    for statement in python_text.parse(text).body:
        reader.take(statement)
    return reader.operators, ""


class _Reader(python_text.Reader):
    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign(targets=[target], value=ast.Call() as call):
                elements = target.elts if isinstance(target, (ast.List, ast.Tuple)) else [target]
                names = python_text.names_in(elements)
                name = self._add(call, names[0].rpartition("_")[0], len(names))
                for index, result in enumerate(names):
                    self.names[result] = Edge(name, index)
            case _:
                raise DumpError("a line that calls no GE operator", statement.lineno)

    def _add(self, call: ast.Call, name: str, results: int) -> str:
        """The name of the operator: what the names of its results share."""
        module, _, kind = python_text.dotted(call.func).rpartition(".")
        if module != "ge":
            raise DumpError("a call of something else than ge", call.lineno)
        arguments, given = self.arguments(call)
        given.pop("node_name", None)
        order = python_text.edges_in(given.pop("dependencies", None))
        inputs: list[Edge | None] = []
        for place, found in enumerate(arguments):
            edges = python_text.edges_in(found)
            inputs += edges or [None]
            if not edges and found is not None:
                given[str(place)] = found
        inputs += [given.pop(key) for key in [*given] if isinstance(given[key], Edge)]
        inputs += [Edge(edge.producer, -1) for edge in order]
        shape = given.get("shape") if kind == "Data" else None
        value = Value(
            numbered_dtype(given.get("dtype")),
            tuple(map(int, shape)) if isinstance(shape, list) else None,
            placement=str(given.get("placement", "")),
        )
        name = name or f"{kind} at line {call.lineno}"
        line = call.lineno
        self.operators.append(Operator(name, kind, inputs, [value] * results, given, line=line))
        return name
