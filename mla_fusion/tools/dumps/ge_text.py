"""GE graphs as torchair writes them: its onnx-like pbtxt, and the protobuf's own text.

In the pbtxt every attribute and tensor description is protobuf text once more, inside a string.
Layers repeat those strings, so each is parsed once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from mla_fusion.tools.dumps import dtypes, names, prototext
from mla_fusion.tools.dumps.model import (
    Attributes,
    DumpError,
    Edge,
    Operator,
    Shape,
    Value,
    dims,
    operator_at,
)
from mla_fusion.tools.dumps.prototext import Message, every, first

_META = re.compile(r"Tensor\(dtype=torch\.(\w+), shape=torch\.Size\(\[([^\]]*)\]")
_MODEL = "attr input output versions library version custom_version attr_groups".split()


def read(lines: Iterable[str]) -> tuple[list[Operator], str]:
    """The operators of a graph in either form, and the graph's name.

    GE's own ``ge_proto_*.txt`` is the same text once more wrapped, a model with graphs: the first
    is the graph, and operators of the others, its subgraphs, get their graph's name in front.
    """
    operators: list[Operator] = []
    names, graphs = [""], 0
    for name, value, line in prototext.top_messages(lines, inside="graph"):
        if name in ("op", "node") and isinstance(value, list):
            with operator_at(line):
                operator = _operator(name, value, line)
            operators.append(_under(names[-1], operator) if graphs > 1 else operator)
        elif name == "graph" and isinstance(value, list):
            graphs += 1
            names.append("")
        elif name == "name":
            names[-1] = str(value)
        elif name not in _MODEL:
            raise DumpError(f"not a GE graph: unknown field {name!r}", line)
    return operators, (names[1] if graphs else "") or names[0]


def _under(graph: str, operator: Operator) -> Operator:
    operator.name = f"{graph}/{operator.name}"
    operator.inputs = [
        found and Edge(f"{graph}/{found.producer}", found.index) for found in operator.inputs
    ]
    return operator


def _operator(kind: str, message: Message, line: int) -> Operator:
    name, type_ = first(message, "name"), first(message, "type" if kind == "op" else "op")
    if not isinstance(name, str) or not isinstance(type_, str) or not type_:
        raise DumpError("an operator without a name or a type", line)
    attributes, inputs, outputs = (_of_text if kind == "op" else _of_pbtxt)(message)
    roles = _names(attributes, "_input_name_key", inputs)
    results = _names(attributes, "_output_name_key", outputs)
    for key in ("_input_name_value", "_output_name_value"):
        attributes.pop(key, None)
    if type_ == "Const":
        prefer_readable(attributes)
    values = [_value(item) for item in outputs or (inputs[:1] if type_ == "Data" else ())]
    edges = [edge(str(text)) for text in every(message, "input")]
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
    inputs: list[str] = []
    outputs: list[Message] = []
    for item in every(message, "attr"):
        key, text = str(first(item, "key")), first(first(item, "value", []), "s", "")
        if key.startswith("[i]"):
            inputs.append(text)
        elif key.startswith("[o]"):
            outputs.append(_parsed(text))
        else:
            attributes[key] = _attribute(_parsed(text))
    # The input side repeats what the producer's output side says; it is looked at where that is not
    # so.
    needed = first(message, "op") == "Data" or "_input_name_key" not in attributes
    return attributes, [_parsed(text) for text in inputs if needed], outputs


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> Message:
    return prototext.parse(text)


def prefer_readable(attributes: Attributes) -> None:
    """torchair notes a constant as the model had it: 1e-06 rather than the float32 nearest to
    it.
    """
    text, held = attributes.pop("_readable_value", ""), attributes.get("value")
    if not isinstance(held, dict) or len(str(text)) > 200:
        return
    try:
        stated = ast.literal_eval(str(text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return
    numbers = stated if isinstance(stated, list) else [stated]
    if all(isinstance(number, (int, float)) for number in numbers) and len(numbers) == len(
        held["numbers"] or ()
    ):
        attributes["value"] = {**held, "numbers": numbers}


def edge(text: str) -> Edge | None:
    """``name:index``, ``name:-1`` or ``^name`` for an order without data, "" for no input."""
    if not text:
        return None
    if text.startswith("^"):
        return Edge(text[1:], -1)
    name, separator, index = text.rpartition(":")
    return Edge(name, int(index)) if separator else Edge(text)


def _attribute(message: Any) -> Any:
    """The value of a GE ``AttrDef``: a scalar, a list, or a constant's (dtype, shape, values)."""
    if not isinstance(message, list) or not message:
        return None if isinstance(message, list) else message
    kind, value, _ = message[0]
    if kind == "list":
        return [item for key, item, _ in value if key != "val_type"]
    if kind == "t":
        return constant(value)
    if kind == "dt":
        return dtypes.from_ge(str(value))
    return value


def constant(message: Message) -> Attributes:
    """A ``TensorDef``: its Value and, where the type has a plain binary form, its numbers."""
    value, data = _value(first(message, "desc", [])), first(message, "data", "")
    # GE can leave the data out
    absent = not data and value.shape is not None and 0 not in value.shape
    return {"value": value, "numbers": None if absent else numbers(value.dtype, data)}


def numbers(dtype: str, text: object) -> list[Any] | None:
    """What the bytes of a tensor, each a character, are; None for a dtype of which torch has no
    numbers.
    """
    known = names.dtype(dtype)
    if known is None:
        return None
    data = str(text).encode("latin-1", errors="replace")
    whole = len(data) // known.itemsize * known.itemsize
    try:
        return torch.frombuffer(bytearray(data[:whole]), dtype=known).tolist() if whole else []
    except (RuntimeError, ValueError, TypeError):
        return None


def _value(message: Message) -> Value:
    """A ``TensorDescriptor``.

    torchair leaves the shape of inner tensors out and keeps in ``_meta`` that of the last torch
    value which the GE tensor stands for: of a product that is then viewed as heads, the heads. The
    number of elements is right.
    """
    shape = first(message, "shape")
    found = described(
        first(message, "dtype", ""),
        every(shape, "dim") if isinstance(shape, list) else None,
        first(message, "layout", ""),
        first(message, "device_type", ""),
    )
    meta = next((item for item in every(message, "attr") if first(item, "key") == "_meta"), None)
    said = _META.match(str(first(first(meta, "value", []), "s", ""))) if meta is not None else None
    return found if said is None else replace(found, shape=agreed(found.shape, dims(said[2])))


def described(dtype: Any, sizes: Any, layout: Any = "", placement: Any = "") -> Value:
    """What a dump says of a tensor, in GE's words; ``sizes`` is None where it says nothing."""
    shape = None if sizes is None else tuple(map(int, sizes))
    return Value(dtypes.from_ge(str(dtype)), shape, str(layout), str(placement))


def agreed(sizes: Shape | None, meta: Shape) -> Shape:
    """GE's own shape, its -1 replaced by torch's symbols. A Data's ``_meta`` may be that of its
    transpose.
    """
    if sizes is None:
        return meta
    fits = len(sizes) == len(meta) and all(a in (b, -1) for a, b in zip(sizes, meta, strict=True))
    return meta if fits else sizes
