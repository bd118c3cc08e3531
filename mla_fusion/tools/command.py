"""A command of the command line as one description, and how its answer is given. Needs no torch."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Any

from mla_fusion import machine
from mla_fusion.tools.target import known_name, target, writing

Option = Callable[[Any], object]  # adds an argument to a parser
Run = Callable[[Namespace], int]  # of the parsed arguments, the exit status


def option(name: str, text: str | None = None, **kind: Any) -> Option:
    """As argparse has it, its help behind its name."""
    return lambda parser: parser.add_argument(name, help=text, **kind)


def function(more: str = "", check: Callable[[str], Any] = target) -> Option:
    """The function that a command works on."""
    text = f"function that returns (module_or_function, arguments){more}"
    return option("target", text, type=check, metavar="FILE.py:FUNCTION")


DYNAMIC = option("--dynamic", "symbolic sizes, as torch.compile(dynamic=True)", action="store_true")
LIMITS = (
    option(
        "--soc",
        "chip, as A2 or 910B, whose limits hold; by default the NPU's, without an NPU A3",
        type=known_name(machine.soc_named),
        default=machine.AUTO,
    ),
    option(
        "--cann",
        "CANN release, as 8.5 or 9.1, whose limits hold; by default the NPU's, without an NPU "
        "the newest",
        type=known_name(machine.release_named),
        default=machine.AUTO,
    ),
)


class Parser(ArgumentParser):
    """Says so where help cannot be written; argparse is silent then."""

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message or "", end="", file=file or sys.stderr)


@dataclass(frozen=True)
class Command:
    """A function that runs a command, with its options. The first paragraph of its docstring is the
    summary in the list of commands, all of it the command's own help. ``has_json``: it can print
    JSON.
    """

    run: Run
    options: Sequence[Option]
    has_json: bool

    def add(self, commands: Any) -> None:
        """To the parsers of all commands."""
        text = getdoc(self.run) or ""
        parser = commands.add_parser(
            self.run.__name__.replace("_", "-"),
            help=text.partition("\n\n")[0],
            description=text,
        )
        parser.set_defaults(run=self.run)
        if self.has_json:
            parser.add_argument("--json", action="store_true", help="print JSON on stdout")
        for add in self.options:
            add(parser)


def command(*options: Option, has_json: bool = True) -> Callable[[Run], Command]:
    """Makes a Command of a function."""
    return lambda run: Command(run, options, has_json)


def show(text: object) -> None:
    """Print text for people. Names come from dumps, too: what in them would steer a terminal is
    written out.
    """
    print("".join(map(_shown, str(text))))


def _shown(letter: str) -> str:
    return letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]


def answer(outcome: Any, arguments: Namespace, is_fine: bool) -> int:
    """Print what came out, as text or JSON, and write its page where one is asked for. The exit
    status.
    """
    print(outcome.to_json()) if arguments.json else show(outcome)
    if getattr(arguments, "html", None):
        with writing(arguments.html):
            outcome.to_html(arguments.html)
        print(f"written: {arguments.html}", file=sys.stderr)
    return 0 if is_fine else 1
