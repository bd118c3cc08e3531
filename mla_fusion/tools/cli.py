"""The ``mla-fusion`` command. Functions import the modules that need torch, so help and messages
for wrong calls appear at once.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from inspect import getdoc
from pathlib import Path
from traceback import extract_tb
from typing import Any

import mla_fusion as mf
from mla_fusion import machine
from mla_fusion.report import text_tables
from mla_fusion.tools import installed
from mla_fusion.tools.target import (
    UserError,
    existing,
    known_name,
    load_target,
    output,
    output_folder,
    positive,
    target,
    target_or_dump,
    user_errors,
    writing,
)

Option = Callable[[ArgumentParser], object]  # adds an argument to a parser
Run = Callable[[Namespace], int]  # takes the parsed arguments, returns the exit status


EPILOG = """\
examples:
  mla-fusion demo                               layers of Hugging Face's DeepSeek-V3, fused
  mla-fusion doctor                             what is installed and what can be lowered here
  mla-fusion explain model.py:example           would this function's prologues fuse? if not, why?
  mla-fusion explain graph.txt                  the same of a graph that torchair or torch dumped
  mla-fusion lower model.py:example --out out   the graph that torchair would hand to an NPU
  mla-fusion inspect graph.pbtxt                a dump's prologues, copies and dynamic inputs
  mla-fusion diff before.pbtxt after.pbtxt      operators added and removed, whatever their names
  mla-fusion profile kernel_details.csv         what the prologue costs in a profile of an NPU
  mla-fusion audit hand.py:mine --reference model.py:example    does this call equal the model?
  mla-fusion check-model folder                 what of a Hugging Face checkpoint fuses
  mla-fusion selftest --out selftest.txt        on an NPU: every operator, against the reference

model.py:example names a function without arguments that returns (module_or_function, arguments);
a module does as well as a file: mla_fusion.examples.fuse_your_model:example is one to try.
The file is imported, so its code runs; a dump of a graph is data, and nothing that it names is run.

exit status: 0 fine; 1 something was found (a prologue left, a difference, a failed check);
2 a wrong call or bad input
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand, and returns the exit status: 0 fine, 1 something was found, 2 a wrong
    call or bad input.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            arguments = parser().parse_args(words)
            try:
                return int(arguments.run(arguments))
            except SystemExit as error:  # of code that the caller named
                text = f"the code that was run ended with sys.exit({error.code!r})"
                raise UserError(text) from error
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # reports a full disk before Python ends
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `mla-fusion ... | head` is no error
        _stop_writing()
        return 0
    except (UserError, OSError, ImportError) as error:
        print(f"mla-fusion {' '.join(words[:1])}: {_remedy(error)}", file=sys.stderr)
        return 2


def _remedy(error: Exception) -> str:
    """Returns in one line what the caller can correct. Raises the error if it is a defect of this
    package.
    """
    if isinstance(error, OSError) and error.strerror is not None:
        if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        _stop_writing()  # only a stream has no name
        return f"stdout: {error.strerror}"
    if installed.is_missing(error):
        return f"torch is not installed: {installed.TO_DO}"
    if isinstance(error, ImportError) and (error.name or "").startswith("mla_fusion"):
        raise error
    return str(error)


def _stop_writing() -> None:
    """Discards all further output to stdout, so that Python can end without an error."""
    # stdout is no file in a test or a notebook
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> ArgumentParser:
    """Returns the parser of the whole command line."""
    main_parser = Parser(
        prog="mla-fusion",
        formatter_class=RawDescriptionHelpFormatter,
        description="Fuse DeepSeek MLA prologues into the single Ascend NPU kernel. Needs no NPU "
        "and no CANN.",
        epilog=EPILOG,
    )
    main_parser.add_argument("--version", action="version", version=f"mla-fusion {mf.__version__}")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="command")
    for run, options in _COMMANDS:
        text = getdoc(run) or ""
        command_parser = commands.add_parser(
            run.__name__.replace("_", "-"),
            help=text.partition("\n\n")[0],
            description=" ".join(text.split()),
        )
        command_parser.set_defaults(run=run)
        for add in options:
            add(command_parser)
    return main_parser


def option(name: str, text: str | None = None, **kind: Any) -> Option:
    """Returns an option of a command. ``text`` is its help, ``kind`` what argparse takes."""
    return lambda parser: parser.add_argument(name, help=text, **kind)


def function(more: str = "") -> Option:
    """Returns the argument for the function that a command reads. ``more`` ends its help."""
    text = f"function that returns (module_or_function, arguments){more}"
    return option("target", text, metavar="FILE.py:FUNCTION")


DYNAMIC = option("--dynamic", "symbolic sizes, as torch.compile(dynamic=True)", action="store_true")
LIMITS = (
    option(
        "--soc",
        "chip, as A2 or 910B, whose limits hold; by default the NPU's, without an NPU A3",
        type=partial(known_name, machine.soc_named),
        default=machine.AUTO,
    ),
    option(
        "--cann",
        "CANN release, as 8.5 or 9.1, whose limits hold; by default the NPU's, without an NPU "
        "the newest",
        type=partial(known_name, machine.release_named),
        default=machine.AUTO,
    ),
)


class Parser(ArgumentParser):
    """Raises OSError if help cannot be written; argparse is silent then."""

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message or "", end="", file=file or sys.stderr)


JSON = option("--json", "print JSON on stdout", action="store_true")
_COMMANDS: list[tuple[Run, Sequence[Option]]] = []


def command(*options: Option) -> Callable[[Run], Run]:
    """Returns a decorator: it adds a function to the commands.

    The first paragraph of the function's docstring is its line in the list of commands; the whole
    docstring is the command's help.
    """

    def add_command(run: Run) -> Run:
        """Adds the function, and returns it."""
        _COMMANDS.append((run, options))
        return run

    return add_command


def show(text: object) -> None:
    """Prints text for people, with each control character as its escape: dumps have names, too."""
    letters = (
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
        for letter in str(text)
    )
    print("".join(letters))


def write(path: Path, writer: Callable[[Path], object]) -> None:
    """Has ``writer`` write a file, and reports on stderr that it is written.

    If it cannot be finished, what stood there stays.
    """
    with writing(path):
        if path.exists() and not path.is_file():  # such as /dev/stdout
            writer(path)
        else:
            part = path.with_name(f"part of {path.name}")
            try:
                writer(part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
    print(f"written: {path}", file=sys.stderr)


def answer(outcome: Any, arguments: Namespace, is_fine: bool) -> int:
    """Prints an outcome as text or JSON, and returns the exit status."""
    print(outcome.to_json()) if arguments.json else show(outcome)
    return 0 if is_fine else 1


@command(
    JSON,
    option(
        "--out",
        "folder for the report and the graphs",
        type=output_folder,
        default=Path("out"),
    ),
    option("--layers", type=positive, default=2),
    option("--heads", "heads of one rank (128 / TP)", type=positive, default=16),
    option("--batch", "sequences decoded at once", type=positive, default=8),
    option("--quick", "He 1024, a short history and a narrow MLP", action="store_true"),
)
def demo(arguments: Namespace) -> int:
    """Decode Hugging Face's DeepSeek-V3 fused and unfused, compare, and lower."""
    from mla_fusion.models.hf import TransformersMissing
    from mla_fusion.tools import demo

    options = demo.Options(arguments.out, arguments.layers, arguments.heads, arguments.batch)
    with user_errors(TransformersMissing), writing(arguments.out):
        outcome = demo.run(options.quick() if arguments.quick else options)
    return answer(outcome, arguments, not outcome.problems)


@command(JSON)
def doctor(arguments: Namespace) -> int:
    """Say what is installed, and which operators can be lowered here.

    Exit status 1: something is in the way; it is listed with what to do.
    """
    facts = installed.without_torch()
    if facts is None:
        from mla_fusion.tools import doctor

        facts = doctor.survey()
    print(text_tables.as_json(facts)) if arguments.json else show("\n".join(_lines(facts)))
    return 1 if facts["problems"] else 0


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the doctor's text."""
    for title, part in facts.items():
        if title == "problems":
            for problem in part:
                yield f"problem with {problem['check']}: {problem['failed']}"
                yield f"  to do: {problem['to do']}"
        elif isinstance(part, dict):
            yield f"{title}:"
            yield from (f"  {name}: {_words(value)}" for name, value in part.items())
        else:
            yield f"{title}: {_words(part)}"


def _words(value: Any) -> str:
    """Returns one of the doctor's facts as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(part)}" for name, part in value.items())
    return "none" if value is None else str(value)


@command(
    JSON,
    option("folder", "checkpoint folder: config.json, and weights for --tokens", type=Path),
    option(
        "--prepack", "say what mla_fusion.prepack would lay out in a layer", action="store_true"
    ),
    option(
        "--tokens",
        "load the weights, generate so many tokens and compare",
        type=positive,
        default=0,
    ),
    option(
        "--dtype",
        "of the weights for --tokens (in the narrow ones, tokens may differ by rounding)",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
    ),
)
def check_model(arguments: Namespace) -> int:
    """Say what of a Hugging Face checkpoint can decode absorbed and be fused; with --tokens, try
    it.

    It writes nothing. Exit status 1: nothing can be converted, or tokens differ.
    """
    if not arguments.folder.is_dir():
        raise UserError(f"no such folder: {arguments.folder}")
    from mla_fusion.models.hf import TransformersMissing
    from mla_fusion.tools import check_model

    with user_errors(TransformersMissing):
        outcome = check_model.run(arguments)
    return answer(outcome, arguments, outcome.is_fine)


_GRAPH = option("--graph", "which graph of a file that holds several", type=int, default=1)
_TARGETS = option("--targets", "operators that may be emitted, as Config.targets", nargs="+")


@command(
    JSON,
    function(
        "; its file is imported and runs. Or a dump of a graph, which is data: nothing in it runs"
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
    target_or_dump(arguments.target)
    from mla_fusion.compile.device_graph import CaptureError, capture
    from mla_fusion.tools.dumps.model import DumpError, NotRebuilt

    graph, boundary = arguments.target, not arguments.pass_only
    with user_errors(CaptureError, DumpError, NotRebuilt):
        if not Path(graph).is_file():
            if arguments.graph != 1:
                raise UserError(f"--graph {arguments.graph} is for a file of several graphs")
            model, example = load_target(graph)
            graph, _ = capture(
                model, *example, device="cpu", dynamic=arguments.dynamic, as_backend=boundary
            )
        elif arguments.dynamic:
            raise UserError("--dynamic is for a function: the sizes of a dump are in it")
        report = mf.explain(graph, _config(arguments), boundary=boundary, graph=arguments.graph)
    status = answer(report, arguments, bool(report.fused) and not report.rejected)
    if arguments.html:
        write(arguments.html, report.to_html)
    return status


def _config(arguments: Namespace, **more: Any) -> mf.Config:
    """Returns the configuration that the arguments and ``more`` name."""
    if arguments.targets:
        more["targets"] = arguments.targets
    with user_errors(ValueError):
        return mf.Config(soc=arguments.soc, cann=arguments.cann, **more)


@command(
    JSON,
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
    target(arguments.target)
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
    JSON,
    option("dumps", "pbtxt, txt, py or FX listing", metavar="DUMP", nargs="+"),
    _GRAPH,
    option("--export", "also write one dump for Graphviz: .dot", type=output, metavar="FILE"),
)
def inspect(arguments: Namespace) -> int:
    """Say what stands in graphs that torchair or torch dumped."""
    dumps = _read_dumps(arguments.dumps, arguments.graph)
    from mla_fusion.tools.inspect.summary import summarise
    from mla_fusion.tools.inspect.viewers import ExportError, export

    if arguments.export:
        if len(dumps) > 1:
            raise UserError("--export takes one dump")
        with user_errors(ExportError):
            write(arguments.export, partial(export, dumps[0]))
    summaries = [summarise(dump) for dump in dumps]
    if arguments.json:
        print(text_tables.as_json([asdict(summary) for summary in summaries]))
    else:
        show("\n\n\n".join(map(str, summaries)))
    return 0


@command(
    JSON,
    option("first", "a dump", metavar="A"),
    option("second", "the dump to compare it with", metavar="B"),
    _GRAPH,
)
def diff(arguments: Namespace) -> int:
    """Compare two dumps by operators and wiring, not by names.

    Exit status 1: they differ; what differs is listed.
    """
    dumps = _read_dumps((arguments.first, arguments.second), arguments.graph)
    from mla_fusion.tools.inspect import compare

    with user_errors(ValueError):
        difference = compare.diff(*dumps)
    return answer(difference, arguments, difference.equal)


def _read_dumps(names: Sequence[str], graph: int) -> list[Any]:
    """Returns the dumps in files. Raises UserError."""
    paths = [*map(existing, names)]
    from mla_fusion.tools.dumps import DumpError, read

    with user_errors(DumpError):
        return [read(path, graph) for path in paths]


@command(
    JSON,
    function("; its file is imported and runs"),
    option(
        "--reference",
        "one that returns (unfused_model, arguments)",
        metavar="FILE.py:FUNCTION",
    ),
    *LIMITS,
    option(
        "--path",
        "how the calls reach the device",
        choices=("eager", "graph"),
        default="eager",
    ),
)
def audit(arguments: Namespace) -> int:
    """Check hand-written calls of the operators; with --reference, against the model that they
    stand for.

    Exit status 1: something is wrong with a call.
    """
    for name in filter(None, (arguments.target, arguments.reference)):
        target(name)
    from mla_fusion.compile.device_graph import CaptureError, check_arguments

    with user_errors(ValueError, CaptureError):
        limits = mf.Config(soc=arguments.soc, cann=arguments.cann).machine
        model, example = load_target(arguments.target)
        reference = load_target(arguments.reference)[0] if arguments.reference else None
        for called in (model, reference):
            if called is not None:
                check_arguments(called, example)
        with _running_user_code():
            outcome = mf.audit(
                model,
                reference,
                *example,
                path=arguments.path,
                soc=limits.soc,
                cann=limits.cann,
            )
    return answer(outcome, arguments, outcome.ok)


@contextmanager
def _running_user_code() -> Iterator[None]:
    """Raises UserError, with the line, for an exception that the user's code raises. What the code
    prints goes to stderr.
    """
    import torch

    try:
        with redirect_stdout(sys.stderr):
            yield
    except ValueError:  # its message says all
        raise
    except Exception as error:
        frames = extract_tb(error.__traceback__)
        ours, torchs = (str(Path(str(package.__file__)).parent) for package in (mf, torch))
        users = [frame for frame in frames if not frame.filename.startswith((ours, torchs))]
        if not users or frames[-1].filename.startswith(ours):  # a defect of the audit
            raise
        where = f"{users[-1].filename}:{users[-1].lineno} in {users[-1].name}: {users[-1].line}"
        raise UserError(
            f"the function fails when it is run: {type(error).__name__}: {error}\n  at {where}"
        ) from error


@command(
    JSON,
    option("after", "kernel_details.csv or op_summary_*.csv, with the pass on", metavar="AFTER"),
    option("--before", "the same with the pass off", metavar="BEFORE"),
)
def profile(arguments: Namespace) -> int:
    """Say what the prologue costs in a profile of an NPU; with --before, what a fusion changed.

    Exit status 1: no fused prologue is in it.
    """
    from mla_fusion.tools.profile import Comparison, summarise

    paths = [existing(path) for path in (arguments.after, arguments.before) if path]
    outcome = Comparison(*map(summarise, paths))
    return answer(outcome, arguments, bool(outcome.after.prologue))


@command(
    option("--out", "write it to a file instead, AGENTS.md for one", type=output, metavar="FILE"),
)
def guide(arguments: Namespace) -> int:
    """Print how to write a call of the operator by hand, for people and for agents that write
    code.
    """
    folder = files("mla_fusion") / "tools" / "by_hand"  # importing it would load torch
    parts = (folder / name for name in ("guide.md", "guide_more.md"))
    text = "\n".join(part.read_text(encoding="utf-8") for part in parts)
    if arguments.out is None:
        print(text, end="")
    else:
        write(arguments.out, lambda path: path.write_text(text, encoding="utf-8"))
    return 0


@command(
    JSON,
    option("--device", "default: an NPU where there is one", choices=("npu", "cpu")),
    *LIMITS,
    option("--only", "checks whose name matches", default="*", metavar="PATTERN"),
    option("--out", "also write the text to a file, to mail", type=output, metavar="FILE"),
)
def selftest(arguments: Namespace) -> int:
    """Check the operators and the pass on this device against the references.

    Exit status 1: a check failed.
    """
    from mla_fusion.tools import selftest
    from mla_fusion.tools.selftest.device import choose

    outcome = selftest.run(
        choose(arguments.device, arguments.soc, arguments.cann),
        arguments.only,
        lambda check: print(f"{check.name} ({check.through})", file=sys.stderr, flush=True),
    )
    if not outcome.results:
        raise UserError(f"no check matches {arguments.only!r}")
    if arguments.out:
        with writing(arguments.out):
            arguments.out.write_text(f"{outcome}\n", encoding="utf-8")
    return answer(outcome, arguments, not outcome.failed)
