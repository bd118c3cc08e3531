"""``mla-fusion audit`` and ``guide``: hand-written calls checked, and how to write one."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path
from traceback import extract_tb

import mla_fusion as mf
from mla_fusion.tools.command import Command, answer, function, option, page
from mla_fusion.tools.target import (
    UserError,
    add_limits,
    load_target,
    output,
    target,
    target_or_dump,
    user_errors,
    writing,
)


def _audit(arguments: argparse.Namespace) -> int:
    """Exit status: 0 nothing is wrong, 1 something is. Raises UserError for bad input."""
    target_or_dump(arguments.target)
    if arguments.reference:
        target(arguments.reference)
    from mla_fusion.tools.dumps import DumpError

    with user_errors(DumpError, ValueError):
        limits = mf.Config(soc=arguments.soc, cann=arguments.cann).machine
        is_dump = Path(arguments.target).is_file()
        found = (_of_dump if is_dump else _of_function)(arguments, limits.soc, limits.cann)
    return answer(found, arguments, found.ok)


def _of_dump(arguments: argparse.Namespace, soc: str, cann: str) -> mf.Audit:
    from mla_fusion.tools.by_hand.of_dump import audit_dump

    if arguments.reference:
        raise UserError("--reference goes with a function; a dump holds no numbers to compare")
    return audit_dump(arguments.target, soc, cann)


def _of_function(arguments: argparse.Namespace, soc: str, cann: str) -> mf.Audit:
    import torch

    from mla_fusion.compile.device_graph import CaptureError, check_arguments

    model, example = load_target(arguments.target)
    reference = load_target(arguments.reference)[0] if arguments.reference else None
    try:
        for function in (model, reference):
            if function is not None:
                check_arguments(function, example)
        return mf.audit(model, reference, *example, soc=soc, cann=cann, path=arguments.path)
    except ValueError:  # in words already
        raise
    except CaptureError as error:
        raise UserError(str(error)) from error
    except Exception as error:
        ours, frames = str(Path(mf.__file__).parent), extract_tb(error.__traceback__)
        own = [
            frame
            for frame in frames
            if not frame.filename.startswith((ours, str(Path(torch.__file__).parent)))
        ]
        if not own or frames[-1].filename.startswith(ours):  # a defect of the audit
            raise
        where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}"
        raise UserError(
            f"the function fails when it is run: {type(error).__name__}: {error}\n  at {where}"
        ) from error


def _guide(arguments: argparse.Namespace) -> int:
    folder = files("mla_fusion") / "tools" / "by_hand"  # importing it would load torch
    parts = (folder / name for name in ("guide.md", "guide_more.md"))
    text = "\n".join(part.read_text(encoding="utf-8") for part in parts)
    if arguments.out is None:
        print(text, end="")
        return 0
    with writing(arguments.out):
        arguments.out.write_text(text, encoding="utf-8")
    print(f"written: {arguments.out}", file=sys.stderr)
    return 0


COMMANDS = (
    Command(
        "audit",
        _audit,
        "Check hand-written calls of the operators; with --reference, against the model that they "
        "stand for.",
        "Exit status 1: something is wrong with a call.",
        (
            function("; its file is imported and runs. Or a dump: data"),
            option(
                "--reference",
                "one that returns (unfused_model, arguments)",
                metavar="FILE.py:FUNCTION",
            ),
            add_limits,
            option(
                "--path",
                "how the calls reach the device",
                choices=("eager", "graph"),
                default="eager",
            ),
            page("also write the audit as a page"),
        ),
    ),
    Command(
        "guide",
        _guide,
        "Print how to write a call of the operator by hand, for people and for agents that write "
        "code.",
        options=(
            option(
                "--out",
                "write it to a file instead, AGENTS.md for one",
                type=output,
                metavar="FILE",
            ),
        ),
        has_json=False,
    ),
)
