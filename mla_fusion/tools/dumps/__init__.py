"""Reads graph dumps of torchair, GE, Inductor and torch. Needs neither torchair nor protobuf.

The content of a file decides its format: torchair uses the suffix ``.txt`` for two of them.
"""

from __future__ import annotations

from pathlib import Path

from mla_fusion.tools.dumps import ge_text, python_text
from mla_fusion.tools.dumps.model import FORMATS, Dump, DumpError, Edge, Operator, Value

__all__ = ["Dump", "DumpError", "Edge", "Operator", "Value", "read"]

_MOST_BYTES = 1 << 26  # of a file; a model of 61 layers has less than a fifth of it


def read(path: str | Path, graph: int = 1) -> Dump:
    """Returns one graph of a dump file.

    path   a file of torchair (pbtxt, py, txt) or torch (TORCH_LOGS, print_readable)
    graph  the number of the graph in its file, from 1

    Raises DumpError for a foreign or damaged file and for a missing graph, OSError for a file that
    cannot be read.
    """
    path = Path(path)
    try:
        return _read(path, graph)
    except RecursionError:
        raise DumpError("nests too deeply", 1, path) from None
    except DumpError as error:
        raise DumpError(error.message, error.line, path) from None


def checked(dump: object) -> Dump:
    """Returns the dump. Raises TypeError for anything else."""
    if not isinstance(dump, Dump):
        found = type(dump).__name__
        raise TypeError(f"dump: expected what mla_fusion.inspect.read returns, got {found}")
    return dump


def _format_of(text: str) -> str:
    """Returns the key in FORMATS for the text of a file. Raises DumpError for any other text."""
    if python_text.CLASS.search(text):
        return "fx"
    if "import ge_apis as ge" in text or "\nfrom torchair.ge" in text:
        return "python"
    lines = (line for line in map(str.strip, text.splitlines()) if line and line[0] != "#")
    if next(lines, "").startswith(("node {", "op {", "name:")):
        return "text"
    raise DumpError(f"no graph dump of a known format ({'; '.join(FORMATS.values())})", 1)


def _read(path: Path, number: int) -> Dump:
    """Returns one graph of a file. Raises DumpError without a path."""
    if path.stat().st_size > _MOST_BYTES:
        raise DumpError(f"larger than {_MOST_BYTES >> 20} MiB; no graph dump is", 1)
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DumpError("not text (UTF-8)", content.count(b"\n", 0, error.start) + 1) from None
    text = python_text.COLOUR.sub("", text)
    kind = _format_of(text)
    if kind == "fx":
        listings = python_text.split(text)
        if not 1 <= number <= len(listings):
            raise DumpError(f"the file holds {len(listings)} graphs, and no graph {number}", 1)
        name, body = listings[number - 1]
        return Dump(path, kind, python_text.read_fx(body), name, number, len(listings))
    if number != 1:
        raise DumpError(f"a GE dump holds 1 graph, and no graph {number}", 1)
    # generated Python does not name its graph
    operators, name = (python_text.read_ge(text), "") if kind == "python" else ge_text.read(text)
    if all(operator.type != "NetOutput" for operator in operators):
        raise DumpError("the graph has no NetOutput: truncated", text.count("\n") + 1)
    return Dump(path, kind, operators, name)
