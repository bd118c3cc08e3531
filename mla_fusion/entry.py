"""``mf.fuse`` and ``mf.explain``: the pass, its reports as pages, and dumps as graphs."""

from __future__ import annotations

from os import PathLike

from torch.fx import GraphModule

import mla_fusion.page.live  # noqa: F401  # from here on reports can be written as pages, and are saved where asked for
from mla_fusion import pipeline
from mla_fusion.config import Config
from mla_fusion.inspect.explain import explain as explain_dump
from mla_fusion.report.report import Report, reports

__all__ = ["Report", "explain", "fuse", "reports"]

fuse = pipeline.fuse


def explain(
    gm: GraphModule | str | PathLike[str], config: Config | None = None, *, boundary: bool = False
) -> Report:
    """What :func:`fuse` would do, with the same reasons, changing nothing.

    gm        a graph as :func:`fuse` takes it, or the path of a dump that torchair or torch wrote,
              from which the graph is rebuilt
    config    options of the pass
    boundary  say what :func:`backend` would do, which views caches in the kernel's shape before it
              calls the graph

    A dump that cannot be read, or does not hold enough, raises a ValueError that says why.
    """
    if isinstance(gm, (str, PathLike)):
        return explain_dump(gm, config, boundary=boundary)
    return pipeline.explain(gm, config, boundary=boundary)
