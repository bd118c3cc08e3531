"""Graph dumps as people read them: summed up, explained, compared and exported for other
viewers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_fusion.dumps import Dump, DumpError, read
    from mla_fusion.inspect.compare import Difference, diff
    from mla_fusion.inspect.explain import DumpReport, NotRebuilt
    from mla_fusion.inspect.summary import Summary, summarise
    from mla_fusion.inspect.viewers import ExportError, export

_HOME = {
    "Difference": "inspect.compare", "diff": "inspect.compare", "Dump": "dumps",
    "DumpError": "dumps", "read": "dumps",
    "DumpReport": "inspect.explain", "NotRebuilt": "inspect.explain",
    "ExportError": "inspect.viewers",
    "export": "inspect.viewers", "Summary": "inspect.summary", "summarise": "inspect.summary",
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
        return getattr(import_module(f"mla_fusion.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
