"""Writes a graph as a file that Graphviz draws."""

from __future__ import annotations

import json
from pathlib import Path

from mla_fusion.report import text_tables
from mla_fusion.tools.dumps import Dump, Value, checked
from mla_fusion.tools.inspect.operator_kinds import ENDS, HELD, is_prologue

_HEAD = """\
digraph dump {
  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif", fontsize=10];
  edge [fontname="sans-serif", fontsize=8, arrowsize=0.6];
"""


class ExportError(ValueError):
    """Raised for a suffix other than .dot."""


def export(dump: Dump, path: str | Path) -> Path:
    """Writes the graph of a dump for Graphviz, and returns the path.

    dump  as :func:`read` returns it
    path  its suffix is .dot

    Raises TypeError for what is no dump, ExportError for another suffix.
    """
    path = Path(path)
    if path.suffix != ".dot":
        raise ExportError(f"{path.name}: the suffix must be .dot; `dot -Tsvg` draws it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dot(checked(dump)), encoding="utf-8")
    return path


def _dot(dump: Dump) -> str:
    """Returns the text of the file."""
    lines = [_HEAD]
    for operator in dump.operators:
        value = str(operator.output) if operator.output != Value() else ""
        words = text_tables.short_name(operator.type), operator.name, value
        style = ", fillcolor=lightgrey" if operator.type in HELD | ENDS else ""
        if is_prologue(operator.type):
            style = ", fillcolor=lightgreen, penwidth=2"
        label = _quoted("\n".join(filter(None, words)))
        lines.append(f"  {_quoted(operator.name)} [label={label}{style}];\n")
    for operator in dump.operators:
        roles = operator.roles if len(operator.roles) > 1 else []  # a single role says nothing
        for place, edge in operator.reads:
            role = roles[place] if place < len(roles) else ""
            look = "style=dashed" if edge.index < 0 else f"label={_quoted(role)}"
            lines.append(f"  {_quoted(edge.producer)} -> {_quoted(operator.name)} [{look}];\n")
    return "".join([*lines, "}\n"])


def _quoted(text: str) -> str:
    """Returns a text as Graphviz quotes it."""
    return json.dumps(text, ensure_ascii=False)
