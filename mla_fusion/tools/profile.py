"""``mla-fusion profile``: sums up the prologue and the kernels around it in a profile of an NPU,
and the change between two profiles.

It reads kernel_details.csv of torch_npu.profiler and op_summary_*.csv of msprof. Nobody has run it
on a profile of a device: the columns are those of the vendor's documentation.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.target import UserError

# the columns of the profiler and of msprof, in small letters, without blanks and units
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
_text = "{:.1f}".format  # of a figure


@dataclass(frozen=True)
class Kernel:
    """A row of the file; times in us. ``step`` and ``stream`` are "" if the file has none."""

    us: float
    type: str = ""
    core: str = ""
    wait: float = 0.0
    start: float = 0.0
    step: str = ""
    stream: str = ""


@dataclass(frozen=True)
class Row:
    """The number of kernels of one type in a step, and their times in a step."""

    type: str
    core: str
    calls: float
    us: float
    wait: float


def read(path: Path) -> list[Kernel]:
    """Returns the kernels of a profile in order of time, without communication. Raises
    UserError.
    """
    kernels, line = list[Kernel](), 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            columns = {
                name: _COLUMNS.get(re.sub(r"[\s_]|\(.*", "", name).lower())
                for name in rows.fieldnames or ()
            }
            if not {"type", "us", "start"} <= {*columns.values()}:
                raise ValueError("no columns of types, durations and start times")
            for row in rows:
                line, cells = rows.line_num, dict[str, Any]()
                if None in row.values():
                    raise ValueError("the row is cut off")
                for name, key in columns.items():
                    text = row[name].strip()
                    if key is not None and text not in ("", "N/A"):
                        unit = 1000 if "(ns)" in name else 1
                        cells[key] = float(text) / unit if key in _TIMES else text
                if not isfinite(sum(cells.get(key, 0) for key in _TIMES)):
                    raise ValueError("a time is no number")
                if "us" in cells and not _COMMUNICATION.search(cells.get("core", "")):
                    kernels.append(Kernel(**cells))
    except (ValueError, csv.Error) as error:
        raise UserError(
            f"{path} is no kernel_details.csv or op_summary_*.csv: line {line}: {error}"
        ) from error
    if not kernels:
        raise UserError(f"{path} holds no kernel: profile a step that runs on the device")
    return sorted(kernels, key=attrgetter("start"))


@dataclass(frozen=True)
class Profile:
    """The steps of a file. A file without a column of steps is one step.

    figures   by step: the number of kernels, their time, their waits, and the time from first to
              last
    prologue  the prologue's kernels
    around    kernels that only move or convert, directly before or behind those
    """

    path: str
    has_steps: bool
    figures: dict[str, list[float]]
    prologue: list[Row]
    around: list[Row]

    @property
    def layers(self) -> float:
        """Returns the number of prologues in a step: each has one kernel."""
        return sum(row.calls for row in self.prologue)

    def __str__(self) -> str:
        count = len(self.figures["kernels"])
        steps = f"{count} steps" if self.has_steps else "no column of steps, so one step"
        rows = [
            (name, *map(_text, (median(values), min(values), max(values))))
            for name, values in self.figures.items()
        ]
        return f"""\
{self.path}: {steps}, {self.layers:g} prologue kernels a step
{text_tables.render(("a step", "median", "least", "most"), rows)}
the prologue, a step:
{_table(self.prologue)}
casts, transposes, copies and scatters around it, a step:
{_table(self.around)}"""


def _table(rows: Iterable[Row]) -> str:
    """Returns the kernels as a table."""
    cells = [(row.type, row.core, *map(_text, (row.calls, row.us, row.wait))) for row in rows]
    head = ("type", "core", "calls", "us", "wait us")
    return text_tables.render(head, cells) if cells else "  none"


def summarise(path: Path) -> Profile:
    """Returns the sums of a file. Raises UserError."""
    by_step = defaultdict[str, list[Kernel]](list)
    for kernel in read(path):
        by_step[kernel.step].append(kernel)
    if len(by_step) > 1:
        by_step.pop("", None)  # kernels between two steps
    steps = list(by_step.values())
    figures: dict[str, list[float]] = {
        "kernels": [len(step) for step in steps],
        "busy us": [sum(kernel.us for kernel in step) for step in steps],
        "wait us": [sum(kernel.wait for kernel in step) for step in steps],
        "span us": [max(k.start + k.us for k in step) - step[0].start for step in steps],
    }
    prologue, around = list[Kernel](), list[Kernel]()
    for step in steps:
        prologue += (kernel for kernel in step if _PROLOGUE.search(kernel.type))
        around += _around(step)
    tables = (_rows(kernels, len(steps)) for kernels in (prologue, around))
    return Profile(str(path), "" not in by_step, figures, *tables)


def _around(step: Sequence[Kernel]) -> Iterator[Kernel]:
    """Yields the moves of a step that are next to a prologue's kernel in its stream."""
    kernels, places = sorted(step, key=attrgetter("stream")), set[int]()
    for place, kernel in enumerate(kernels):
        for way in (1, -1) if _PROLOGUE.search(kernel.type) else ():
            beside = place + way
            while 0 <= beside < len(kernels) and _MOVE.match(kernels[beside].type):
                if kernels[beside].stream != kernel.stream:
                    break
                places.add(beside)
                beside += way
    yield from (kernels[place] for place in places)


def _rows(kernels: Iterable[Kernel], steps: int) -> list[Row]:
    """Returns a row for each type of kernel."""
    groups = defaultdict[tuple[str, str], list[tuple[float, ...]]](list)
    for kernel in kernels:
        groups[kernel.type, kernel.core].append((1.0, kernel.us, kernel.wait))
    return [
        Row(*key, *(sum(column) / steps for column in zip(*group, strict=True)))
        for key, group in sorted(groups.items())
    ]


@dataclass(frozen=True)
class Comparison:
    """The profile with the pass on, and the profile with the pass off, if there is one."""

    after: Profile
    before: Profile | None = None

    def difference(self) -> dict[str, dict[str, float]]:
        """Returns by figure the change of a step (the medians; least and most of all pairs of
        steps) and of a layer that only one of them has fused. Returns nothing if there is one
        profile.
        """
        if self.before is None:
            return {}
        figures = {}
        layers = self.after.layers - self.before.layers or self.after.layers or 1
        for name, before in self.before.figures.items():
            after = self.after.figures[name]
            step = median(after) - median(before)
            figures[name] = {
                "step": step,
                "least": min(after) - max(before),
                "most": max(after) - min(before),
                "layer": step / layers,
            }
        return figures

    def to_json(self) -> str:
        """Returns all figures as JSON text."""
        return text_tables.as_json({**asdict(self), "difference": self.difference()})

    def __str__(self) -> str:
        if self.before is None:
            return str(self.after)
        figures = self.difference().items()
        rows = [(name, *(f"{value:+.1f}" for value in row.values())) for name, row in figures]
        head = ("after less before", "a step", "least", "most", "a layer")
        return f"{self.before}\n\n{self.after}\n\n{text_tables.render(head, rows)}"
