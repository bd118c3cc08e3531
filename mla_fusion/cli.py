"""The ``mla-fusion`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mla_fusion as mf
from mla_fusion.target import UserError, load_target, positive

EXAMPLES = """\
examples:
  mla-fusion demo                               DeepSeek-V3 layers of Hugging Face, fused and unfused
  mla-fusion doctor                             what is installed and what can be lowered here
  mla-fusion explain model.py:example           would the prologues of this function fuse, and if not, why?
  mla-fusion explain graph.txt                  the same of a graph that torchair or torch dumped
  mla-fusion lower model.py:example --out out   the graph that torchair would hand to an NPU
  mla-fusion inspect graph.pbtxt                prologues, copies of caches and weights, dynamic inputs of a dump
  mla-fusion diff before.pbtxt after.pbtxt      operators added and removed, whatever their names
  mla-fusion audit hand.py:mine --reference model.py:example    does this hand-written call equal the model?
  mla-fusion optimize folder                    what of a Hugging Face checkpoint decodes absorbed, and what fuses
  mla-fusion selftest --out selftest.json       on an NPU: every scenario of the operator against the reference

model.py:example names a function without arguments that returns (module_or_function, arguments).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status: 0 done, 1 a check failed or nothing fused, 2 bad input."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        return status
    except UserError as error:
        print(f"mla-fusion {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `mla-fusion ... | head` is no error
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    command = argparse.ArgumentParser(
        prog="mla-fusion",
        description="Fuse DeepSeek MLA prologues into the single Ascend NPU kernel. Needs no NPU and no CANN.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--version", action="version", version=f"mla-fusion {mf.__version__}")
    commands = command.add_subparsers(dest="command", required=True, metavar="command")
    _add_demo(commands)
    _add_doctor(commands)
    _add_explain(commands)
    _add_lower(commands)
    _add_inspect(commands)
    _add_diff(commands)
    _add_by_hand(commands)
    _add_selftest(commands)
    _add_bench(commands)
    _add_optimize(commands)
    return command


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> Any:
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    return parser


# -- demo


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands, "demo", _demo, "Decode Hugging Face's DeepSeek-V3 fused and unfused, compare, and lower."
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the report and the graphs")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--heads", type=positive, default=16, help="heads of one rank (128 / TP)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences decoded at once")
    parser.add_argument("--quick", action="store_true", help="He 1024, a short history and a narrow MLP")


def _demo(arguments: argparse.Namespace) -> int:
    from mla_fusion import demo
    from mla_fusion.models.hf import TransformersMissing

    options = demo.Options(arguments.out, arguments.layers, arguments.heads, arguments.batch)
    try:
        outcome = demo.run(options.quick() if arguments.quick else options)
    except (TransformersMissing, FileExistsError, PermissionError) as error:
        raise UserError(str(error)) from error
    print(outcome.to_json() if arguments.json else outcome)
    return 1 if outcome.problems else 0


# -- optimize


def _add_optimize(commands: Any) -> None:
    from mla_fusion.models.hf import optimize_cli

    summary = "Say what of a Hugging Face checkpoint can decode absorbed and be fused; with --tokens, try it."
    optimize_cli.add_arguments(_command(commands, "optimize", _optimize, summary))


def _optimize(arguments: argparse.Namespace) -> int:
    from mla_fusion.models import hf
    from mla_fusion.models.hf import optimize_cli

    try:
        return optimize_cli.run(arguments)
    except (optimize_cli.CheckpointError, hf.TransformersMissing) as error:
        raise UserError(str(error)) from error


# -- doctor


def _add_doctor(commands: Any) -> None:
    _command(commands, "doctor", _doctor, "Say what is installed, and which operators can be lowered here.")


def _doctor(arguments: argparse.Namespace) -> int:
    from mla_fusion.compile import doctor
    from mla_fusion.report import text_tables

    found = doctor.survey()
    problems = found["problems"]
    if arguments.json:
        print(json.dumps(found, indent=2, default=str))
        return 1 if problems else 0
    for title, part in found.items():
        if title == "problems":
            continue
        if not isinstance(part, dict):
            print(f"{title}: {_word(part)}\n")
            continue
        nested = [value for value in part.values() if isinstance(value, dict)]
        header = ("", *nested[0]) if nested else ("", "")
        rows = [
            (name, *map(_word, value.values() if isinstance(value, dict) else (value,)))
            for name, value in part.items()
        ]
        print(f"{title}\n{text_tables.render(header, rows)}\n")
    for problem in problems:
        print(f"problem with {problem['check']}: {problem['failed']}\n  to do: {problem['to do']}\n")
    return 1 if problems else 0


def _word(value: Any) -> str:
    words = {None: "none", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


# -- explain


def _add_explain(commands: Any) -> None:
    parser = _command(commands, "explain", _explain, "Say for every MLA prologue why it would fuse or not.")
    _add_target(parser, ", or a dump of a graph")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as a page")
    parser.add_argument("--stats", action="store_true", help="calls, hits and milliseconds of each fact and rule")


def _explain(arguments: argparse.Namespace) -> int:
    from mla_fusion.fx.measured import measuring
    from mla_fusion.report import text_tables

    with measuring() as tallies:
        report = _explain_dump(arguments.target) if Path(arguments.target).is_file() else _explain_function(arguments)
    print(report.to_json() if arguments.json else report)
    if arguments.stats:
        rows = [(name, t.calls, t.hits, f"{t.seconds * 1e3:.1f}") for name, t in tallies.items()]
        rows.sort(key=lambda row: -float(row[-1]))
        print(text_tables.render(("fact or rule", "calls", "hits", "ms"), rows), file=sys.stderr)
    if arguments.html:
        print(f"written: {report.to_html(arguments.html)}", file=sys.stderr)
    return 0 if report.fused else 1


def _explain_function(arguments: argparse.Namespace) -> mf.Report:
    from mla_fusion.compile.device_graph import CaptureError, capture

    target, example = load_target(arguments.target)
    try:
        gm, _ = capture(target, *example, device="cpu", dynamic=arguments.dynamic)
    except CaptureError as error:
        raise UserError(str(error)) from error
    return mf.explain(gm)


def _explain_dump(path: str) -> mf.Report:
    from mla_fusion.inspect import DumpError, NotRebuilt

    try:
        return mf.explain(path)
    except (DumpError, NotRebuilt, OSError) as error:
        raise UserError(str(error)) from error


# -- lower


def _add_lower(commands: Any) -> None:
    parser = _command(commands, "lower", _lower, "Fuse a function and lower it with the real torchair.")
    _add_target(parser)
    parser.add_argument("--mode", choices=("ge", "npugraph_ex"), default="ge")
    parser.add_argument("--no-fuse", action="store_true", help="lower the graph as it is")
    parser.add_argument("--out", type=Path, help="folder for the FX graphs, the pbtxt and the report")


def _lower(arguments: argparse.Namespace) -> int:
    from mla_fusion.compile.lowering import LoweringError
    from mla_fusion.compile.offline import OfflineError
    from mla_fusion.report import text_tables

    target, example = load_target(arguments.target)
    config = mf.Config(enable=not arguments.no_fuse)
    try:
        lowered = mf.lower(target, *example, mode=arguments.mode, dynamic=arguments.dynamic, config=config)
    except (LoweringError, OfflineError, ImportError) as error:
        raise UserError(str(error)) from error
    operators = dict((lowered.ge_ops or lowered.fx_ops).most_common())
    files = [str(path) for path in lowered.save(arguments.out)] if arguments.out else []
    if arguments.json:
        report = json.loads(lowered.report.to_json()) if lowered.report else None
        print(json.dumps({"mode": lowered.mode, "operators": operators, "files": files, "report": report}, indent=2))
        return 0
    if lowered.report is not None:
        print(f"{lowered.report}\n")
    kind = "GE operator" if lowered.ge_ops else "FX operator"
    counts = [(text_tables.short_name(name), count) for name, count in operators.items()]
    print(text_tables.render((kind, "count"), counts))
    if files:
        print(f"\nwritten: {', '.join(files)}")
    return 0


# -- inspect, diff


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", _inspect, "Say what stands in graphs that torchair or torch dumped.")
    parser.add_argument("dumps", metavar="DUMP", type=Path, nargs="+", help="pbtxt, txt, py or FX listing")
    parser.add_argument("--export", type=Path, metavar="FILE", help="also write one dump: .dot, .svg, .json or .pbtxt")


def _inspect(arguments: argparse.Namespace) -> int:
    from mla_fusion.inspect import ExportError, export, summarise

    dumps = [_read_dump(path) for path in arguments.dumps]
    if arguments.export and len(dumps) > 1:
        raise UserError("--export takes one dump")
    if arguments.export:
        try:
            print(f"written: {export(dumps[0], arguments.export)}", file=sys.stderr)
        except (ExportError, OSError) as error:
            raise UserError(str(error)) from error
    found = [summarise(dump) for dump in dumps]
    if arguments.json:
        print(json.dumps([json.loads(item.to_json()) for item in found], indent=2))
    else:
        print("\n\n\n".join(map(str, found)))
    return 0


def _add_diff(commands: Any) -> None:
    summary = "Compare two dumps by operators and wiring, not by names. Exit status 0: equal, 1: different."
    parser = _command(commands, "diff", _diff, summary)
    parser.add_argument("first", metavar="A", type=Path)
    parser.add_argument("second", metavar="B", type=Path)


def _diff(arguments: argparse.Namespace) -> int:
    from mla_fusion.inspect import diff

    try:
        found = diff(_read_dump(arguments.first), _read_dump(arguments.second))
    except ValueError as error:
        raise UserError(str(error)) from error
    print(found.to_json() if arguments.json else found)
    return 0 if found.equal else 1


def _read_dump(path: Path) -> Any:
    from mla_fusion.inspect import DumpError, read

    try:
        return read(path)
    except (DumpError, OSError) as error:
        raise UserError(str(error)) from error


# -- audit, guide


def _add_by_hand(commands: Any) -> None:
    from mla_fusion import audit_cli

    audit_cli.add(commands, _command)


# -- selftest


def _add_selftest(commands: Any) -> None:
    from mla_fusion import selftest_cli

    selftest_cli.add(commands, _command)


# -- bench


def _add_bench(commands: Any) -> None:
    parser = _command(commands, "bench", _bench, "Time the pass on plain decoders of growing depth, or on your graph.")
    parser.add_argument(
        "target", nargs="?", metavar="FILE.py:FUNCTION", help="function that returns (module_or_function, arguments)"
    )
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes, as torch.compile(dynamic=True)")
    parser.add_argument("--layers", type=positive, nargs="+", default=[1, 8, 61])
    parser.add_argument("--hidden", type=positive, default=7168, help="He")
    parser.add_argument("--heads", type=positive, default=16, help="heads of one rank (128 / TP)")
    parser.add_argument("--repeats", type=positive, default=3)


def _bench(arguments: argparse.Namespace) -> int:
    from mla_fusion import bench
    from mla_fusion.compile.device_graph import CaptureError, capture

    try:
        if arguments.target:
            target, example = load_target(arguments.target)
            graphs = {arguments.target: capture(target, *example, device="cpu", dynamic=arguments.dynamic)[0]}
        else:
            depths = [(f"{layers} layers", layers) for layers in arguments.layers]
            graphs = {name: bench.decoder_graph(count, arguments.hidden, arguments.heads) for name, count in depths}
    except CaptureError as error:
        raise UserError(str(error)) from error
    timings = [bench.measure(name, gm, mf.Config(), arguments.repeats) for name, gm in graphs.items()]
    print(bench.to_json(timings) if arguments.json else bench.text(timings))
    return 0


# -- targets


def _add_target(parser: Any, more: str = "") -> None:
    parser.add_argument(
        "target", metavar="FILE.py:FUNCTION", help=f"function that returns (module_or_function, arguments){more}"
    )
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes, as torch.compile(dynamic=True)")


if __name__ == "__main__":
    sys.exit(main())
