"""Text as wide as a terminal: lines wrapped, tables narrowed. Needs no torch."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from itertools import takewhile, zip_longest
from textwrap import wrap

NARROWEST = 20  # columns, of whatever terminal
_CELL = 8  # columns that a column of a table keeps at least
_RULE = re.compile(r" *-+(?:  -+)+$")  # below the head of a table
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")


def on_a_terminal(text: str) -> str:
    """The text as wide as the terminal that Python prints to, or as it is."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return fitted(text, max(shutil.get_terminal_size((80, 24)).columns, NARROWEST))


def fitted(text: str, columns: int, more: int = 4) -> str:
    """The text in lines of at most so many columns, but for words that are longer; ``more``: what a
    line that goes on is indented by."""
    lines, done = text.split("\n"), list[str]()
    while lines:
        if len(lines) > 1 and _RULE.match(lines[1]) and lines[0].strip():
            spans = [found.span() for found in re.finditer("-+", lines[1])]
            rows = takewhile(partial(_is_row, spans), lines[2:])
            end = 2 + sum(1 for _ in rows)
            done += _table(lines[:end], spans, columns)
            del lines[:end]
        else:
            done += _line(lines.pop(0), columns, more)
    return "\n".join(done)


def _line(line: str, columns: int, more: int = 4) -> list[str]:
    """Wrapped below its own text: behind the first gap of two spaces, where that leaves room."""
    if len(line) <= columns:
        return [line]
    indent = len(line) - len(line.lstrip())
    gap = _GAP.search(line)
    hang = gap.end() if gap is not None and gap.end() <= columns * 2 // 3 else indent + more
    head, body = (
        (line[:hang], line[hang:])
        if gap is not None and hang == gap.end()
        else (" " * indent, line.lstrip())
    )
    below = " " * min(hang, columns * 2 // 3)
    wrapped = wrap(
        body,
        columns,
        initial_indent=head,
        subsequent_indent=below,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [line]


def _is_row(spans: list[tuple[int, int]], line: str) -> bool:
    """Does the line fit the columns of a table?"""
    ends = [end for _, end in spans]
    between = [line[end:start] for end, (start, _) in zip([0, *ends], spans, strict=False)]
    return bool(line.strip()) and len(line) <= ends[-1] and not "".join(between).strip()


def _table(lines: list[str], spans: list[tuple[int, int]], columns: int) -> list[str]:
    """Columns are where the rule under the head says; the widest give way, and their cells are
    wrapped.
    """
    if max(map(len, lines)) <= columns:
        return lines
    indent = spans[0][0]
    rows = [[line[start:end].strip() for start, end in spans] for line in [lines[0], *lines[2:]]]
    numeric = [all(map(is_number, cells)) for cells in zip(*rows[1:], strict=True)]
    widths = [end - start for start, end in spans]
    room = columns - indent - 2 * (len(widths) - 1)
    least = [min(size, _CELL) for size in widths]
    if sum(least) > room:
        return _records(rows, columns)
    while sum(widths) > room:
        place = max(range(len(widths)), key=lambda place: widths[place] - least[place])
        widths[place] -= 1

    def written(row: list[str]) -> list[str]:
        parts = [
            wrap(cell, size, break_on_hyphens=False) or [""]
            for cell, size in zip(row, widths, strict=True)
        ]
        return [
            row_of(cells, widths, numeric, " " * indent)
            for cells in zip_longest(*parts, fillvalue="")
        ]

    dashes = " " * indent + "  ".join("-" * size for size in widths)
    return [*written(rows[0]), dashes, *(line for row in rows[1:] for line in written(row))]


def row_of(
    cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], indent: str
) -> str:
    """Cells side by side, numbers to the right."""
    sides = zip(cells, widths, numeric, strict=True)
    padded = [cell.rjust(size) if right else cell.ljust(size) for cell, size, right in sides]
    return (indent + "  ".join(padded)).rstrip()


def _records(rows: list[list[str]], columns: int) -> list[str]:
    """Where not even narrow columns stand side by side: each row by itself, a line for every cell
    that is not empty.
    """
    head, found = rows[0], list[str]()
    for row in rows[1:]:
        first, *others = (
            f"{name}: {cell}" if name else cell
            for name, cell in zip(head, row, strict=True)
            if cell
        )
        found += _line(f"  {first}", columns)
        found += [line for other in others for line in _line(f"    {other}", columns)]
    return found


def is_number(text: str) -> bool:
    """Is the cell of a table a number, or a stand-in for one?"""
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True
