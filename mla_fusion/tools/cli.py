"""The ``mla-fusion`` command. Its help and its words for wrong calls need no torch, so they come at
once.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mla_fusion as mf
from mla_fusion import _gone
from mla_fusion.report import text_tables
from mla_fusion.tools import checks_cli, graphs_cli, installed
from mla_fusion.tools.command import Parser, answer, command, option, show
from mla_fusion.tools.target import UserError, output_folder, positive, user_errors, writing

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
    """Run one subcommand. Exit status: 0 fine, 1 something was found, 2 a wrong call or bad
    input.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            if gone := _gone.of_command_line(words):
                raise UserError(gone)
            return _run(parser().parse_args(words))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk is told here, not while Python ends
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `mla-fusion ... | head` is no error
        _stop_writing()
        return 0
    except (UserError, OSError, ImportError) as error:
        print(f"mla-fusion {' '.join(words[:1])}: {_for_the_user(error)}", file=sys.stderr)
        return 2


def _run(arguments: Namespace) -> int:
    try:
        status: int = arguments.run(arguments)
    except SystemExit as error:  # of code that the caller named
        raise UserError(f"the code that was run ended with sys.exit({error.code!r})") from error
    return status


def _for_the_user(error: Exception) -> str:
    """In one line what the caller can put right. Raises the error where it is a defect of this
    package.
    """
    if isinstance(error, OSError) and error.strerror is not None:
        if error.filename is None:  # of what is written through a stream that has no name
            _stop_writing()
        return f"{'stdout' if error.filename is None else error.filename}: {error.strerror}"
    if installed.is_missing(error):
        return f"torch is not installed: {installed.TO_DO}"
    if isinstance(error, ImportError) and (error.name or "").startswith("mla_fusion"):
        raise error
    return str(error)


def _stop_writing() -> None:
    """Let nothing more be written to a stdout that takes nothing, not even when Python ends."""
    # a stdout of no file, in a test or a notebook
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> ArgumentParser:
    """Of the whole command line."""
    of_all = Parser(
        prog="mla-fusion",
        formatter_class=RawDescriptionHelpFormatter,
        description="Fuse DeepSeek MLA prologues into the single Ascend NPU kernel. Needs no NPU "
        "and no CANN.",
        epilog=EPILOG,
    )
    of_all.add_argument("--version", action="version", version=f"mla-fusion {mf.__version__}")
    commands = of_all.add_subparsers(dest="command", required=True, metavar="command")
    own = demo, doctor, check_model
    for described in (*own, *graphs_cli.COMMANDS, *checks_cli.COMMANDS):
        described.add(commands)
    return of_all


@command(
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


@command()
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
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    return "none" if value is None else str(value)


@command(
    option("folder", "checkpoint folder: config.json, and weights for --tokens", type=Path),
    option(
        "--prepack", "say what mla_fusion.prepack would lay out in a layer", action="store_true"
    ),
    option(
        "--tokens", "load the weights, generate so many tokens and compare", type=int, default=0
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
    from mla_fusion.models import hf
    from mla_fusion.tools import check_model

    with user_errors(check_model.CheckpointError, hf.TransformersMissing):
        outcome = check_model.run(arguments)
    return answer(outcome, arguments, outcome.is_fine)
