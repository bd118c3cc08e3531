"""Graphs for other viewers, by the file's suffix: .dot and .svg (Graphviz), .json (Model Explorer),
.pbtxt (Netron).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, DumpError, Operator, Value, dtypes, fx_text, prologues
from mla_fusion.tools.inspect.operator_kinds import ENDS, HELD


class ExportError(ValueError):
    """A suffix that no viewer reads, or a tool that is not installed."""


def export(graph: Dump | GraphModule, path: str | Path) -> Path:
    """Write a graph in the form that a viewer reads; returns the path.

    graph  a dump, or a graph of torch
    path   its suffix names the form
    """
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise ExportError(f"{path.name}: the suffix must be one of {', '.join(_WRITERS)}")
    dump = of_module(graph) if isinstance(graph, GraphModule) else graph
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _WRITERS[path.suffix](dump)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def of_module(gm: GraphModule) -> Dump:
    """A live FX graph in the form of a dump."""
    name = type(gm).__name__
    try:
        operators, _ = fx_text.read(gm.print_readable(print_output=False))
    except DumpError as error:
        raise ExportError(f"{name} prints no listing that can be read: {error.message}") from error
    return Dump(Path(name), "fx", operators, name).checked()


# -- Graphviz


def _dot(dump: Dump) -> str:
    lines = [
        "digraph dump {",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif", '
        "fontsize=10];",
        '  edge [fontname="sans-serif", fontsize=8, arrowsize=0.6];',
    ]
    lines += [
        f"  {_quoted(op.name)} [label={_quoted(_label(op))}{_style(op)}];" for op in dump.operators
    ]
    for operator in dump.operators:
        roles = operator.roles if len(operator.roles) > 1 else []  # one alone says nothing
        for place, edge in operator.reads:
            role = roles[place] if place < len(roles) else ""
            look = "style=dashed" if edge.index < 0 else f"label={_quoted(role)}"
            lines.append(f"  {_quoted(edge.producer)} -> {_quoted(operator.name)} [{look}];")
    return "\n".join([*lines, "}", ""])


def _label(operator: Operator) -> str:
    value = str(operator.output) if operator.output != Value() else ""
    return "\n".join(filter(None, (text_tables.short_name(operator.type), operator.name, value)))


def _style(operator: Operator) -> str:
    if prologues.is_prologue(operator.type):
        return ", fillcolor=lightgreen, penwidth=2"
    return ", fillcolor=lightgrey" if operator.type in HELD | ENDS else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _svg(dump: Dump) -> bytes:
    program = shutil.which("dot")
    if program is None:
        raise ExportError(
            "an .svg is drawn by Graphviz, whose program 'dot' is not installed; a "
            ".dot needs nothing"
        )
    return subprocess.run(
        [program, "-Tsvg"], input=_dot(dump).encode(), check=True, capture_output=True
    ).stdout


# -- Model Explorer


def _model_explorer(dump: Dump) -> str:
    nodes = [_node(operator) for operator in dump.operators]
    graph = {"id": dump.graph or dump.path.stem, "nodes": nodes}
    return json.dumps({"label": dump.path.name, "graphs": [graph]}, indent=1)


def _node(operator: Operator) -> dict[str, Any]:
    """Graph inputs and constants stand in groups of their own, so that a large model opens
    readably.
    """
    group = "inputs" if operator.type in HELD else "outputs" if operator.type in ENDS else ""
    attributes = operator.stated
    if operator.source:
        attributes["source"] = operator.source
    return {
        "id": operator.name,
        "label": text_tables.short_name(operator.type),
        "namespace": group,
        "attrs": [{"key": name, "value": str(value)} for name, value in attributes.items()],
        "incomingEdges": [
            {
                "sourceNodeId": edge.producer,
                "sourceNodeOutputId": str(max(edge.index, 0)),
                "targetNodeInputId": str(place),
            }
            for place, edge in operator.reads
        ],
        "inputsMetadata": [
            {"id": str(place), "attrs": [{"key": "__tensor_tag", "value": role}]}
            for place, role in enumerate(operator.roles)
        ],
        "outputsMetadata": [
            {"id": str(index), "attrs": [{"key": "shape", "value": str(value)}]}
            for index, value in enumerate(operator.outputs)
        ],
    }


# -- pbtxt


def _pbtxt(dump: Dump) -> str:
    return "".join(_pbtxt_node(operator) for operator in dump.operators)


def _pbtxt_node(operator: Operator) -> str:
    """As torchair's own: protobuf text of TensorFlow's GraphDef, every attribute a string."""
    lines = ["node {", f"    name: {_quoted(operator.name)}", f"    op: {_quoted(operator.type)}"]
    for edge in operator.inputs:
        text = (
            ""
            if edge is None
            else f"^{edge.producer}"
            if edge.index < 0
            else f"{edge.producer}:{edge.index}"
        )
        lines.append(f"    input: {_quoted(text)}")
    attributes = {name: _attribute_text(value) for name, value in operator.attributes.items()}
    attributes |= {"_input_name_key": _list_text(operator.roles)} if operator.roles else {}
    attributes |= {"_output_name_key": _list_text(operator.results)} if operator.results else {}
    names = operator.results or [f"y{index}" for index in range(len(operator.outputs))]
    for name, value in zip(names, operator.outputs, strict=False):
        attributes[f"[o]{name}"] = _value_text(name, value)
    for name, text in attributes.items():
        lines += ["    attr {", f"        key: {_quoted(name)}", "        value {"]
        lines += [f"            s: {_quoted(text)}", "        }", "    }"]
    return "\n".join([*lines, "}", ""])


def _attribute_text(value: Any) -> str:
    if isinstance(value, bool):
        return f"b: {str(value).lower()}\n"
    if isinstance(value, (int, float)):
        return f"{'i' if isinstance(value, int) else 'f'}: {value}\n"
    return f"s: {_quoted(str(value))}\n"


def _list_text(names: list[str]) -> str:
    return "list {\n" + "".join(f"  s: {_quoted(name)}\n" for name in names) + "}\n"


def _value_text(name: str, value: Value) -> str:
    text = f"name: {_quoted(name)}\n"
    if value.dtype:
        text += f"dtype: {dtypes.to_ge(value.dtype)}\n"
    if value.shape is not None:
        dims = [dim if isinstance(dim, int) else -1 for dim in value.shape]
        text += "shape {\n" + "".join(f"  dim: {dim}\n" for dim in dims) + "}\n"
    return text + f"layout: {_quoted(value.format or 'ND')}\n"


_WRITERS: dict[str, Callable[[Dump], str | bytes]] = {
    ".dot": _dot,
    ".svg": _svg,
    ".json": _model_explorer,
    ".pbtxt": _pbtxt,
}
