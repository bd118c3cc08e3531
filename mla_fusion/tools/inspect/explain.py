"""``mf.explain``: reports what the pass would do to a graph, which may be in a dump."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from torch.fx import GraphModule

from mla_fusion import pipeline
from mla_fusion.config import Config
from mla_fusion.report.report import Report
from mla_fusion.report.text_tables import first_line
from mla_fusion.tools.dumps import Dump, read, rebuild_fx
from mla_fusion.tools.dumps.model import NotRebuilt
from mla_fusion.tools.inspect.operator_kinds import is_prologue

_NO_LISTING = (
    "this is a GE graph, and the pass reads the FX graph that it was made from. Compile once more "
    "with TORCH_COMPILE_DEBUG=1 in the environment: torchair then writes the FX listing "
    "torch_compile_debug/run_*/torchair/model__*/forward/000_aot_forward_graph.txt; take that file"
)


@dataclass(repr=False, eq=False)
class DumpReport(Report):
    """A Report on a dump.

    dump     path and format of the dump
    remarks  what the dump does not say, so that the report leaves it out
    """

    dump: str = ""
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  note: {remark}" for remark in self.remarks)])


def explain(
    gm: GraphModule | str | PathLike[str],
    config: Config | None = None,
    *,
    boundary: bool = False,
    graph: int = 1,
) -> Report:
    """Returns what :func:`fuse` would do, with the same reasons. Changes nothing. Raises a
    ValueError that says why, for a file that lacks parts of the graph or is damaged, and OSError
    for one that cannot be read.

    gm        a graph as :func:`fuse` takes it, or the path of an FX listing that torchair or torch
              wrote, from which the graph is rebuilt
    config    options of the pass
    boundary  True: what :func:`backend` would do, which views caches in the kernel's shape before
              it calls the graph
    graph     the number of the graph in its file, from 1
    """
    if isinstance(gm, (str, PathLike)):
        return explain_dump(read(Path(gm), graph), config, boundary=boundary)
    if graph != 1:
        raise ValueError(f"graph={graph!r} is for a file of several graphs; gm is one graph")
    return pipeline.explain(gm, config, boundary=boundary)


def explain_dump(dump: Dump, config: Config | None = None, *, boundary: bool = False) -> DumpReport:
    """Returns the report on the graph in a dump. Layers have no names: dumps hold no module paths.

    Raises NotRebuilt, with the reason, for a dump that lacks parts of the graph.
    """
    several = [
        f"the file holds {dump.graphs} graphs; this is graph {dump.number}. "
        "--graph N, or graph=N in Python, reads another"
    ] * (dump.graphs > 1)
    try:
        if not dump.is_fx:
            raise NotRebuilt(_NO_LISTING)
        gm, remarks = rebuild_fx.Rebuilder(dump).graph_module()
        config = Config.given(config)
        report = pipeline.explain(gm, replace(config, strict=True), boundary=boundary)
        report.config = config
    except rebuild_fx.TooSlow:
        raise NotRebuilt(
            f"{dump}: the pass did not get through the graph in {rebuild_fx.MOST_SECONDS} s"
        ) from None
    except NotRebuilt as error:
        raise NotRebuilt("; ".join([f"{dump}: {error}", *several])) from error.__cause__
    except pipeline.SkipError:
        raise
    except Exception as error:  # the pass fails on a graph that contradicts itself
        text = f"{dump}: the pass cannot follow this graph ({first_line(error)}): was it edited?"
        raise NotRebuilt(text) from error
    if kernels := sum(is_prologue(operator.type) for operator in dump.operators):
        remarks.append(f"fused already in this graph: {kernels} prologue" + "s" * (kernels > 1))
    return DumpReport(**vars(report), dump=str(dump), remarks=(*remarks, *several))
