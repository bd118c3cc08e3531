"""Graphs as people read them: dumps read, summed up, compared and exported; the report's page, drawings, tables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_fusion.inspect.compare import Difference, diff
    from mla_fusion.inspect.dumps import Dump, DumpError, read
    from mla_fusion.inspect.explain import DumpReport, NotRebuilt
    from mla_fusion.inspect.summary import Summary, summarise
    from mla_fusion.inspect.viewers import ExportError, export

_HOME = {
    "Difference": "compare", "diff": "compare", "Dump": "dumps", "DumpError": "dumps", "read": "dumps",
    "DumpReport": "explain", "NotRebuilt": "explain", "ExportError": "viewers", "export": "viewers",
    "Summary": "summary", "summarise": "summary",
}  # fmt: skip

__all__ = [
    "Difference",
    "Dump",
    "DumpError",
    "DumpReport",
    "ExportError",
    "NotRebuilt",
    "Summary",
    "diff",
    "export",
    "read",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
