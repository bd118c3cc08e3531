"""``mla-fusion selftest``: run the acceptance test, or judge outcomes of it that somebody has
sent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import mla_fusion as mf
from mla_fusion.machine import AUTO
from mla_fusion.tools import terminal
from mla_fusion.tools.target import UserError, add_limits, output, positive, writing


def add(commands: Any, command: Callable[..., Any]) -> None:
    """The subcommand; ``command`` makes the parser of one that prints JSON on request."""
    parser = command(
        commands, "selftest", _selftest, "Check the operators and the pass on this device against "
                                         "the references.",
        "Exit status 1: a check failed.",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("npu", "cpu"), help="default: an NPU where there is one"
    )
    add_limits(parser)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="scenarios whose name matches, as 'w2 kv1'"
    )
    parser.add_argument(
        "--hidden", type=positive, help="He; 7168 on an NPU, the smallest legal one on a CPU"
    )
    parser.add_argument("--heads", type=positive, help="N; 16 on an NPU, 4 on a CPU")
    parser.add_argument("--repeats", type=positive, help="timed calls per scenario")
    parser.add_argument(
        "--out", type=output, metavar="FILE", help="also write the JSON to a file, to send back"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="JSON",
        help="run nothing: judge one such file, or compare two",
    )
    parser.add_argument(
        "--html", type=output, metavar="FILE", help="with --compare: also write a page"
    )


def _selftest(arguments: argparse.Namespace) -> int:
    from mla_fusion.tools import selftest

    if arguments.compare:
        return _compared(arguments)
    options = selftest.Options(arguments.only, arguments.hidden, arguments.heads, arguments.repeats)
    try:
        device = selftest.choose(arguments.device, _given(arguments.soc), _given(arguments.cann))
        outcome = selftest.run(device, options, _tell_progress)
    except (selftest.NoDevice, mf.meta.ContractError) as error:
        raise UserError(str(error)) from error
    if not outcome.results:
        raise UserError(f"no scenario matches {arguments.only!r}")
    if arguments.out:
        with writing(arguments.out):
            arguments.out.write_text(outcome.to_json(), encoding="utf-8")
    print(outcome.to_json()) if arguments.json else terminal.show(outcome)
    return 1 if outcome.failed else 0


def _given(option: str) -> str | None:
    return None if option == AUTO else option


def _compared(arguments: argparse.Namespace) -> int:
    from mla_fusion.tools.selftest import paper

    if len(arguments.compare) > 2:
        raise UserError("--compare takes one file or two")
    try:
        found = paper.read(*arguments.compare)
    except paper.OutcomeError as error:
        raise UserError(str(error)) from error
    print(found.to_json()) if arguments.json else terminal.show(found)
    if arguments.html:
        with writing(arguments.html):
            found.to_html(arguments.html)
        print(f"written: {arguments.html}", file=sys.stderr)
    return 0 if found.ok else 1


def _tell_progress(result: Any) -> None:
    """The check that has just ended: on a terminal one line that the next one overwrites."""
    before, after = ("\r\033[K", "\r") if sys.stderr.isatty() else ("", "\n")
    print(f"{before}{result.name} ({result.through})", end=after, file=sys.stderr, flush=True)
