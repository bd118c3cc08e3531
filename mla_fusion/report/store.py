"""Keeps the reports of this process, and writes them to files while models compile.

``pipeline.py`` keeps each report. Files are written if ``MLA_FUSION_REPORT=dir`` or
``mf.backend(report="dir")`` asks for them. Each compiled graph gets
``mla_fusion_<process>_<number>.json`` and ``.html``. A folder that cannot be written never stops a
compilation; it is logged once.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from weakref import WeakValueDictionary

from mla_fusion.machine import set_inside
from mla_fusion.report.report import Report

VARIABLE = "MLA_FUSION_REPORT"

log = logging.getLogger("mla_fusion")
_REPORTS: deque[Report] = deque(maxlen=256)
_folder: ContextVar[Path | None] = ContextVar("mla_fusion_report", default=None)
_numbers = itertools.count(1)
_written: WeakValueDictionary[tuple[Path, int], Report] = WeakValueDictionary()
_warn_once = cache(log.warning)


def keep_report(report: Report) -> None:
    """Keeps the report of a compiled graph, and writes it if the user asked for files."""
    _REPORTS.append(report)
    save_report(report)


def reports() -> list[Report]:
    """Reports of this process, newest last, one per graph compiled through any entry point."""
    return list(_REPORTS)


def write_reports_into(folder: Path | None) -> AbstractContextManager[None]:
    """Writes the reports that are made meanwhile to ``folder`` too. None changes nothing."""
    return set_inside(_folder, folder or _folder.get())


def save_report(report: Report) -> None:
    """Writes the report to the folders that were asked for, and to those that it was written to.

    A report that was written before keeps its number.
    """
    requested = (_folder.get(), os.environ.get(VARIABLE))
    folders = [Path(folder).absolute() for folder in requested if folder]
    folders += [folder for (folder, _), written in _written.items() if written is report]
    for folder in dict.fromkeys(folders):
        _write_files(report, folder)


def _write_files(report: Report, folder: Path) -> None:
    """Writes the report to one folder. Logs a warning, once, if the folder cannot be written."""
    stem = folder / f"mla_fusion_{os.getpid()}_{_number(report, folder):03d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(report.to_json(), encoding="utf-8")
        report.to_html(stem.with_suffix(".html"))
    except OSError as error:
        _warn_once(f"no report was written: {error}")


def _number(report: Report, folder: Path) -> int:
    """Returns the number of a report in a folder, so that a report completed later replaces its
    files.
    """
    for (written_folder, number), written_report in _written.items():
        if written_report is report and written_folder == folder:
            return number
    number = next(_numbers)
    _written[folder, number] = report
    return number
