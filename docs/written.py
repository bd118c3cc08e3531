"""What the scripts that write pages share: ``python docs/generate*.py`` writes, with ``--check`` it compares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def write(wanted: Mapping[Path, str], arguments: Sequence[str]) -> int:
    """Write each page; with ``--check`` 1 where one is not as it should be, and nothing is written."""
    if "--check" in arguments:
        return int(any(not path.exists() or path.read_text() != text for path, text in wanted.items()))
    for path, text in wanted.items():
        path.write_text(text)
    return 0


def between(text: str, begin: str, end: str, part: str) -> str:
    """``text`` with ``part`` between two marks."""
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}{part}{end}", text, flags=re.DOTALL)
