"""``mf.explain``: what the pass would do to a graph. A dump's graph is rebuilt, and read like any
other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path

from torch.fx import GraphModule

from mla_fusion import pipeline
from mla_fusion.config import Config
from mla_fusion.report.report import Report
from mla_fusion.tools.dumps import FORMATS, Dump, budget, read, rebuild_fx, rebuild_ge
from mla_fusion.tools.dumps.model import NotRebuilt
from mla_fusion.tools.dumps.prologues import is_prologue

__all__ = ["DumpReport", "NotRebuilt", "explain", "explain_dump"]


@dataclass(repr=False)
class DumpReport(Report):
    """A Report on a dump. ``remarks`` say what the dump does not tell, and what the verdicts
    therefore leave out.
    """

    dump: str = ""
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  note: {remark}" for remark in self.remarks)])


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


def explain_dump(
    path: str | PathLike[str] | Dump, config: Config | None = None, *, boundary: bool = False
) -> DumpReport:
    """What the pass says of the graph in a dump. Layers are unnamed: dumps hold no module paths.

    Raises DumpError for a file that is no dump, and NotRebuilt, with the reason, for one that does
    not hold enough.
    """
    dump = path if isinstance(path, Dump) else read(Path(fspath(path)))
    with budget.limited(len(dump.operators)) as spent:
        gm, remarks = _rebuilt(dump, spent)
        spent.line = 0
        report = _explained(dump, gm, Config.given(config), boundary)
    kernels = sum(count for kind, count in dump.counts.items() if is_prologue(kind))
    if kernels:
        counted = "1 prologue" if kernels == 1 else f"{kernels} prologues"
        remarks.append(f"fused already in this graph: {counted}")
    return DumpReport(
        **vars(report), dump=f"{dump.path} ({FORMATS[dump.format]})", remarks=tuple(remarks)
    )


def _explained(dump: Dump, gm: GraphModule, config: Config, boundary: bool) -> Report:
    """Where the pass fails on a graph that contradicts itself, the dump is at fault, not the
    pass.
    """
    try:
        report = pipeline.explain(gm, replace(config, strict=True), boundary=boundary)
        report.config = config
        return report
    except pipeline.SkipError:
        raise
    except Exception as error:
        budget.end_if_interrupted(error)
        found = rebuild_fx.contradiction(gm)
        if found is not None:
            node, why = found
            line = dump.by_name[node.name].line if node.name in dump.by_name else 0
            raise NotRebuilt(
                f"line {line}: {node.name} is no result of {node.target}: {why}"
            ) from error
    return pipeline.explain(gm, config, boundary=boundary)


def _rebuilt(dump: Dump, spent: budget.Budget) -> tuple[GraphModule, list[str]]:
    try:
        return (rebuild_fx if dump.is_fx else rebuild_ge).Rebuilder(dump).graph_module()
    except NotRebuilt:
        raise
    # a damaged dump can describe what no graph is: sizes below zero, names that are none
    except Exception as error:
        budget.end_if_interrupted(error)
        said = error if isinstance(error, budget.Refused) else f"{type(error).__name__}: {error}"
        raise NotRebuilt(f"line {spent.line}: torch accepts no such graph: {said}") from error
