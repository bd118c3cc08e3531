"""``mla-fusion explain``, ``lower``, ``inspect`` and ``diff``: graphs of functions, and of
dumps.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mla_fusion as mf
from mla_fusion.report import text_tables
from mla_fusion.tools.command import DYNAMIC, LIMITS, answer, command, function, option, show
from mla_fusion.tools.target import (
    UserError,
    existing,
    load_target,
    output,
    output_folder,
    target_or_dump,
    user_errors,
    writing,
)

_GRAPH = option("--graph", "which graph of a file that holds several", type=int, default=1)
_TARGETS = option("--targets", "operators that may be emitted, as Config.targets", nargs="+")


@command(
    function(
        "; its file is imported and runs. Or a dump of a graph, which is data: nothing in it runs",
        target_or_dump,
    ),
    DYNAMIC,
    *LIMITS,
    _TARGETS,
    option(
        "--pass-only",
        "judge as mf.torchair_pass does: no wrapper hands caches over in the kernel's shape",
        action="store_true",
    ),
    _GRAPH,
    option("--html", "also write the report as a page", type=output, metavar="FILE"),
)
def explain(arguments: Namespace) -> int:
    """Say for every MLA prologue why it would fuse or not.

    Exit status 1: a prologue is left, or none is there.
    """
    from mla_fusion.compile.device_graph import CaptureError, capture
    from mla_fusion.tools.dumps.model import DumpError, NotRebuilt

    graph, boundary = arguments.target, not arguments.pass_only
    with user_errors(CaptureError, DumpError, NotRebuilt):
        if not Path(graph).is_file():
            model, example = load_target(graph)
            graph, _ = capture(
                model, *example, device="cpu", dynamic=arguments.dynamic, as_backend=boundary
            )
        report = mf.explain(graph, _config(arguments), boundary=boundary, graph=arguments.graph)
    return answer(report, arguments, bool(report.fused) and not report.rejected)


def _config(arguments: Namespace, **more: Any) -> mf.Config:
    if arguments.targets:
        more["targets"] = arguments.targets
    with user_errors(ValueError):
        return mf.Config(soc=arguments.soc, cann=arguments.cann, **more)


@command(
    function(),
    DYNAMIC,
    *LIMITS,
    _TARGETS,
    option("--mode", choices=("ge", "npugraph_ex"), default="ge"),
    option("--no-fuse", "lower the graph as it is", action="store_true"),
    option("--out", "folder for the FX graphs, the pbtxt and the report", type=output_folder),
)
def lower(arguments: Namespace) -> int:
    """Fuse a function and lower it with the real torchair."""
    from mla_fusion.compile.offline import OfflineError
    from mla_fusion.tools.lowering import LoweringError

    model, example = load_target(arguments.target)
    config = _config(arguments, enable=not arguments.no_fuse)
    with user_errors(LoweringError, OfflineError):
        lowered = mf.lower(
            model, *example, mode=arguments.mode, dynamic=arguments.dynamic, config=config
        )
    operators = dict((lowered.ge_ops or lowered.fx_ops).most_common())
    files = []
    if arguments.out:
        with writing(arguments.out):
            files = lowered.save(arguments.out)
    if arguments.json:
        report = lowered.report and json.loads(lowered.report.to_json())
        data = {"mode": lowered.mode, "operators": operators, "files": files, "report": report}
        print(text_tables.as_json(data))
        return 0
    if lowered.report is not None:
        show(f"{lowered.report}\n")
    kind = "GE operator" if lowered.ge_ops else "FX operator"
    counts = [(text_tables.short_name(name), count) for name, count in operators.items()]
    show(text_tables.render((kind, "count"), counts))
    if files:
        print(f"\nwritten: {', '.join(map(str, files))}")
    return 0


@command(
    option("dumps", "pbtxt, txt, py or FX listing", type=existing, metavar="DUMP", nargs="+"),
    _GRAPH,
    option("--export", "also write one dump for Graphviz: .dot", type=output, metavar="FILE"),
)
def inspect(arguments: Namespace) -> int:
    """Say what stands in graphs that torchair or torch dumped."""
    from mla_fusion.tools.inspect.summary import summarise
    from mla_fusion.tools.inspect.viewers import ExportError, export

    dumps = [_read_dump(path, arguments.graph) for path in arguments.dumps]
    if arguments.export:
        if len(dumps) > 1:
            raise UserError("--export takes one dump")
        with user_errors(ExportError), writing(arguments.export):
            export(dumps[0], arguments.export)
        print(f"written: {arguments.export}", file=sys.stderr)
    summaries = [summarise(dump) for dump in dumps]
    if arguments.json:
        print(text_tables.as_json([asdict(summary) for summary in summaries]))
    else:
        show("\n\n\n".join(map(str, summaries)))
    return 0


@command(
    option("first", "a dump, or what selftest --out wrote", type=existing, metavar="A"),
    option("second", "what to compare it with", type=existing, metavar="B"),
    _GRAPH,
)
def diff(arguments: Namespace) -> int:
    """Compare two dumps by operators and wiring, not by names, or two texts of the self-test by
    lines.

    Exit status 1: they differ; what differs is listed.
    """
    from mla_fusion.tools.inspect import compare
    from mla_fusion.tools.selftest import HEADING

    paths = arguments.first, arguments.second
    texts = [path.read_bytes() for path in paths]
    difference: compare.Lines | compare.Difference
    if all(text.startswith(HEADING.encode()) for text in texts):
        difference = compare.diff_lines(*(text.decode(errors="replace") for text in texts))
    else:
        with user_errors(ValueError):
            difference = compare.diff(*(_read_dump(path, arguments.graph) for path in paths))
    return answer(difference, arguments, difference.equal)


def _read_dump(path: Path, graph: int) -> Any:
    from mla_fusion.tools.dumps import DumpError, read

    with user_errors(DumpError):
        return read(path, graph)


COMMANDS = (explain, lower, inspect, diff)
