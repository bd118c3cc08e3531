"""Outcomes of the self-test that somebody has sent: read, judged, and compared with another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.page import plain
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.result import failed_lines, time_text

_FIELDS = ("device", "versions", "results")
_OF_RESULT = ("name", "through", "passed", "failures")
_OF_DEVICE = tuple(part.name for part in fields(Device))
_SLOWER = 1.25  # times the other's time: worth a look
_WORDS = {None: "-", True: "ok", False: "FAILED"}
_VERDICTS = {  # by what passed in the first, and in the second
    (True, None): "only in the first",
    (False, None): "only in the first",
    (None, True): "only in the second",
    (None, False): "only in the second",
    (True, False): "fails now",
    (False, True): "passes now",
    (False, False): "fails in both",
}


Data = Mapping[str, Any]  # of a file


class OutcomeError(ValueError):
    """A file that is no outcome of the self-test."""


@dataclass(frozen=True)
class Line:
    """One check in each outcome; None where an outcome has it not.

    passed, milliseconds   of the first, then of the second
    failures               what failed, of both
    """

    name: str
    through: str
    passed: tuple[bool | None, bool | None]
    milliseconds: tuple[float | None, float | None]
    failures: tuple[str, ...]

    @property
    def verdict(self) -> str:
        before, after = self.milliseconds
        if self.passed in _VERDICTS:
            return _VERDICTS[self.passed]
        if before and after and max(before, after) > _SLOWER * min(before, after):
            return f"{after / before:.2f} times the time"
        return "same"


@dataclass(frozen=True)
class Paper:
    """One outcome, or two. ``differences`` of device and versions, as text."""

    titles: tuple[str, ...]
    counts: tuple[tuple[int, int], ...]  # passed, failed
    differences: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Nothing fails in the last outcome."""
        return self.counts[-1][1] == 0

    def to_json(self) -> str:
        rows = [{**asdict(line), "verdict": line.verdict} for line in self.lines]
        return text_tables.as_json({**asdict(self), "lines": rows, "ok": self.ok})

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of what is worth a look: everything of one outcome, failures first; what
        differs or fails of two.
        """
        if len(self.titles) == 1:
            header: tuple[str, ...] = "scenario", "through", "check", "ms"
            shown = sorted(self.lines, key=lambda line: bool(line.passed[0]))
        else:
            header = "scenario", "through", "first", "second", "first ms", "second ms", "verdict"
            shown = [line for line in self.lines if line.verdict != "same"]
        count = len(self.titles)
        rows = [
            (
                line.name,
                line.through,
                *(_WORDS[passed] for passed in line.passed[:count]),
                *(map(time_text, line.milliseconds[:count])),
                line.verdict,
            )[: len(header)]
            for line in shown
        ]
        return header, rows

    def _texts(self) -> tuple[list[str], list[str], list[str]]:
        """Headings, differences and failures."""
        counted = zip(self.titles, self.counts, strict=True)
        return (
            [f"{title}: {passed} passed, {failed} failed" for title, (passed, failed) in counted],
            [f"differs: {text}" for text in self.differences],
            failed_lines(self.lines),
        )

    def __str__(self) -> str:
        headings, differences, failures = self._texts()
        header, rows = self._table()
        table = text_tables.render(header, rows) if rows else "no check differs"
        return "\n".join([*headings, *differences, table, *failures])

    def to_html(self, path: str | Path) -> Path:
        """Write a page that stands alone."""
        headings, differences, failures = self._texts()
        notes = [("maybe", text, ()) for text in differences]
        notes += [("wrong", text, ()) for text in failures]
        name, nothing = "mla_fusion selftest", "No check differs."
        return plain.write(path, name, headings, notes, *self._table(), nothing)


def read(first: str | Path, second: str | Path | None = None) -> Paper:
    """The outcome in a file that ``selftest --out`` wrote, beside another. Raises OutcomeError,
    OSError.
    """
    outcomes = [_load(path) for path in (first, second) if path is not None]
    of_outcomes = [
        {(row["name"], row["through"]): row for row in outcome["results"]} for outcome in outcomes
    ]
    names = dict.fromkeys(name for rows in of_outcomes for name in rows)
    first_two = [*of_outcomes, {}][:2]
    lines = [_line(name, *(rows.get(name, {}) for rows in first_two)) for name in names]
    passed = [[bool(row["passed"]) for row in outcome["results"]] for outcome in outcomes]
    titles = [Device(*(outcome["device"].get(part) for part in _OF_DEVICE)) for outcome in outcomes]
    differences = _differences(*outcomes) if second is not None else []
    return Paper(
        tuple(map(str, titles)),
        tuple((sum(each), len(each) - sum(each)) for each in passed),
        tuple(differences),
        tuple(lines),
    )


def _load(path: str | Path) -> Data:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise OutcomeError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or any(field not in data for field in _FIELDS):
        raise OutcomeError(
            f"{path} is no outcome of `mla-fusion selftest --out`: it has not {', '.join(_FIELDS)}"
        )
    for row in data["results"]:
        if not isinstance(row, dict) or any(field not in row for field in _OF_RESULT):
            raise OutcomeError(f"{path}: a result without {', '.join(_OF_RESULT)}")
    return data


def _differences(first: Data, second: Data) -> list[str]:
    found = []
    for part in ("device", "versions"):
        for name in dict.fromkeys([*first[part], *second[part]]):
            before, after = first[part].get(name), second[part].get(name)
            if before != after:
                found.append(f"{name} {before} and {after}")
    return found


def _line(name: tuple[str, str], first: Data, second: Data) -> Line:
    """``first`` and ``second``: the check's result in each outcome, empty where there is none."""
    passed, milliseconds = (
        (first.get(part), second.get(part)) for part in ("passed", "milliseconds")
    )
    failures = dict.fromkeys([*first.get("failures", ()), *second.get("failures", ())])
    return Line(*name, passed, milliseconds, tuple(failures))
