"""Readers of the graph dumps that torchair, GE, Inductor and torch write. Need neither torchair nor
protobuf.

A dump's format is told by its content: torchair gives the ending ``.txt`` to three different ones.
"""

from __future__ import annotations

from pathlib import Path

from mla_fusion.tools.dumps import fx_text, ge_onnx, ge_python, ge_text
from mla_fusion.tools.dumps.model import FORMATS, Dump, DumpError, Edge, Operator, Value

__all__ = [
    "FORMATS",
    "Dump",
    "DumpError",
    "Edge",
    "Operator",
    "Value",
    "read",
    "recognise",
]

_HEAD = 1 << 16  # characters looked at to tell the format


def read(path: str | Path) -> Dump:
    """The graph in a dump file.

    path  what torchair (pbtxt, py, txt), GE or torch (TORCH_LOGS, ExportedProgram) wrote

    Raises DumpError for a foreign or damaged file, OSError for one that cannot be read.
    """
    path = Path(path)
    try:
        return _read(path).checked()
    except (RecursionError, MemoryError):
        raise DumpError("nests too deeply", 1, 0, path) from None
    except DumpError as error:
        offset = error.offset or _start_of(path, error.line)
        raise DumpError(error.message, error.line, offset, path) from None


def recognise(head: str) -> str:
    """The key in FORMATS that the first characters of a file show. Raises DumpError for anything
    else.
    """
    if fx_text.CLASS.search(head):
        return "fx"
    if "import ge_apis as ge" in head or "\nfrom torchair.ge" in head:
        return "python"
    for line in head.splitlines():
        word = line.strip()
        if not word or word.startswith("#"):
            continue
        if word.startswith("node {"):
            return "pbtxt"
        if word.startswith(("op {", "name:", "graph {")):
            return "text"
        if word.startswith(("ir_version", "producer_name", "model_version")):
            return "onnx"
        break
    raise DumpError(f"no graph dump of a known format ({'; '.join(FORMATS.values())})", 1)


def _read(path: Path) -> Dump:
    _check_text(path)
    with path.open(encoding="utf-8", newline="\n") as file:
        kind = recognise(file.read(_HEAD))
        file.seek(0)
        if kind in ("pbtxt", "text"):
            operators, graph = ge_text.read(file)
        elif kind == "onnx":
            operators, graph = ge_onnx.read(file)
        else:
            operators, graph = (fx_text if kind == "fx" else ge_python).read(file.read())
    if kind != "fx" and not any(operator.type in ("NetOutput", "output") for operator in operators):
        last = operators[-1].line if operators else 1
        raise DumpError("the graph has no NetOutput: truncated", last, path.stat().st_size)
    return Dump(path, kind, operators, graph)


def _start_of(path: Path, line: int) -> int:
    with path.open("rb") as file:
        return sum(len(raw) for _, raw in zip(range(line - 1), file, strict=False))


def _check_text(path: Path) -> None:
    """Dumps are UTF-8; a damaged or binary file is told where it stops being so."""
    line, offset = 1, 0
    with path.open("rb") as file:
        for raw in file:
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DumpError("not text (UTF-8)", line, offset + error.start) from None
            line, offset = line + 1, offset + len(raw)
