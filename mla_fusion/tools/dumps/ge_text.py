"""Reads GE graphs as torchair writes them: its onnx-like pbtxt, and the protobuf's own text.

In the pbtxt every attribute and tensor description is a string that holds protobuf text again.
Layers repeat those strings, so each is parsed once.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from mla_fusion.tools.dumps.model import (
    Attributes,
    DumpError,
    Edge,
    Operator,
    Shape,
    Value,
    dims,
    ge_dtype,
)

# Protobuf text without a schema: fields with their lines, in file order. A value is a number, a
# bool, a string, an enum's name, or a message.
Field = tuple[str, Any, int]
Message = list[Field]

_VALUE = r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([-+.\w]+))"""
# of a line: a field, "}" or nothing, and what may follow; matches everywhere, so in linear time
_PART = re.compile(rf"\s*(?:(\w+)\s*(?::\s*{_VALUE}|(?::\s*)?(\{{))|(\}}))?\s*[;,]?\s*(?:#.*\s*)?")
_DEPTH = 64
_META = re.compile(r"Tensor\(dtype=torch\.\w+, shape=torch\.Size\(\[([^\]]*)\]")
_GRAPH = "attr input output name".split()


def read(text: str) -> tuple[list[Operator], str]:
    """Returns the operators of a graph in either form, and the graph's name."""
    operators, graph = [], parse(text)
    for name, value, line in graph:
        if name in ("op", "node"):
            try:
                operators.append(_operator(name, value, line))
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                # the line of a DumpError is one inside a string of the operator
                reason = getattr(error, "message", error)
                raise DumpError(f"a damaged operator: {reason}", line) from None
        elif name not in _GRAPH:
            raise DumpError(f"not torchair's GE graph: unknown field {name!r}", line)
    return operators, str(first(graph, "name", ""))


def _operator(kind: str, message: Message, line: int) -> Operator:
    """Returns the operator that a message describes: an "op", or a "node" of the pbtxt."""
    name, type_ = first(message, "name"), first(message, "type" if kind == "op" else "op")
    if not isinstance(name, str) or not isinstance(type_, str) or not type_:
        raise DumpError("an operator without a name or a type", line)
    attributes: Attributes = {}
    inputs, outputs = every(message, "input_desc"), every(message, "output_desc")
    for item in every(message, "attr"):
        key, value = str(first(item, "key")), first(item, "value", [])
        if kind == "node":
            value = _parsed(first(value, "s", ""))
        if key.startswith(("[i]", "[o]")):
            (inputs if key[1] == "i" else outputs).append(value)
        else:
            attributes[key] = _attribute(value)
    names = attributes.get("_input_name_key")
    values = [_value(item) for item in outputs or (inputs[:1] if type_ == "Data" else ())]
    edges = [_edge(str(text)) for text in every(message, "input")]
    roles = names if isinstance(names, list) else [first(item, "name", "") for item in inputs]
    return Operator(name, type_, edges, values, attributes, [*map(str, roles)], line)


def _edge(text: str) -> Edge | None:
    """Reads ``name:index``; ``name:-1`` or ``^name`` is an order without data, "" no input."""
    if not text:
        return None
    if text.startswith("^"):
        return Edge(text[1:], -1)
    name, separator, index = text.rpartition(":")
    return Edge(name, int(index)) if separator else Edge(text)


def _attribute(message: Any) -> Any:
    """Returns the value of a GE ``AttrDef``: a scalar, a list, or a constant as text."""
    if not isinstance(message, list):
        return message
    if not message:
        return None
    kind, value, _ = message[0]
    if kind == "list":
        return [item for key, item, _ in value if key != "val_type"]
    if kind == "t":
        return f"{_value(first(value, 'desc', []))} {first(value, 'data', '')!r}"
    return ge_dtype(str(value)) if kind == "dt" else value


def _value(message: Message) -> Value:
    """Reads a ``TensorDescriptor``.

    torchair leaves out the shape of inner tensors; ``_meta`` has that of the last torch value.
    """
    shape = first(message, "shape")
    sizes: Shape | None = None if shape is None else tuple(map(int, every(shape, "dim")))
    for item in every(message, "attr") if sizes is None else ():
        if meta := _META.match(str(first(first(item, "value", []), "s", ""))):
            sizes = dims(meta[1])
    names = "dtype", "layout", "device_type"
    dtype, layout, device = (str(first(message, name, "")) for name in names)
    return Value(ge_dtype(dtype), sizes, layout, device)


def parse(text: str) -> Message:
    """Returns the fields of a message. Raises DumpError for anything but protobuf text."""
    fields: Message = []
    stack = [("", fields, 1)]
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        place = 0
        while place < len(line):
            part = _PART.match(line, place)
            if part is None or part.end() == place:
                raise DumpError(f"not protobuf text: {line[place : place + 40].strip()!r}", number)
            place = part.end()
            name, double, single, bare, opens, closes = part.groups()
            if closes:
                stack.pop()
                if not stack:
                    raise DumpError("a '}' without its '{'", number)
            if name is None:
                continue
            value: Any = []
            if bare is not None:
                value = _number(bare)
            elif not opens:
                literal = single if double is None else double
                try:  # a C string literal; a byte above 127 becomes the character of that number
                    value = literal.encode("latin-1", "backslashreplace").decode("unicode_escape")
                except ValueError as error:
                    raise DumpError(f"a damaged text: {error}", number) from None
            field = name, value, number
            stack[-1][1].append(field)
            if opens:
                stack.append(field)
            if len(stack) > _DEPTH:
                raise DumpError("messages nest too deeply", number)
    if len(stack) > 1:
        name, _, opened = stack[-1]
        raise DumpError(f"the file ends inside {name!r} of line {opened}: truncated", number)
    return fields


_parsed = lru_cache(maxsize=1 << 14)(parse)


def _number(text: str) -> Any:
    """Returns a bool, a number, or the text of any other word."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def first(message: Message, name: str, default: Any = None) -> Any:
    """Returns the first value of a field."""
    return next((value for key, value, _ in message if key == name), default)


def every(message: Message, name: str) -> list[Any]:
    """Returns all values of a repeated field."""
    return [value for key, value, _ in message if key == name]
