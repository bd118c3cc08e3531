"""``mf.inspect``: dumps of graphs read, summed up, compared and exported. The names alone: what is
behind them is a tool, and is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_fusion.tools.dumps import Dump, DumpError, read
    from mla_fusion.tools.inspect.compare import Difference, diff
    from mla_fusion.tools.inspect.explain import DumpReport, NotRebuilt
    from mla_fusion.tools.inspect.summary import Summary, summarise
    from mla_fusion.tools.inspect.viewers import ExportError, export

_HOME = {
    "Difference": "inspect.compare",
    "Dump": "dumps",
    "DumpError": "dumps",
    "DumpReport": "inspect.explain",
    "ExportError": "inspect.viewers",
    "NotRebuilt": "inspect.explain",
    "Summary": "inspect.summary",
    "diff": "inspect.compare",
    "export": "inspect.viewers",
    "read": "dumps",
    "summarise": "inspect.summary",
}

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
        return getattr(import_module(f"mla_fusion.tools.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
