"""GE graphs as torchair writes them: its onnx-like pbtxt, and the protobuf's own text.

In the pbtxt every attribute and tensor description is protobuf text once more, inside a string.
Layers repeat those strings, so each is parsed once.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mla_fusion.tools.dumps import dtypes, prototext
from mla_fusion.tools.dumps.model import (
    Attributes,
    DumpError,
    Edge,
    Operator,
    Shape,
    Value,
    dims,
)
from mla_fusion.tools.dumps.prototext import Message, every, first

_META = re.compile(r"Tensor\(dtype=torch\.(\w+), shape=torch\.Size\(\[([^\]]*)\]")
_GRAPH = "attr input output name".split()


def read(text: str) -> tuple[list[Operator], str]:
    """The operators of a graph in either form, and the graph's name."""
    operators, graph = [], prototext.parse(text)
    for name, value, line in graph:
        if name in ("op", "node"):
            try:
                operators.append(_operator(name, value, line))
            except DumpError as error:  # strings in an operator have lines of their own
                raise DumpError(error.message, line) from None
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                raise DumpError(f"a damaged operator: {error}", line) from None
        elif name not in _GRAPH:
            raise DumpError(f"not torchair's GE graph: unknown field {name!r}", line)
    return operators, str(first(graph, "name", ""))


def _operator(kind: str, message: Message, line: int) -> Operator:
    name, type_ = first(message, "name"), first(message, "type" if kind == "op" else "op")
    if not isinstance(name, str) or not isinstance(type_, str) or not type_:
        raise DumpError("an operator without a name or a type", line)
    attributes, inputs, outputs = (_of_text if kind == "op" else _of_pbtxt)(message)
    roles = _names(attributes, "_input_name_key", inputs)
    results = _names(attributes, "_output_name_key", outputs)
    values = [_value(item) for item in outputs or (inputs[:1] if type_ == "Data" else ())]
    edges = [_edge(str(text)) for text in every(message, "input")]
    return Operator(name, type_, edges, values, attributes, roles, results, line)


def _names(attributes: Attributes, key: str, described: list[Message]) -> list[str]:
    """Of inputs or outputs: those in the attribute, which is taken out, or in the descriptions."""
    stated = attributes.pop(key, None)
    if isinstance(stated, list) and stated:
        return list(map(str, stated))
    return [str(first(item, "name", "")) for item in described]


Described = tuple[Attributes, list[Message], list[Message]]  # attributes, inputs, outputs


def _of_text(message: Message) -> Described:
    attributes = {
        str(first(item, "key")): _attribute(first(item, "value", []))
        for item in every(message, "attr")
    }
    return attributes, every(message, "input_desc"), every(message, "output_desc")


def _of_pbtxt(message: Message) -> Described:
    attributes: Attributes = {}
    inputs: list[Message] = []
    outputs: list[Message] = []
    for item in every(message, "attr"):
        key, found = str(first(item, "key")), _parsed(first(first(item, "value", []), "s", ""))
        if key.startswith("[i]"):
            inputs.append(found)
        elif key.startswith("[o]"):
            outputs.append(found)
        else:
            attributes[key] = _attribute(found)
    return attributes, inputs, outputs


_parsed = lru_cache(maxsize=1 << 14)(prototext.parse)


def _edge(text: str) -> Edge | None:
    """``name:index``, ``name:-1`` or ``^name`` for an order without data, "" for no input."""
    if not text:
        return None
    if text.startswith("^"):
        return Edge(text[1:], -1)
    name, separator, index = text.rpartition(":")
    return Edge(name, int(index)) if separator else Edge(text)


def _attribute(message: Any) -> Any:
    """The value of a GE ``AttrDef``: a scalar, a list, or a constant as text."""
    if not isinstance(message, list) or not message:
        return None if isinstance(message, list) else message
    kind, value, _ = message[0]
    if kind == "list":
        return [item for key, item, _ in value if key != "val_type"]
    if kind == "t":
        return f"{_value(first(value, 'desc', []))} {first(value, 'data', '')!r}"
    return dtypes.from_ge(str(value)) if kind == "dt" else value


def _value(message: Message) -> Value:
    """A ``TensorDescriptor``.

    torchair leaves the shape of inner tensors out and keeps in ``_meta`` that of the last torch
    value.
    """
    shape = first(message, "shape")
    found = Value(
        dtypes.from_ge(str(first(message, "dtype", ""))),
        tuple(map(int, every(shape, "dim"))) if isinstance(shape, list) else None,
        str(first(message, "layout", "")),
        str(first(message, "device_type", "")),
    )
    meta = next((item for item in every(message, "attr") if first(item, "key") == "_meta"), None)
    said = _META.match(str(first(first(meta, "value", []), "s", ""))) if meta is not None else None
    return found if said is None else replace(found, shape=_agreed(found.shape, dims(said[2])))


def _agreed(sizes: Shape | None, meta: Shape) -> Shape:
    """GE's own shape, its -1 replaced by torch's symbols. A Data's ``_meta`` may be that of its
    transpose.
    """
    if sizes is None:
        return meta
    fits = len(sizes) == len(meta) and all(a in (b, -1) for a, b in zip(sizes, meta, strict=True))
    return meta if fits else sizes
