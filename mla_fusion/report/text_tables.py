"""Formats reports for terminals: aligned tables, sizes, counts, errors, and JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def render(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns aligned columns, text to the left and numbers to the right. Drops a header without
    words.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [all(is_number(str(row[i])) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        """Returns one row of the table."""
        sides = zip(row, widths, numeric, strict=True)
        padded = [cell.rjust(size) if right else cell.ljust(size) for cell, size, right in sides]
        return ("  " + "  ".join(padded)).rstrip()

    head = [header, ["-" * width for width in widths]] if any(header) else []
    return "\n".join(map(line, [*head, *cells]))


def is_number(text: str) -> bool:
    """Returns True if the cell of a table is a number or stands for one."""
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


def operator_rows(
    before: Mapping[str, int], after: Mapping[str, int]
) -> list[tuple[str, int, int]]:
    """Returns rows (operator, before, after): changed operators first, then by count."""
    names = {**before, **after}
    rows = [(short_name(name), before.get(name, 0), after.get(name, 0)) for name in names]
    return sorted(rows, key=lambda row: (row[1] == row[2], -max(row[1:]), row[0]))


def short_name(target: str) -> str:
    """Returns ``aten.mm`` for ``aten.mm.default``, and ``getitem`` for Python's own."""
    if target.startswith("<built-in function "):
        return target.removeprefix("<built-in function ").rstrip(">")
    return target.removesuffix(".default")


def size(count: int) -> str:
    """Returns a number of bytes in a fitting unit."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count / 1024**power:.1f} {('', 'KiB', 'MiB', 'GiB')[power]}"


def format_counts(names: Sequence[str]) -> str:
    """Returns each name once, with how often it occurs: "index_put x2, cat"."""
    short_names = [short_name(name).removeprefix("aten.") for name in names]
    return ", ".join(
        f"{name} x{short_names.count(name)}" if short_names.count(name) > 1 else name
        for name in dict.fromkeys(short_names)
    )


def first_line(error: BaseException) -> str:
    """Returns the class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def as_json(data: Any) -> str:
    """Returns data as JSON text. Paths, dtypes, infinity and the like become their text."""
    plain = json.loads(json.dumps(data, default=str), parse_constant=str)
    return json.dumps(plain, indent=2)
