"""The ``mla-fusion`` command. Its help and its words for wrong calls need no torch, so they come at
once.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mla_fusion as mf
from mla_fusion.report import text_tables
from mla_fusion.tools import checks_cli, graphs_cli, installed, terminal
from mla_fusion.tools.command import DYNAMIC, Command, answer, function, option
from mla_fusion.tools.target import (
    UserError,
    folder,
    load_target,
    output_folder,
    positive,
    target,
    user_errors,
    writing,
)

EPILOG = """\
examples:
  mla-fusion demo                               layers of Hugging Face's DeepSeek-V3, fused
  mla-fusion doctor                             what is installed and what can be lowered here
  mla-fusion explain model.py:example           would this function's prologues fuse? if not, why?
  mla-fusion explain graph.txt                  the same of a graph that torchair or torch dumped
  mla-fusion lower model.py:example --out out   the graph that torchair would hand to an NPU
  mla-fusion inspect graph.pbtxt                a dump's prologues, copies and dynamic inputs
  mla-fusion diff before.pbtxt after.pbtxt      operators added and removed, whatever their names
  mla-fusion audit hand.py:mine --reference model.py:example    does this call equal the model?
  mla-fusion check-proof report.json            is what a report says is proved so? needs no torch
  mla-fusion check-model folder                 what of a Hugging Face checkpoint fuses
  mla-fusion selftest --out selftest.txt        on an NPU: every operator, against the reference

model.py:example names a function without arguments that returns (module_or_function, arguments); \
a module that can be imported does as well as a file: \
mla_fusion.examples.fuse_your_model:example is one to try. The file is imported, so its code runs; \
a dump of a graph is data, and nothing that it names is run.

exit status: 0 fine; 1 something was found (a prologue left, a difference, a failed check); \
2 a wrong call or bad input
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status: 0 fine, 1 something was found, 2 a wrong call or bad
    input.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            arguments = parser().parse_args(words)
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk is told here, not while Python ends
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `mla-fusion ... | head` is no error
        _stop_writing()
        return 0
    except (UserError, OSError, ImportError) as error:
        said = _said(error)
        if said is None:
            raise
        print(f"mla-fusion {' '.join(words[:1])}: {said}", file=sys.stderr)
        return 2


def _run(arguments: Namespace) -> int:
    try:
        status: int = arguments.run(arguments)
    except SystemExit as error:  # of code that the caller named
        raise UserError(f"the code that was run ended with sys.exit({error.code!r})") from error
    return status


def _said(error: Exception) -> str | None:
    """In one line what the caller can put right; None for a defect of this package."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ImportError):
        if installed.is_missing(error):
            return f"torch is not installed: {installed.TO_DO}"
        return None if (error.name or "").startswith("mla_fusion") else str(error)
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:  # of what is written through a stream that has no name
        _stop_writing()
    return f"{error.filename if error.filename is not None else 'stdout'}: {error.strerror}"


def _stop_writing() -> None:
    """Let nothing more be written to a stdout that takes nothing, not even when Python ends."""
    # a stdout of no file, in a test or a notebook
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> ArgumentParser:
    """Of the whole command line."""
    whole = terminal.Parser(
        prog="mla-fusion",
        description="Fuse DeepSeek MLA prologues into the single Ascend NPU kernel. Needs no NPU "
        "and no CANN.",
        epilog=EPILOG,
    )
    whole.add_argument("--version", action="version", version=f"mla-fusion {mf.__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    for command in (*_FIRST, *graphs_cli.COMMANDS, *checks_cli.COMMANDS, *_LAST):
        command.add(commands)
    return whole


def _demo(arguments: Namespace) -> int:
    from mla_fusion.models.hf import TransformersMissing
    from mla_fusion.tools import demo

    options = demo.Options(arguments.out, arguments.layers, arguments.heads, arguments.batch)
    with user_errors(TransformersMissing), writing(arguments.out):
        outcome = demo.run(options.quick() if arguments.quick else options)
    return answer(outcome, arguments, not outcome.problems)


def _check_model(arguments: Namespace) -> int:
    arguments.folder = folder(arguments.folder)
    from mla_fusion.models import hf
    from mla_fusion.tools import check_model

    with user_errors(check_model.CheckpointError, hf.TransformersMissing):
        found = check_model.run(arguments)
    return answer(found, arguments, found.is_fine)


def _doctor(arguments: Namespace) -> int:
    found = installed.without_torch()
    if found is None:
        from mla_fusion.tools import doctor

        found = doctor.survey()
    if arguments.json:
        print(text_tables.as_json(found))
    else:
        terminal.show("\n\n".join(_parts(found)))
    return 1 if found["problems"] else 0


def _parts(found: dict[str, Any]) -> Iterator[str]:
    for title, part in found.items():
        if title == "problems":
            continue
        if not isinstance(part, dict):
            yield f"{title}: {_word(part)}"
            continue
        nested = [value for value in part.values() if isinstance(value, dict)]
        header = ("", *nested[0]) if nested else ("", "")
        rows = [
            (name, *map(_word, value.values() if isinstance(value, dict) else (value,)))
            for name, value in part.items()
        ]
        yield f"{title}\n{text_tables.render(header, rows)}"
    for problem in found["problems"]:
        yield f"problem with {problem['check']}: {problem['failed']}\n  to do: {problem['to do']}"


def _word(value: Any) -> str:
    words = {None: "none", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _bench(arguments: Namespace) -> int:
    if arguments.target:
        target(arguments.target)
    from mla_fusion.compile.device_graph import CaptureError, capture
    from mla_fusion.tools import bench

    graphs: dict[str, Callable[[], Any]]
    if arguments.target:
        model, example = load_target(arguments.target)
        graphs = {
            arguments.target: partial(
                capture, model, *example, device="cpu", dynamic=arguments.dynamic
            )
        }
    else:
        graphs = {f"{layers} layers": partial(bench.decoder, layers) for layers in arguments.layers}
    timings = []
    for name, graph in graphs.items():
        print(f"{name}: {arguments.repeats} runs ..", file=sys.stderr, flush=True)
        with user_errors(CaptureError):
            timings.append(bench.measure(name, graph()[0], mf.Config(), arguments.repeats))
    return answer(bench.Timings(timings), arguments, True)


_FIRST = (
    Command(
        "demo",
        _demo,
        "Decode Hugging Face's DeepSeek-V3 fused and unfused, compare, and lower.",
        options=(
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
        ),
    ),
    Command(
        "doctor",
        _doctor,
        "Say what is installed, and which operators can be lowered here.",
        "Exit status 1: something is in the way; it is listed with what to do.",
    ),
)
_LAST = (
    Command(
        "bench",
        _bench,
        "Time the pass on plain decoders of growing depth, or on your graph.",
        "It times the compilation, not the model.",
        (
            function(nargs="?"),
            DYNAMIC,
            option("--layers", type=positive, nargs="+", default=[1, 8, 61]),
            option("--repeats", type=positive, default=3),
        ),
    ),
    Command(
        "check-model",
        _check_model,
        "Say what of a Hugging Face checkpoint can decode absorbed and be fused; with --tokens, "
        "try it.",
        "It writes nothing. Exit status 1: nothing can be converted, or tokens differ.",
        (
            option("folder", "checkpoint folder: config.json, and weights for --tokens"),
            option(
                "--prepack",
                "say what mla_fusion.prepack would lay out in a layer",
                action="store_true",
            ),
            option(
                "--tokens",
                "load the weights, generate so many tokens and compare",
                type=int,
                default=0,
            ),
            option(
                "--dtype",
                "of the weights for --tokens (in the narrow ones, tokens may differ by rounding)",
                choices=("float32", "bfloat16", "float16"),
                default="float32",
            ),
        ),
        aliases=("optimize",),
    ),
)
