"""torchair's GraphDef in the two forms that GE itself writes, since no GE runs here.

``proto`` is the protobuf's own text of a ModelDef that holds the graph. ``onnx`` is built from what
GE's encoder is documented to do with operators, descriptions and attributes; an ONNX model in
protobuf text, fields in the order of their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_TYPES = {
    "VT_LIST_STRING": ("strings", "STRINGS", "s"),
    "VT_LIST_INT": ("ints", "INTS", "i"),
    "VT_LIST_FLOAT": ("floats", "FLOATS", "f"),
    "VT_LIST_BOOL": ("ints", "INTS", "b"),
}


def proto(graph: Any) -> str:
    """As ``ge_proto_*.txt``."""
    from google.protobuf import text_format
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    model = ModelDef(name="model", version=1)
    model.graph.add().CopyFrom(graph)
    return str(text_format.MessageToString(model))


def onnx(graph: Any, everything: bool = True) -> str:
    """As ``ge_onnx_*.pbtxt``; ``everything``: with DUMP_GE_GRAPH=1, which alone has strings and
    data.
    """
    lines = ["ir_version: 6", 'producer_name: "GE"', "model_version: 1", "graph {"]
    for op in graph.op:
        lines += ["  node {", *_node(op, everything), "  }"]
    return "\n".join([*lines, f"  name: {_quoted(graph.name)}", "}", ""])


def _node(op: Any, everything: bool) -> Iterator[str]:
    yield from (f"    input: {_quoted(_edge(text))}" for text in op.input)
    yield from (
        f"    output: {_quoted(f'{op.name}:{index}')}" for index in range(len(op.output_desc))
    )
    yield f"    name: {_quoted(op.name)}"
    yield f"    op_type: {_quoted('ge:' + op.type)}"
    found = dict(_descriptions("input", op.input_desc)) | dict(
        _descriptions("output", op.output_desc)
    )
    for key, attr in op.attr.items():
        # written from the operator's own index of names, whatever the level
        if key == "_input_name_key":
            names = [bytes(name) for name in attr.list.s]
            found[key] = ("strings", "STRINGS", names)
            found["_input_name_value"] = ("ints", "INTS", list(range(len(names))))
        elif key not in ("_input_name_value", "_output_name_key", "_output_name_value"):
            found.update(_attribute(key, attr, everything))
    for name, (field, kind, values) in sorted(found.items()):
        yield from _written(name, field, kind, values)


def _edge(text: str) -> str:
    return f"{text[1:]}:-1" if text.startswith("^") else text


def _descriptions(side: str, descriptions: Any) -> Iterator[tuple[str, tuple[str, str, list[Any]]]]:
    for index, desc in enumerate(descriptions):
        dtype = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number[desc.dtype].name
        for what in ("", "origin_"):
            yield f"{side}_desc_{what}dtype:{index}", ("s", "STRING", [dtype.encode()])
            yield f"{side}_desc_{what}shape:{index}", ("ints", "INTS", list(desc.shape.dim))
            yield f"{side}_desc_{what}layout:{index}", ("s", "STRING", [desc.layout.encode()])
        yield f"{side}_desc_device_type:{index}", ("s", "STRING", [desc.device_type.encode()])
        yield f"{side}_desc_size:{index}", ("i", "INT", [desc.size])


def _attribute(
    key: str, attr: Any, everything: bool
) -> Iterator[tuple[str, tuple[str, str, list[Any]]]]:
    kind = attr.WhichOneof("value")
    if kind == "t":
        desc = attr.t.desc
        dtype = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number[desc.dtype].name
        yield f"{key}_desc_dtype", ("s", "STRING", [dtype.encode()])
        yield f"{key}_desc_shape", ("ints", "INTS", list(desc.shape.dim))
        yield f"{key}_desc_layout", ("s", "STRING", [desc.layout.encode()])
        if everything:
            yield f"{key}_data", ("s", "STRING", [attr.t.data])
    elif kind == "s" and everything:
        yield key, ("s", "STRING", [attr.s])
    elif kind in ("i", "b", "dt"):
        yield key, ("i", "INT", [int(getattr(attr, kind))])
    elif kind == "f":
        yield key, ("f", "FLOAT", [attr.f])
    elif kind == "list":
        names = attr.list.DESCRIPTOR.fields_by_name["val_type"].enum_type.values_by_number
        field, word, own = _TYPES.get(names[attr.list.val_type].name, ("", "", ""))
        if field and (field != "strings" or everything):
            yield (
                key,
                (field, word, [bytes(v) if own == "s" else v for v in getattr(attr.list, own)]),
            )


def _written(name: str, field: str, kind: str, values: list[Any]) -> Iterator[str]:
    if field in ("ints", "floats", "strings") and not values:
        return  # GE adds no empty list
    yield "    attribute {"
    yield f"      name: {_quoted(name)}"
    for value in values:
        # a field of default value is not written
        if value or field in ("ints", "floats", "strings"):
            yield f"      {field}: {_scalar(field, value)}"
    yield f"      type: {kind}"
    yield "    }"


def _scalar(field: str, value: Any) -> str:
    """Of a float as many digits as tell it from other float32 numbers."""
    if isinstance(value, (bytes, str)):
        return _quoted(value)
    if not field.startswith("f"):
        return str(int(value))
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next(text for text in texts if struct.pack("f", float(text)) == struct.pack("f", value))


def _quoted(text: str | bytes) -> str:
    """Bytes outside ASCII as three octal digits, as protobuf writes them."""
    data = text.encode() if isinstance(text, str) else text
    plain = {0x22: '\\"', 0x5C: "\\\\", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x27: "\\'"}
    return (
        '"'
        + "".join(plain.get(c) or (chr(c) if 32 <= c < 127 else f"\\{c:03o}") for c in data)
        + '"'
    )
