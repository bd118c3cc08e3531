"""Defines the form into which every dump is read: operators, and the values between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from math import prod
from pathlib import Path
from typing import Any

from torch.fx.graph import dtype_abbrs

# numbers, names of symbols, and expressions of symbols; -1 for a dynamic size without a name
Shape = tuple[int | str, ...]
Attributes = dict[str, Any]  # by name
Arguments = tuple[tuple[Any, ...], Attributes]  # of a call: by place and by name

_NUMBER = re.compile(r"-?[0-9]{1,19}$")
_DIM = re.compile(r"(?:[^,(]|\([^()]*(?:\([^()]*\)[^()]*)*\))+")


def dims(text: str) -> Shape:
    """Returns the sizes of a text such as ``4, s0, Max(1, s0)``: numbers and expressions."""
    parts = [part.strip() for part in _DIM.findall(text)]
    return tuple(int(part) if _NUMBER.match(part) else part for part in parts if part)


# dtypes by number, as generated Python has them, GE's name and torch's
_ROWS = [
    row.split()
    for row in """
    0   DT_FLOAT          float32
    1   DT_FLOAT16        float16
    2   DT_INT8           int8
    3   DT_INT32          int32
    4   DT_UINT8          uint8
    6   DT_INT16          int16
    7   DT_UINT16         uint16
    8   DT_UINT32         uint32
    9   DT_INT64          int64
    10  DT_UINT64         uint64
    11  DT_DOUBLE         float64
    12  DT_BOOL           bool
    16  DT_COMPLEX64      complex64
    17  DT_COMPLEX128     complex128
    27  DT_BF16           bfloat16
    29  DT_INT4           int4
    30  DT_UINT1          uint1
    33  DT_COMPLEX32      complex32
    34  DT_HIFLOAT8       hifloat8
    35  DT_FLOAT8_E5M2    float8_e5m2
    36  DT_FLOAT8_E4M3FN  float8_e4m3fn
    37  DT_FLOAT8_E8M0    float8_e8m0fnu
    40  DT_FLOAT4_E2M1    float4_e2m1fn_x2
    """.strip().splitlines()
]
_OF_NUMBER = {int(number): name for number, _, name in _ROWS}
_OF_GE = {ge: name for _, ge, name in _ROWS}
FX_DTYPES = {short: str(dtype).removeprefix("torch.") for dtype, short in dtype_abbrs.items()}


def ge_dtype(name: str) -> str:
    """Returns torch's name of a GE dtype; GE's own in small letters if torch has none."""
    return _OF_GE.get(name, name.removeprefix("DT_").lower())


def numbered_dtype(number: object) -> str:
    """Returns torch's name of a GE dtype by its number, as in ``dst_type``; "" for others."""
    return _OF_NUMBER.get(number, "") if isinstance(number, int) else ""


# the bits in the names of numbers, "bfloat16" or "float8_e5m2"
_BITS = re.compile(r"(?:b?float|u?int|complex|(?:hifloat|q?u?int)(?=8))(\d+)")


class DumpError(ValueError):
    """Raised for a file that is no dump, or a damaged dump. ``line`` counts from 1."""

    def __init__(self, message: str, line: int, path: Path | None = None) -> None:
        self.message, self.line, self.path = message, line, path
        super().__init__(f"{path or 'dump'}:{line}: {message}")


class NotRebuilt(ValueError):
    """Raised for a dump of which no graph can be made.

    The message says why, and which file to take.
    """


@dataclass(frozen=True)
class Value:
    """What a dump says of one tensor.

    dtype          torch's name, or ""
    shape, stride  None if the dump does not say
    """

    dtype: str = ""
    shape: Shape | None = None
    format: str = ""
    placement: str = ""
    stride: Shape | None = None

    @property
    def elements(self) -> tuple[int, list[str]] | None:
        """The number of elements: the product of the known sizes, and the symbols beside it.

        None if the dump does not say.
        """
        if self.shape is None or -1 in self.shape:
            return None
        number = prod(size for size in self.shape if isinstance(size, int))
        return number, sorted(size for size in self.shape if isinstance(size, str))

    @property
    def bytes(self) -> int | None:
        """The size in bytes; None if the dump does not say, or an axis is dynamic."""
        bits, elements = _BITS.match(self.dtype.replace("bool", "int8")), self.elements
        if bits is None or elements is None or elements[1]:
            return None
        return (elements[0] * int(bits[1]) + 7) // 8

    def __str__(self) -> str:
        shape = "?" if self.shape is None else ", ".join(map(str, self.shape))
        layout = f" {self.format}" if self.format not in ("", "ND") else ""
        return f"{self.dtype or '?'}[{shape}]{layout}"


@dataclass(frozen=True, slots=True)
class Edge:
    """The ``index``-th result of an operator. Index -1 is an order without data."""

    producer: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.producer}:{self.index}" if self.index else self.producer


@dataclass(eq=False, slots=True)
class Operator:
    """One operator. An optional input that is left out is None.

    roles   names of the inputs, as far as known
    call    (args, kwargs) with Edges in place of values; empty if the dump is no program
    source  "file:line in function: code" of the model, or ""
    """

    name: str
    type: str
    inputs: list[Edge | None] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    attributes: Attributes = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    line: int = 0
    call: Arguments = ((), {})
    source: str = ""

    @property
    def output(self) -> Value:
        """The first result."""
        return self.outputs[0] if self.outputs else Value()

    @property
    def reads(self) -> list[tuple[int, Edge]]:
        """The inputs that are not left out, each with its place."""
        return [(place, edge) for place, edge in enumerate(self.inputs) if edge is not None]

    def input(self, place: int) -> Edge | None:
        """Returns the input at a place, or None."""
        return self.inputs[place] if place < len(self.inputs) else None


FORMATS = {
    "text": "GE graph, torchair pbtxt or txt",
    "python": "GE graph, torchair py",
    "fx": "FX graph, readable text",
}


@dataclass(eq=False)
class Dump:
    """A graph read from a file.

    format  a key of :data:`FORMATS`
    graph   its name
    number  the place of the graph in its file, from 1
    graphs  how many graphs the file has
    """

    path: Path
    format: str
    operators: list[Operator]
    graph: str
    number: int = 1
    graphs: int = 1

    def __str__(self) -> str:
        which = f", graph {self.number} of {self.graphs}" if self.graphs > 1 else ""
        return f"{self.path} ({FORMATS[self.format]}{which})"

    @property
    def is_fx(self) -> bool:
        """True for an FX graph."""
        return self.format == "fx"

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        """The operators by their names."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def readers(self) -> dict[str, list[Operator]]:
        """The operators that read each operator, by its name."""
        readers: dict[str, list[Operator]] = {name: [] for name in self.by_name}
        for operator in self.operators:
            for _, edge in operator.reads:
                readers[edge.producer].append(operator)
        return readers

    @cached_property
    def ordered(self) -> list[Operator]:
        """The operators, each behind what it reads. Raises DumpError for a circle."""
        sources = {item.name: [edge.producer for _, edge in item.reads] for item in self.operators}
        try:
            return [self.by_name[name] for name in TopologicalSorter(sources).static_order()]
        except CycleError as error:
            line = self.by_name[error.args[1][0]].line
            raise DumpError("operators read one another in a circle", line) from None

    @cached_property
    def counts(self) -> Counter[str]:
        """How many operators of each type there are."""
        return Counter(operator.type for operator in self.operators)

    def value(self, edge: Edge | None) -> Value:
        """Returns what is known of the tensor on an edge."""
        if edge is None:
            return Value()
        operator = self.by_name[edge.producer]
        is_known = 0 <= edge.index < len(operator.outputs)
        value = operator.outputs[edge.index] if is_known else Value()
        # torchair writes a dtype for other results too, which may be wrong
        is_moved = value.shape is None and operator.type in ("TensorMove", "Identity")
        return self.value(operator.input(0)) if is_moved else value

    def of_type(self, *types: str) -> Iterator[Operator]:
        """Yields the operators of these types."""
        return (operator for operator in self.operators if operator.type in types)

    def __post_init__(self) -> None:
        """Raises DumpError if two operators have one name, or an input is missing."""
        if not self.operators:
            raise DumpError("the graph holds no operator", 1)
        for item in self.operators:
            name, line = item.name, item.line
            if self.by_name[name] is not item:
                raise DumpError(f"two operators have the name {name!r}", line)
            for _, edge in item.reads:
                if edge.producer not in self.by_name:
                    raise DumpError(f"{name} reads {edge.producer!r}, which the dump lacks", line)
        self.ordered  # noqa: B018  # raises for a circle
