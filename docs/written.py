"""What the scripts that write pages share: ``python docs/generate*.py`` writes, with ``--check`` it
compares.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS = 100
_CODE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_ALONE = r"[#|!]|<!--|    |$"  # how a line begins that is no part of a paragraph
_ITEM = r" *(?:[*+-]|\d+\.) "
_PARAGRAPH = re.compile(rf"^(?!{_ALONE}).*(?:\n(?!{_ITEM}|{_ALONE}).*)*", re.MULTILINE)


def write(wanted: Mapping[Path, str], arguments: Sequence[str]) -> int:
    """Write each page; with ``--check`` 1 where one is not as it should be, and nothing is
    written.
    """
    wanted = {
        path: wrapped(text) if path.suffix == ".md" else text for path, text in wanted.items()
    }
    if "--check" in arguments:
        return int(
            any(not path.exists() or path.read_text() != text for path, text in wanted.items())
        )
    for path, text in wanted.items():
        path.write_text(text)
    return 0


def between(text: str, begin: str, end: str, part: str) -> str:
    """``text`` with ``part`` between two marks."""
    return re.sub(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _: f"{begin}{part}{end}",
        text,
        flags=re.DOTALL,
    )


def wrapped(text: str) -> str:
    """Markdown whose paragraphs and list items with a line that is too long are filled anew."""
    parts = _CODE.split(text)
    parts[::2] = [_PARAGRAPH.sub(lambda found: _filled(found[0]), part) for part in parts[::2]]
    return "".join(parts)


def _filled(paragraph: str) -> str:
    if all(len(line) <= COLUMNS for line in paragraph.split("\n")):
        return paragraph
    item = re.match(_ITEM, paragraph)
    indent = " " * (len(item[0]) if item else 0)
    return textwrap.fill(
        " ".join(paragraph.split()),
        COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
