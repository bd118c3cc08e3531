"""Outcomes of the self-test that somebody has sent: read, judged, and compared with another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.page import plain

_FIELDS = ("device", "versions", "results")
_SLOWER = 1.25  # times the other's time: worth a look


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
        first, second = self.passed
        if second is None:
            return "only in the first" if first is not None else ""
        if first is None:
            return "only in the second"
        if first and not second:
            return "fails now"
        if second and not first:
            return "passes now"
        if not first:
            return "fails in both"
        before, after = self.milliseconds
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
        return json.dumps({**asdict(self), "lines": rows, "ok": self.ok}, indent=2)

    @property
    def _shown(self) -> list[Line]:
        """What is worth a look: everything of one outcome, what differs or fails of two."""
        if len(self.titles) == 1:
            return sorted(self.lines, key=lambda line: bool(line.passed[0]))
        return [line for line in self.lines if line.verdict != "same"]

    def _rows(self) -> list[tuple[str, ...]]:
        pair = len(self.titles) > 1
        return [
            (
                line.name,
                line.through,
                *(map(_word, line.passed[: len(self.titles)])),
                *(map(_time, line.milliseconds[: len(self.titles)])),
                line.verdict if pair else "",
            )
            for line in self._shown
        ]

    @property
    def _header(self) -> tuple[str, ...]:
        if len(self.titles) == 1:
            return "scenario", "through", "check", "ms", ""
        return "scenario", "through", "first", "second", "first ms", "second ms", "verdict"

    def __str__(self) -> str:
        parts = [
            f"{title}: {passed} passed, {failed} failed"
            for title, (passed, failed) in zip(self.titles, self.counts, strict=True)
        ]
        parts += [f"differs: {text}" for text in self.differences]
        rows = self._rows()
        parts.append(text_tables.render(self._header, rows) if rows else "no check differs")
        parts += [
            f"FAILED {line.name} ({line.through}): {text}"
            for line in self.lines
            for text in line.failures
        ]
        return "\n".join(parts)

    def to_html(self, path: str | Path) -> Path:
        """Write a page that stands alone."""
        failed = [
            f"FAILED {line.name} ({line.through}): {text}"
            for line in self.lines
            for text in line.failures
        ]
        notes = [("maybe", f"differs: {text}", ()) for text in self.differences]
        notes += [("wrong", text, ()) for text in failed]
        counted = zip(self.titles, self.counts, strict=True)
        headings = [
            f"{title}: {passed} passed, {failed} failed" for title, (passed, failed) in counted
        ]
        rows, nothing = self._rows(), "No check differs."
        return plain.write(
            path, "mla_fusion selftest", headings, notes, self._header, rows, nothing
        )


def read(first: str | Path, second: str | Path | None = None) -> Paper:
    """The outcome in a file that ``selftest --out`` wrote, beside another. Raises OutcomeError,
    OSError.
    """
    outcomes = [_load(path) for path in (first, second) if path is not None]
    by_name = [
        {(row["name"], row["through"]): row for row in outcome["results"]} for outcome in outcomes
    ]
    names = dict.fromkeys(name for rows in by_name for name in rows)
    lines = [_line(name, [rows.get(name) for rows in by_name]) for name in names]
    counts = [
        (
            sum(bool(row["passed"]) for row in outcome["results"]),
            sum(not row["passed"] for row in outcome["results"]),
        )
        for outcome in outcomes
    ]
    differences = _differences(*outcomes) if len(outcomes) > 1 else []
    return Paper(tuple(map(_title, outcomes)), tuple(counts), tuple(differences), tuple(lines))


def _load(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise OutcomeError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or any(field not in data for field in _FIELDS):
        raise OutcomeError(
            f"{path} is no outcome of `mla-fusion selftest --out`: it has not {', '.join(_FIELDS)}"
        )
    for row in data["results"]:
        if not isinstance(row, dict) or not {"name", "through", "passed", "failures"} <= row.keys():
            raise OutcomeError(f"{path}: a result without name, through, passed and failures")
    return data


def _title(outcome: dict[str, Any]) -> str:
    device = outcome["device"]
    return (
        f"{device.get('kind')} ({device.get('name')}), {device.get('soc')}, CANN "
        f"{device.get('cann')}"
    )


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    found = []
    for part in ("device", "versions"):
        for name in dict.fromkeys([*first[part], *second[part]]):
            before, after = first[part].get(name), second[part].get(name)
            if before != after:
                found.append(f"{name} {before} and {after}")
    return found


def _line(name: tuple[str, str], rows: list[dict[str, Any] | None]) -> Line:
    first, second = (*rows, None)[:2]
    both = (first, second)
    failures = tuple(dict.fromkeys(text for row in both if row for text in row["failures"]))
    return Line(
        *name,
        passed=(_passed(first), _passed(second)),
        milliseconds=(_milliseconds(first), _milliseconds(second)),
        failures=failures,
    )


def _passed(row: dict[str, Any] | None) -> bool | None:
    return None if row is None else bool(row["passed"])


def _milliseconds(row: dict[str, Any] | None) -> float | None:
    return None if row is None else row.get("milliseconds")


def _word(passed: bool | None) -> str:
    return {None: "-", True: "ok", False: "FAILED"}[passed]


def _time(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f}"
