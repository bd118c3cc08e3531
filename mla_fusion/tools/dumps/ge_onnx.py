"""GE's own ``ge_onnx_*.pbtxt``: an ONNX ModelProto as protobuf text, its operators named
``ge:MatMulV2``.

What GE keeps in an operator's description becomes ONNX attributes: ``output_desc_shape:0`` and so
on. Bools are ints there; what has the default value of its field is left out. With DUMP_GE_GRAPH=1
strings and constants' data are included, otherwise not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mla_fusion.tools.dumps import prototext
from mla_fusion.tools.dumps.ge_text import described, edge, numbers, prefer_readable
from mla_fusion.tools.dumps.model import Attributes, DumpError, Operator, Value, operator_at
from mla_fusion.tools.dumps.prototext import Message, every, first

PREFIX = "ge:"
_SUBGRAPH = "subgraph"
_DESCRIPTION = re.compile(r"output_desc_(.+?):(\d+)$")
_DESCRIBED = ("dtype", "shape", "layout", "device_type")
_CONSTANT = (*(f"desc_{name}" for name in _DESCRIBED), "data")
# Bookkeeping that says nothing which the edges and descriptions do not.
_LEFT_OUT = frozenset(
    """
    id stream_id input_name src_name src_index dst_name dst_index input_i output_i workspace
    workspace_bytes is_input_const input_desc_nums output_desc_nums send_event_id_list
    recv_event_id_list
    """.split()
)
# The field of each type of attribute, and what it is where it is left out.
_FIELDS: dict[str, tuple[str, Any]] = {
    "FLOAT": ("f", 0.0), "INT": ("i", 0), "STRING": ("s", ""),
    "FLOATS": ("floats", None), "INTS": ("ints", None), "STRINGS": ("strings", None),
}  # fmt: skip


def read(lines: Iterable[str]) -> tuple[list[Operator], str]:
    """The operators of the graph, those of its subgraphs under the subgraph's name, and the graph's
    name.
    """
    operators: list[Operator] = []
    graph = ""
    for name, value, line in prototext.top_messages(lines, inside="graph"):
        if name == "node":
            operators += _node(value, line, "")
        elif name == "name":
            graph = str(value)
    return operators, graph


def _node(message: Any, line: int, under: str) -> Iterator[Operator]:
    if not isinstance(message, list):
        raise DumpError("a node that is no message", line)
    kind, name = first(message, "op_type"), first(message, "name")
    if not isinstance(kind, str) or not isinstance(name, str) or not name:
        raise DumpError("a node without a name or an op_type", line)
    if kind == _SUBGRAPH:
        for attribute in every(message, "attribute"):
            for field, inner, at in first(attribute, "g", []):
                if field == "node":
                    yield from _node(inner, at, f"{name}/")
    elif not kind.startswith(PREFIX):
        raise DumpError(f"an ONNX model, not a GE graph: op_type {kind!r}", line)
    else:
        with operator_at(line):
            operator = _operator(message, line, kind.removeprefix(PREFIX), under)
        yield operator


def _operator(message: Message, line: int, kind: str, under: str) -> Operator:
    outputs: dict[int, Attributes] = {}
    attributes: Attributes = {}
    for item in every(message, "attribute"):
        name = str(first(item, "name", ""))
        # inputs are what their producers' outputs are
        if name.startswith("input_desc_") or name in _LEFT_OUT:
            continue
        found = _DESCRIPTION.match(name)
        if found is None:
            attributes[name] = _value_of(item)
        elif found[1] in _DESCRIBED:
            outputs.setdefault(int(found[2]), {})[found[1]] = _value_of(item)
    if len(outputs) <= max(outputs, default=-1):
        raise ValueError("descriptions of outputs are missing")
    values = [_value(outputs[index], kind) for index in range(len(outputs))]
    names, places = attributes.pop("_input_name_key", []), attributes.pop("_input_name_value", [])
    if kind in ("Const", "Constant"):
        attributes["value"] = _constant(attributes)
        prefer_readable(attributes)
    edges = [edge(under + text if text else "") for text in map(str, every(message, "input"))]
    roles = _roles(names, places, len(edges))
    return Operator(
        under + str(first(message, "name")), kind, edges, values, attributes, roles, [], line
    )


def _value_of(attribute: Message) -> Any:
    """Protobuf leaves fields of default value out; ``type`` says which field it would be."""
    field, default = _FIELDS.get(str(first(attribute, "type", "")), ("", None))
    found = every(attribute, field)
    return found if default is None else next(iter(found), default)


def _value(description: Attributes, kind: str) -> Value:
    """An empty shape is left out, of a scalar as of what has none yet; an input has one."""
    dtype, sizes, layout, placement = map(description.get, _DESCRIBED)
    sizes = () if sizes is None and kind in ("Data", "RefData") else sizes
    return described(dtype or "", sizes, layout or "", placement or "")


def _constant(attributes: Attributes) -> Attributes:
    """Its Value, and its numbers where the dump was made with them."""
    dtype, sizes, *_, data = (attributes.pop(f"value_{name}", None) for name in _CONSTANT)
    value = described(dtype or "", sizes or ())
    return {"value": value, "numbers": numbers(value.dtype, data) if data else None}


def _roles(names: list[Any], places: list[Any], count: int) -> list[str]:
    """GE lists the names in alphabetical order, each with its place."""
    by_place = {int(place): str(name) for name, place in zip(names, places, strict=False)}
    return [by_place.get(place, f"input {place}") for place in range(count)] if by_place else []
