"""``mf.inspect``: dumps of graphs read, summed up, compared and exported."""

from mla_fusion.tools.dumps import Dump, DumpError, read
from mla_fusion.tools.inspect.compare import Difference, diff
from mla_fusion.tools.inspect.explain import DumpReport, NotRebuilt
from mla_fusion.tools.inspect.summary import Summary, summarise
from mla_fusion.tools.inspect.viewers import ExportError, export

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
