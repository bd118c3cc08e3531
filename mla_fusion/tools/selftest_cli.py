"""``mla-fusion selftest``: run the acceptance test, or judge outcomes of it that somebody has
sent.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import mla_fusion as mf
from mla_fusion.machine import AUTO
from mla_fusion.tools.command import Command, answer, option, page
from mla_fusion.tools.target import UserError, add_limits, output, positive, user_errors, writing


def _selftest(arguments: argparse.Namespace) -> int:
    from mla_fusion.tools import selftest

    if arguments.compare:
        return _compared(arguments)
    options = selftest.Options(arguments.only, arguments.hidden, arguments.heads, arguments.repeats)
    named = (None if name == AUTO else name for name in (arguments.soc, arguments.cann))
    with user_errors(selftest.NoDevice, mf.meta.ContractError):
        device = selftest.choose(arguments.device, *named)
        outcome = selftest.run(device, options, _tell_progress)
    if not outcome.results:
        raise UserError(f"no scenario matches {arguments.only!r}")
    if arguments.out:
        with writing(arguments.out):
            arguments.out.write_text(outcome.to_json(), encoding="utf-8")
    arguments.html = None  # goes with --compare
    return answer(outcome, arguments, not outcome.failed)


def _compared(arguments: argparse.Namespace) -> int:
    from mla_fusion.tools.selftest import paper

    if len(arguments.compare) > 2:
        raise UserError("--compare takes one file or two")
    with user_errors(paper.OutcomeError):
        found = paper.read(*arguments.compare)
    return answer(found, arguments, found.ok)


def _tell_progress(result: Any) -> None:
    """The check that has just ended: on a terminal one line that the next one overwrites."""
    before, after = ("\r\033[K", "\r") if sys.stderr.isatty() else ("", "\n")
    print(f"{before}{result.name} ({result.through})", end=after, file=sys.stderr, flush=True)


COMMAND = Command(
    "selftest",
    _selftest,
    "Check the operators and the pass on this device against the references.",
    "Exit status 1: a check failed.",
    (
        option("--device", "default: an NPU where there is one", choices=("npu", "cpu")),
        add_limits,
        option(
            "--only", "scenarios whose name matches, as 'w2 kv1'", default="*", metavar="PATTERN"
        ),
        option("--hidden", "He; 7168 on an NPU, the smallest legal one on a CPU", type=positive),
        option("--heads", "N; 16 on an NPU, 4 on a CPU", type=positive),
        option("--repeats", "timed calls per scenario", type=positive),
        option("--out", "also write the JSON to a file, to send back", type=output, metavar="FILE"),
        option(
            "--compare",
            "run nothing: judge one such file, or compare two",
            nargs="+",
            metavar="JSON",
        ),
        page("with --compare: also write a page"),
    ),
)
