"""What the command line prints, as wide as the terminal is. Needs no torch.

On a terminal, and wherever ``COLUMNS`` is set, lines are wrapped and tables narrowed to that width.
A pipe or a file without ``COLUMNS`` gets each line whole, so that ``grep`` finds what a line says;
help is 80 columns wide there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from textwrap import wrap
from typing import Any

from mla_fusion.report.wrapping import NARROWEST, fitted


def width() -> int | None:
    """Columns to write in; None where lines are not to be wrapped."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated):
        return max(int(stated), NARROWEST)
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size((80, 24)).columns, NARROWEST)


def show(found: object) -> None:
    """Print text for people. Names come from dumps, too: what in them would steer a terminal is
    written out.
    """
    columns, text = width(), "".join(map(_shown, str(found)))
    print(text if columns is None else fitted(text, columns))


def _shown(letter: str) -> str:
    return letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of examples, and wraps those that are too wide, the usage's too."""

    def _format_usage(self, *args: Any) -> str:
        text = super()._format_usage(*args)
        if max(map(len, text.splitlines()), default=0) <= self._width:
            return text
        words = " ".join(text.split())
        return "\n".join(wrap(words, self._width, subsequent_indent="    ", break_long_words=False,
                              break_on_hyphens=False)) + "\n\n"  # fmt: skip

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fitted("\n".join(indent + line for line in text.splitlines()), width, more=0)


class Parser(argparse.ArgumentParser):
    """Says so where help cannot be written; argparse is silent then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **options})

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            print(message, end="", file=sys.stderr if file is None else file)
