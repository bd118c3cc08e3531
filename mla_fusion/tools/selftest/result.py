"""What one check of the self-test found, and what all of them found together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.selftest.compare import Comparison
from mla_fusion.tools.selftest.device import Device


@dataclass
class Result:
    """``through``: "eager" or "graph" (the operator called), or "fused" (the pass's graph against
    the unfused one).

    ``milliseconds``: median time of a call; ``unfused_milliseconds``: of the unfused graph, where
    there is one. ``others_untouched``: the cache rows that belong to no token have the bits they
    had.
    """

    name: str
    through: str
    comparisons: list[Comparison] = field(default_factory=list)
    others_untouched: bool = True
    milliseconds: float | None = None
    unfused_milliseconds: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """One sentence for each thing that is wrong; empty where it passed."""
        changed = "cache rows that belong to no token have changed"
        return [
            *self.problems,
            *(f"{item.output}: {item.problem}" for item in self.comparisons if item.problem),
            *([] if self.others_untouched else [changed]),
        ]

    @property
    def worst(self) -> Comparison | None:
        """The comparison to show in one line: one that failed, else the one with most differing
        elements.
        """
        return max(
            self.comparisons, key=lambda c: (bool(c.problem), c.differing, c.largest), default=None
        )


@dataclass
class Outcome:
    """All results on one device. ``versions`` names the software that took part."""

    device: Device
    versions: dict[str, Any]
    results: list[Result]
    seconds: float = 0.0

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.failures]

    def to_json(self) -> str:
        """Everything measured, to send to someone who has no device."""
        rows = [
            {**asdict(r), "passed": not r.failures, "failures": r.failures} for r in self.results
        ]
        data = {
            "device": asdict(self.device),
            "versions": self.versions,
            "passed": len(self.results) - len(self.failed),
            "failed": len(self.failed),
            "seconds": round(self.seconds, 1),
            "results": rows,
        }
        return text_tables.as_json(data)

    def __str__(self) -> str:
        on_npu = self.device.kind == "npu"
        rows = [_row(result, on_npu) for result in self.results]
        lines = [text_tables.render(list(rows[0]), [list(row.values()) for row in rows], indent="")]
        lines += failed_lines(self.failed)
        if not on_npu:
            said = "A CPU stands in for the device: its times mean nothing, and are not shown."
            lines.append(said)
        passed, count = len(self.results) - len(self.failed), len(self.results)
        lines.append(f"{self.device}: {passed} of {count} checks passed in {self.seconds:.0f} s")
        return "\n".join(lines)


def _row(result: Result, on_npu: bool) -> dict[str, str]:
    """Cells by the heading of their column."""
    worst = result.worst
    times = {"ms": result.milliseconds, "unfused ms": result.unfused_milliseconds}
    return {
        "scenario": result.name,
        "through": result.through,
        "worst output": f"{worst.output} {worst.dtype}" if worst else "-",
        "largest": f"{worst.largest:.2g}" if worst else "-",
        "differing": f"{worst.differing:.2%}" if worst else "-",
        "others": "same" if result.others_untouched else "CHANGED",
        **({name: time_text(time) for name, time in times.items()} if on_npu else {}),
        "check": "FAILED" if result.failures else "ok",
    }


def failed_lines(checks: Iterable[Any]) -> list[str]:
    """What failed, of checks that have a name, a way and failures."""
    return [f"FAILED {one.name} ({one.through}): {text}" for one in checks for text in one.failures]


def time_text(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f}"
