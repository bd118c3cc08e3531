"""A command of the command line as one description, and how its answer is given. Needs no torch."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mla_fusion.tools import terminal
from mla_fusion.tools.target import output, writing

Option = Callable[[Any], object]  # adds what it is to a parser


def option(name: str, said: str | None = None, **kind: Any) -> Option:
    """As argparse has it, its help behind its name."""
    return lambda parser: parser.add_argument(name, help=said, **kind)


def function(more: str = "", **kind: Any) -> Option:
    """The function that a command works on."""
    said = f"function that returns (module_or_function, arguments){more}"
    return option("target", said, metavar="FILE.py:FUNCTION", **kind)


def page(text: str) -> Option:
    return option("--html", text, type=output, metavar="FILE")


DYNAMIC = option("--dynamic", "symbolic sizes, as torch.compile(dynamic=True)", action="store_true")


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
    aliases: Sequence[str] = ()
    has_json: bool = True

    def add(self, commands: Any) -> None:
        """To the parsers of all commands."""
        said = f"{self.summary} {self.more}".rstrip()
        parser = commands.add_parser(
            self.name, help=self.summary, description=said, aliases=self.aliases
        )
        parser.set_defaults(run=self.run)
        if self.has_json:
            parser.add_argument("--json", action="store_true", help="print JSON on stdout")
        for add in self.options:
            add(parser)


def answer(found: Any, arguments: Namespace, is_fine: bool) -> int:
    """Print what was found, as text or JSON, and write its page where one is asked for. The exit
    status.
    """
    print(found.to_json()) if arguments.json else terminal.show(found)
    if getattr(arguments, "html", None):
        with writing(arguments.html):
            found.to_html(arguments.html)
        print(f"written: {arguments.html}", file=sys.stderr)
    return 0 if is_fine else 1
