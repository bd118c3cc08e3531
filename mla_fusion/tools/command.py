"""A command of the command line as one description, and how its answer is given. Needs no torch."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mla_fusion.tools.target import output, writing

Option = Callable[[Any], object]  # adds what it is to a parser


def option(name: str, said: str | None = None, **kind: Any) -> Option:
    """As argparse has it, its help behind its name."""
    return lambda parser: parser.add_argument(name, help=said, **kind)


def function(more: str = "") -> Option:
    """The function that a command works on."""
    said = f"function that returns (module_or_function, arguments){more}"
    return option("target", said, metavar="FILE.py:FUNCTION")


def page(text: str) -> Option:
    return option("--html", text, type=output, metavar="FILE")


DYNAMIC = option("--dynamic", "symbolic sizes, as torch.compile(dynamic=True)", action="store_true")


class Parser(ArgumentParser):
    """Says so where help cannot be written; argparse is silent then."""

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message or "", end="", file=file or sys.stderr)


@dataclass(frozen=True)
class Command:
    """``run`` gives the exit status; ``more`` is said after the summary, in the command's own help
    alone; ``has_json``: it can print JSON.
    """

    name: str
    run: Callable[[Namespace], int]
    summary: str
    more: str = ""
    options: Sequence[Option] = ()
    has_json: bool = True

    def add(self, commands: Any) -> None:
        """To the parsers of all commands."""
        said = f"{self.summary} {self.more}".rstrip()
        parser = commands.add_parser(self.name, help=self.summary, description=said)
        parser.set_defaults(run=self.run)
        if self.has_json:
            parser.add_argument("--json", action="store_true", help="print JSON on stdout")
        for add in self.options:
            add(parser)


def show(found: object) -> None:
    """Print text for people. Names come from dumps, too: what in them would steer a terminal is
    written out.
    """
    print("".join(map(_shown, str(found))))


def _shown(letter: str) -> str:
    return letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]


def answer(found: Any, arguments: Namespace, is_fine: bool) -> int:
    """Print what was found, as text or JSON, and write its page where one is asked for. The exit
    status.
    """
    print(found.to_json()) if arguments.json else show(found)
    if getattr(arguments, "html", None):
        with writing(arguments.html):
            found.to_html(arguments.html)
        print(f"written: {arguments.html}", file=sys.stderr)
    return 0 if is_fine else 1
