"""The reports of this process, and their files while models compile: ``MLA_FUSION_REPORT=dir``, or
``mf.backend(report="dir")``.

Each compiled graph gets ``mla_fusion_<process>_<number>.json`` and ``.html``. A folder that cannot
be written never stops a compilation; it is said once in the log.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from weakref import WeakValueDictionary

from mla_fusion.report.report import Report

VARIABLE = "MLA_FUSION_REPORT"

log = logging.getLogger("mla_fusion")
_KEPT: deque[Report] = deque(maxlen=256)
_folder: ContextVar[Path | None] = ContextVar("mla_fusion_report", default=None)
_numbers = itertools.count(1)
_written: WeakValueDictionary[tuple[Path, int], Report] = WeakValueDictionary()
_told: set[str] = set()


def keep(report: Report) -> None:
    """Remember the report of a compiled graph, and write it where the user asked for files."""
    _KEPT.append(report)
    save(report)


def reports() -> list[Report]:
    """Reports of this process, newest last, one per graph compiled through any entry point."""
    return list(_KEPT)


@contextlib.contextmanager
def into(folder: str | Path | None) -> Iterator[None]:
    """Write the reports made meanwhile to ``folder`` too; None changes nothing."""
    token = _folder.set(Path(folder) if folder is not None else _folder.get())
    try:
        yield
    finally:
        _folder.reset(token)


def save(report: Report) -> list[Path]:
    """Write the report where asked for, under the number it has already if it has one; the
    files.
    """
    asked = (_folder.get(), os.environ.get(VARIABLE))
    folders = dict.fromkeys(Path(folder).absolute() for folder in asked if folder)
    return [path for folder in folders for path in _save(report, folder)]


def _save(report: Report, folder: Path) -> list[Path]:
    stem = folder / f"mla_fusion_{os.getpid()}_{_number(report, folder):03d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = stem.with_suffix(".json")
        text.write_text(report.to_json(), encoding="utf-8")
        return [text, report.to_html(stem.with_suffix(".html"))]
    except OSError as error:
        _tell(f"no report was written: {error}")
        return []


def _number(report: Report, folder: Path) -> int:
    """A report that is completed later is written again, over itself."""
    for (where, number), known in _written.items():
        if known is report and where == folder:
            return number
    number = next(_numbers)
    _written[folder, number] = report
    return number


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        log.warning(message)
