"""``mla-fusion profile``: the prologue in a profile of an NPU, and what stands around it; with a
second profile, what a fusion changed in a step and in a layer.

Reads kernel_details.csv of torch_npu.profiler and op_summary_*.csv of msprof. Nobody has run it on
a profile of a device: the columns are those of the vendor's documentation.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.target import UserError

# Names of columns in small letters, without blanks and unit: those of the profiler and of msprof.
_COLUMNS = dict(
    pair.split("=")
    for pair in """
    type=type optype=type acceleratorcore=core tasktype=core duration=us taskduration=us
    waittime=wait taskwaittime=wait starttime=start taskstarttime=start stepid=step inferid=step
    streamid=stream
    """.split()
)
_TIMES = ("us", "wait", "start")
_COMMUNICATION = re.compile(r"HCCL|COMMUNICATION", re.IGNORECASE)
_PROLOGUE = re.compile(r"MlaProlog|MlaPreprocess|KvRmsNormRopeCache")
_MOVE = re.compile(
    r"Cast|Trans|TensorMove|ViewCopy|Identity|AsStrided|Copy|Slice|StridedSlice|Split|Concat|Pack"
    r"|Pad|Scatter|IndexPut"
)


@dataclass(frozen=True)
class Kernel:
    """One row; times in us. ``step`` and ``stream`` are "" where the file does not say."""

    us: float
    type: str = ""
    core: str = ""
    wait: float = 0.0
    start: float = 0.0
    step: str = ""
    stream: str = ""


@dataclass(frozen=True)
class Row:
    """Kernels of one type: how many a step, and their time a step."""

    type: str
    core: str
    calls: float
    us: float
    wait: float


def read(path: Path) -> list[Kernel]:
    """The kernels of a profile in order of time, without communication. Raises UserError."""
    found, line = list[Kernel](), 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            columns = [_COLUMNS.get(re.sub(r"[\s_]|\(.*", "", name).lower()) for name in header]
            if not {"type", "us", "start"} <= {*columns}:
                raise ValueError("no columns of types, durations and start times")
            for row in filter(None, rows):
                line, cells = rows.line_num, dict[str, Any]()
                if len(row) < len(header):
                    raise ValueError("the row is cut off")
                for key, name, text in zip(columns, header, map(str.strip, row), strict=False):
                    if key is not None and text not in ("", "N/A"):
                        unit = 1000 if "(ns)" in name else 1
                        cells[key] = float(text) / unit if key in _TIMES else text
                if not isfinite(sum(cells.get(key, 0) for key in _TIMES)):
                    raise ValueError("a time is no number")
                if "us" in cells and not _COMMUNICATION.search(cells.get("core", "")):
                    found.append(Kernel(**cells))
    except (ValueError, csv.Error) as error:
        raise UserError(
            f"{path} is no kernel_details.csv or op_summary_*.csv: line {line}: {error}"
        ) from error
    if not found:
        raise UserError(f"{path} holds no kernel: profile a step that runs on the device")
    return sorted(found, key=lambda kernel: kernel.start)


@dataclass(frozen=True)
class Profile:
    """What a file says of its steps. Without a column of steps the whole file is one.

    figures   of each step: kernels, their time, what they waited, and from the first to the last
    prologue  the prologue's kernels
    around    what only moves or converts, directly before or behind them
    """

    path: str
    has_steps: bool
    figures: dict[str, list[float]]
    prologue: list[Row]
    around: list[Row]

    @property
    def layers(self) -> float:
        """Prologues a step: each has one kernel."""
        return sum(row.calls for row in self.prologue)

    def __str__(self) -> str:
        count = len(self.figures["kernels"])
        steps = f"{count} steps" if self.has_steps else "no column of steps, so one step"
        rows = [
            (name, *map(_text, (median(values), min(values), max(values))))
            for name, values in self.figures.items()
        ]
        parts = [
            f"{self.path}: {steps}, {self.layers:g} prologue kernels a step",
            text_tables.render(("a step", "median", "least", "most"), rows),
        ]
        for title, table in (
            ("the prologue, a step:", self.prologue),
            ("casts, transposes, copies and scatters around it, a step:", self.around),
        ):
            cells = [
                (row.type, row.core, *map(_text, (row.calls, row.us, row.wait))) for row in table
            ]
            head = ("type", "core", "calls", "us", "wait us")
            parts += [title, text_tables.render(head, cells) if cells else "  none"]
        return "\n".join(parts)


def profile(path: Path) -> Profile:
    """Read a file, and sum it up. Raises UserError."""
    by_step = defaultdict[str, list[Kernel]](list)
    for kernel in read(path):
        by_step[kernel.step].append(kernel)
    if len(by_step) > 1:
        by_step.pop("", None)  # what ran between two steps
    steps = list(by_step.values())
    figures: dict[str, list[float]] = {
        "kernels": [len(step) for step in steps],
        "busy us": [sum(kernel.us for kernel in step) for step in steps],
        "wait us": [sum(kernel.wait for kernel in step) for step in steps],
        "span us": [max(one.start + one.us for one in step) - step[0].start for step in steps],
    }
    prologue = [one for step in steps for one in step if _PROLOGUE.search(one.type)]
    around = [kernel for step in steps for kernel in _around(step)]
    tables = (_rows(some, len(steps)) for some in (prologue, around))
    return Profile(str(path), "" not in by_step, figures, *tables)


def _around(step: Sequence[Kernel]) -> Iterator[Kernel]:
    kernels, found = sorted(step, key=lambda kernel: kernel.stream), set[int]()
    for place, kernel in enumerate(kernels):
        for way in (1, -1) if _PROLOGUE.search(kernel.type) else ():
            beside = place + way
            while 0 <= beside < len(kernels) and _MOVE.match(kernels[beside].type):
                if kernels[beside].stream != kernel.stream:
                    break
                found.add(beside)
                beside += way
    yield from (kernels[place] for place in found)


def _rows(kernels: Iterable[Kernel], steps: int) -> list[Row]:
    groups = defaultdict[tuple[str, str], list[tuple[float, ...]]](list)
    for kernel in kernels:
        groups[kernel.type, kernel.core].append((1.0, kernel.us, kernel.wait))
    return [
        Row(*key, *(sum(column) / steps for column in zip(*group, strict=True)))
        for key, group in sorted(groups.items())
    ]


def _text(value: float) -> str:
    return f"{value:.1f}"


@dataclass(frozen=True)
class Found:
    """One profile, or two."""

    after: Profile
    before: Profile | None = None

    def difference(self) -> dict[str, dict[str, float]]:
        """After less before, of each figure: of a step (of medians; least and most over all pairs
        of steps), and of a layer. Empty where there is no other.
        """
        found = {}
        for name, before in self.before.figures.items() if self.before else ():
            after = self.after.figures[name]
            step = median(after) - median(before)
            found[name] = {
                "step": step,
                "least": min(after) - max(before),
                "most": max(after) - min(before),
                "layer": step / (self.after.layers or 1),
            }
        return found

    def to_json(self) -> str:
        """All figures as JSON text."""
        return text_tables.as_json({**asdict(self), "difference": self.difference()})

    def __str__(self) -> str:
        if self.before is None:
            return str(self.after)
        found = self.difference().items()
        rows = [(name, *(f"{value:+.1f}" for value in row.values())) for name, row in found]
        head = ("after less before", "a step", "least", "most", "a layer")
        return f"{self.before}\n\n{self.after}\n\n{text_tables.render(head, rows)}"
