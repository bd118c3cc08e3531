"""``mla-fusion explain``, ``lower``, ``inspect`` and ``diff``: graphs of functions, and of
dumps.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import mla_fusion as mf
from mla_fusion.tools.command import DYNAMIC, Command, answer, function, option, page, show
from mla_fusion.tools.target import (
    UserError,
    add_limits,
    existing,
    load_target,
    output,
    output_folder,
    target,
    target_or_dump,
    user_errors,
    writing,
)


def _explain(arguments: Namespace) -> int:
    target_or_dump(arguments.target)
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


def _lower(arguments: Namespace) -> int:
    target(arguments.target)
    from mla_fusion.compile.offline import OfflineError
    from mla_fusion.report import text_tables
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
            files = [str(path) for path in lowered.save(arguments.out)]
    if arguments.json:
        report = json.loads(lowered.report.to_json()) if lowered.report else None
        data = {"mode": lowered.mode, "operators": operators, "files": files, "report": report}
        print(json.dumps(data, indent=2))
        return 0
    if lowered.report is not None:
        show(f"{lowered.report}\n")
    kind = "GE operator" if lowered.ge_ops else "FX operator"
    counts = [(text_tables.short_name(name), count) for name, count in operators.items()]
    show(text_tables.render((kind, "count"), counts))
    if files:
        print(f"\nwritten: {', '.join(files)}")
    return 0


def _inspect(arguments: Namespace) -> int:
    paths = [existing(dump) for dump in arguments.dumps]
    from mla_fusion.tools.inspect.summary import summarise
    from mla_fusion.tools.inspect.viewers import ExportError, export

    dumps = [_read_dump(path, arguments.graph) for path in paths]
    if arguments.export and len(dumps) > 1:
        raise UserError("--export takes one dump")
    if arguments.export:
        with user_errors(ExportError), writing(arguments.export):
            export(dumps[0], arguments.export)
        print(f"written: {arguments.export}", file=sys.stderr)
    found = [summarise(dump) for dump in dumps]
    if arguments.json:
        print(json.dumps([json.loads(item.to_json()) for item in found], indent=2))
    else:
        show("\n\n\n".join(map(str, found)))
    return 0


def _diff(arguments: Namespace) -> int:
    first, second = existing(arguments.first), existing(arguments.second)
    from mla_fusion.tools.inspect.compare import diff, diff_lines
    from mla_fusion.tools.selftest import HEADING

    texts = [path.read_bytes() for path in (first, second)]
    if all(text.startswith(HEADING.encode()) for text in texts):
        lines = diff_lines(*(text.decode(errors="replace") for text in texts))
        return answer(lines, arguments, lines.equal)
    with user_errors(ValueError):
        found = diff(_read_dump(first, arguments.graph), _read_dump(second, arguments.graph))
    return answer(found, arguments, found.equal)


def _read_dump(path: Path, graph: int) -> Any:
    from mla_fusion.tools.dumps import DumpError, read

    with user_errors(DumpError):
        return read(path, graph)


_GRAPH = option("--graph", "which graph of a file that holds several", type=int, default=1)
_TARGETS = option("--targets", "operators that may be emitted, as Config.targets", nargs="+")
COMMANDS = (
    Command(
        "explain",
        _explain,
        "Say for every MLA prologue why it would fuse or not.",
        "Exit status 1: a prologue is left, or none is there.",
        (
            function(
                "; its file is imported and runs. Or a dump of a graph, which is data: nothing in "
                "it runs"
            ),
            DYNAMIC,
            add_limits,
            _TARGETS,
            option(
                "--pass-only",
                "judge as mf.torchair_pass does: no wrapper hands caches over in the kernel's "
                "shape",
                action="store_true",
            ),
            _GRAPH,
            page("also write the report as a page"),
        ),
    ),
    Command(
        "lower",
        _lower,
        "Fuse a function and lower it with the real torchair.",
        options=(
            function(),
            DYNAMIC,
            add_limits,
            _TARGETS,
            option("--mode", choices=("ge", "npugraph_ex"), default="ge"),
            option("--no-fuse", "lower the graph as it is", action="store_true"),
            option(
                "--out", "folder for the FX graphs, the pbtxt and the report", type=output_folder
            ),
        ),
    ),
    Command(
        "inspect",
        _inspect,
        "Say what stands in graphs that torchair or torch dumped.",
        options=(
            option("dumps", "pbtxt, txt, py or FX listing", metavar="DUMP", nargs="+"),
            _GRAPH,
            option(
                "--export", "also write one dump for Graphviz: .dot", type=output, metavar="FILE"
            ),
        ),
    ),
    Command(
        "diff",
        _diff,
        "Compare two dumps by operators and wiring, not by names, or two texts of the self-test by "
        "lines.",
        "Exit status 1: they differ; what differs is listed.",
        (
            option("first", "a dump, or what selftest --out wrote", metavar="A"),
            option("second", "what to compare it with", metavar="B"),
            _GRAPH,
        ),
    ),
)
