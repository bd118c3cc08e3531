"""Results of the matrix as one table: ``python -m tests.matrix.outcome`` reads build/matrix and
writes outcome.json.

A row that was not run this time stays as it is, so that one pair can be run again.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mla_fusion.releases import RELEASES, numbers
from mla_fusion.report import text_tables
from tests.matrix.cells import REFUSED, WORKS, cells
from tests.matrix.hf import ending_of

RESULTS = Path("build/matrix")
KEPT = Path(__file__).with_name("outcome.json")


def read(path: Path) -> dict[str, Any]:
    """The row of one run: how many tests of each cell passed, failed and were skipped."""
    torch_npu, _, python = path.stem.partition("+py")
    release = next(row for row in RELEASES if row.torch_npu == torch_npu)
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    found: dict[str, Counter[str]] = {}
    for case in suite.iter("testcase"):
        cell = _cell(_node(case), release.works)
        if cell is not None:
            found.setdefault(cell, Counter())[ending_of(case)] += 1
    return {
        "torch_npu": torch_npu,
        "torch": release.torch,
        "python": python,
        "machine": platform.machine(),
        "date": date.today().isoformat(),
        "seconds": round(float(suite.get("time", 0))),
        "works": release.works,
        "cells": {name: dict(counts) for name, counts in found.items()},
    }


def _node(case: ElementTree.Element) -> str:
    """``tests/a/test_b.py::test_c[d]``, also where the file itself could not be imported."""
    file = case.get("file") or str(case.get("name")).replace(".", "/") + ".py"
    return f"{file}::{case.get('name')}"


def _cell(node: str, works: bool) -> str | None:
    for name, tests in cells(works).items():
        if any(node.startswith(test) for test in tests):
            return name
    return None


def word(counts: dict[str, int] | None) -> str:
    """A cell in one word, or in numbers where something failed."""
    if not counts:
        return "-"
    if counts.get("failed"):
        return f"{counts['failed']} of {sum(counts.values())} failed"
    return "ok" if counts.get("passed") else "skipped"


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: pairs by columns. What a refused release has no cell for is refused."""
    columns = list(dict.fromkeys((*WORKS, *REFUSED)))
    lines = []
    for row in rows:
        absent = "refused" if not row["works"] else "-"
        done = [word(row["cells"][name]) if name in row["cells"] else absent for name in columns]
        if row["works"]:
            done[columns.index("refused by name")] = ""
        lines.append([row["torch_npu"], row["python"], *done])
    return ["torch_npu", "Python", *columns], lines


def merged(kept: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By pair and interpreter, the newest; but one with more cells stays: no quick run is kept."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (*kept, *new):
        key = row["torch_npu"], row["python"]
        if len(row["cells"]) >= len(rows[key]["cells"] if key in rows else ()):
            rows[key] = row
    order = {row.torch_npu: place for place, row in enumerate(RELEASES)}
    return [rows[key] for key in sorted(rows, key=lambda key: (order[key[0]], numbers(key[1])))]


def failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for name, counts in row["cells"].items():
            if counts.get("failed"):
                yield f"{row['torch_npu']} on Python {row['python']}: {name}"


def main() -> int:
    new = [read(path) for path in sorted(RESULTS.glob("*.xml"))]
    if not new:
        print(f"no results in {RESULTS}: make matrix")
        return 1
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else []
    rows = merged(kept, new)
    KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    print(text_tables.render(*table(rows)))
    failed = list(failures(new))
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
