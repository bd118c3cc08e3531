"""The Python that torchair generates beside a GE graph (``graph_dump.type = "py"``): one call per
operator.

torchair writes a line as it converts a node and never again, so this form shows the graph before
GE's passes: copies that the optimised graph has lost still stand in it. Shapes stand on Data alone.
Literals among the inputs are the constants that torchair makes of them, and become Const operators
here too.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

from mla_fusion.tools.dumps import dtypes, python_text
from mla_fusion.tools.dumps.model import Attributes, DumpError, Edge, Operator, Value

_LIST_INPUTS = frozenset(
    "Pack ConcatV2 ConcatD NetOutput IndexByTensor AddN IdentityN Stack".split()
)


def read(text: str) -> tuple[list[Operator], str]:
    """The operators in the order of the lines. The form does not name the graph."""
    reader = _Reader()
    for statement in python_text.parse(text).body:
        reader.take(statement)
    return reader.operators, ""


class _Reader(python_text.Reader):
    def __init__(self) -> None:
        super().__init__()
        self._taken = Counter[str]()  # how many operators asked for a name

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
        module, _, kind = python_text.dotted(call.func).rpartition(".")
        if module != "ge" or not kind:
            raise DumpError("a call of something else than ge", call.lineno)
        arguments, given = self.arguments(call)
        stated = given.pop("node_name", None)
        if kind == "Const":
            return self._add(call, stated, [], kind, [], [Value()], {"value": str(arguments[:1])})
        inputs: list[Edge | None] = []
        for found in arguments:
            many = isinstance(found, (list, tuple)) and (
                kind in _LIST_INPUTS or any(isinstance(one, Edge) for one in found)
            )
            inputs += [self._edge(one, call) for one in (found if many else [found])]
        inputs += [given.pop(name) for name in [*given] if isinstance(given[name], Edge)]
        order = python_text.edges_in(given.pop("dependencies", None))
        inputs += [Edge(edge.producer, -1) for edge in order]
        outputs = [_data(given)] if kind == "Data" else [Value() for _ in targets]
        outputs = [] if kind == "NetOutput" else outputs
        return self._add(call, stated, targets, kind, inputs, outputs, given)

    def _add(
        self,
        node: ast.expr,
        stated: Any,
        targets: list[str],
        kind: str,
        inputs: list[Edge | None],
        outputs: list[Value],
        attributes: Attributes,
    ) -> Operator:
        """The operator; its name is the stated one; of several results, what their names share."""
        shared = targets[0].rpartition("_")[0] or targets[0] if targets else "_"
        base = stated if isinstance(stated, str) and stated else shared
        name = base = kind if base == "_" else base
        while name in self._taken:
            name = f"{base}_{self._taken[base]}"
            self._taken[base] += 1
        self._taken[name] += 1
        found = Operator(name, kind, inputs, outputs, attributes, line=node.lineno)
        self.operators.append(found)
        return found

    def constructed(self, node: ast.Call) -> Any:
        if python_text.dotted(node.func) == "ge.Const":
            return Edge(self._operator(node, []).name)
        return super().constructed(node)

    def _edge(self, found: Any, node: ast.expr) -> Edge | None:
        if found is None or isinstance(found, Edge):
            return found
        return Edge(self._add(node, "", [], "Const", [], [Value()], {"value": str(found)}).name)


def _data(given: Attributes) -> Value:
    shape, number = given.get("shape"), given.get("dtype")
    sizes = tuple(int(size) for size in shape) if isinstance(shape, list) else None
    placement = str(given.get("placement", ""))
    return Value(dtypes.from_number(number), sizes, str(given.get("format", "ND")), placement)


def _names(target: ast.expr) -> list[str]:
    elements = target.elts if isinstance(target, (ast.List, ast.Tuple)) else [target]
    names = [item.id for item in elements if isinstance(item, ast.Name)]
    if len(names) != len(elements) or not names:
        raise DumpError("results that are no names", target.lineno)
    return names
