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
from weakref import WeakKeyDictionary

from mla_fusion.machine import set_inside
from mla_fusion.report.report import Report

VARIABLE = "MLA_FUSION_REPORT"

log = logging.getLogger("mla_fusion")
_REPORTS: deque[Report] = deque(maxlen=256)
_folder: ContextVar[Path | None] = ContextVar("mla_fusion_report", default=None)
_numbers = itertools.count(1)
# by report and folder: the number of its files, which a report that is completed later replaces
_numbers_of: WeakKeyDictionary[Report, dict[Path, int]] = WeakKeyDictionary()
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
    numbers = _numbers_of.setdefault(report, {})
    folders = [Path(folder).absolute() for folder in requested if folder]
    for folder in dict.fromkeys([*folders, *numbers]):
        if folder not in numbers:
            numbers[folder] = next(_numbers)
        _write_files(report, folder / f"mla_fusion_{os.getpid()}_{numbers[folder]:03d}")


def _write_files(report: Report, stem: Path) -> None:
    """Writes the report to files of this name. Logs a warning, once, if they cannot be written."""
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(report.to_json(), encoding="utf-8")
        report.to_html(stem.with_suffix(".html"))
    except OSError as error:
        _warn_once(f"no report was written: {error}")
