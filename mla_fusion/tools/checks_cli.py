"""``mla-fusion audit``, ``profile``, ``guide`` and ``selftest``: calls by hand, profiles and
devices checked; how to write a call.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib.resources import files
from pathlib import Path
from traceback import extract_tb
from typing import Any

import mla_fusion as mf
from mla_fusion.machine import AUTO
from mla_fusion.tools.command import LIMITS, answer, command, function, option
from mla_fusion.tools.target import (
    UserError,
    existing,
    load_target,
    output,
    target,
    user_errors,
    writing,
)


@command(
    function("; its file is imported and runs"),
    option(
        "--reference",
        "one that returns (unfused_model, arguments)",
        type=target,
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
    import torch

    from mla_fusion.compile.device_graph import CaptureError, check_arguments

    with user_errors(ValueError, CaptureError):
        machine = mf.Config(soc=arguments.soc, cann=arguments.cann).machine
        model, example = load_target(arguments.target)
        reference = load_target(arguments.reference)[0] if arguments.reference else None
        try:
            for called in (model, reference):
                if called is not None:
                    check_arguments(called, example)
            outcome = mf.audit(
                model,
                reference,
                *example,
                path=arguments.path,
                soc=machine.soc,
                cann=machine.cann,
            )
        except (ValueError, CaptureError):  # in words already
            raise
        except Exception as error:
            ours, frames = str(Path(mf.__file__).parent), extract_tb(error.__traceback__)
            foreign = ours, str(Path(torch.__file__).parent)
            own = [frame for frame in frames if not frame.filename.startswith(foreign)]
            if not own or frames[-1].filename.startswith(ours):  # a defect of the audit
                raise
            where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}"
            raise UserError(
                f"the function fails when it is run: {type(error).__name__}: {error}\n  at {where}"
            ) from error
    return answer(outcome, arguments, outcome.ok)


@command(
    option(
        "after",
        "kernel_details.csv or op_summary_*.csv, with the pass on",
        type=existing,
        metavar="AFTER",
    ),
    option("--before", "the same with the pass off", type=existing, metavar="BEFORE"),
)
def profile(arguments: Namespace) -> int:
    """Say what the prologue costs in a profile of an NPU; with --before, what a fusion changed.

    Exit status 1: no fused prologue is in it.
    """
    from mla_fusion.tools.profile import Comparison, summarise

    paths = filter(None, (arguments.after, arguments.before))
    outcome = Comparison(*map(summarise, paths))
    return answer(outcome, arguments, bool(outcome.after.prologue))


@command(
    option("--out", "write it to a file instead, AGENTS.md for one", type=output, metavar="FILE"),
    has_json=False,
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
        return 0
    with writing(arguments.out):
        arguments.out.write_text(text, encoding="utf-8")
    print(f"written: {arguments.out}", file=sys.stderr)
    return 0


@command(
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

    limits = (None if name == AUTO else name for name in (arguments.soc, arguments.cann))
    with user_errors(selftest.NoDevice, mf.meta.ContractError):
        device = selftest.choose(arguments.device, *limits)
        outcome = selftest.run(device, arguments.only, _show_progress)
    if not outcome.results:
        raise UserError(f"no check matches {arguments.only!r}")
    if arguments.out:
        with writing(arguments.out):
            arguments.out.write_text(f"{outcome}\n", encoding="utf-8")
    return answer(outcome, arguments, not outcome.failed)


def _show_progress(result: Any) -> None:
    """The check that has just ended: on a terminal one line that the next one overwrites."""
    before, after = ("\r\033[K", "\r") if sys.stderr.isatty() else ("", "\n")
    print(f"{before}{result.name} ({result.through})", end=after, file=sys.stderr, flush=True)


COMMANDS = (audit, profile, guide, selftest)
