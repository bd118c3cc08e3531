"""The matrix of transformers: which releases, which tests, and their results as one table.

`nox -s transformers` gives each release an environment of its own (`-t 4.57.6` for one); there,

    python -m pytest -o junit_family=xunit1 --junitxml=build/transformers/4.57.6/all.xml \\
        $(python -m tests.matrix.hf --tests)

writes its results, and `python -m tests.matrix.hf` reads all that lie in build/transformers into
hf.json beside this file, which the table of docs/hugging-face.md is written from. A row that was
not run this time stays as it is; of a test that was run again, in another file beside the first,
the last result counts.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

RELEASES = ("4.57.6", "5.5.4", "5.14.1", "5.23.0")
"""The last of transformers 4, two that users run, and the newest."""

TORCH_NPU = "2.13.0"
"""Beside which all of them stand, with its torch."""

RESULTS = Path("build/transformers")
KEPT = Path(__file__).with_name("hf.json")

_OPTIMIZE, _COMPILED = "tests/models/test_hf_optimize.py", "tests/models/test_hf_compiled.py"
GREEDY = f"{_OPTIMIZE}::test_greedy_tokens_are_the_same"

# Column: the tests behind it, by what their names begin with.
CELLS: dict[str, tuple[str, ...]] = {
    "greedy tokens": (GREEDY,),
    "ways to generate": (
        f"{_OPTIMIZE}::test_caches",
        f"{_OPTIMIZE}::test_every_way_to_generate",
        f"{_OPTIMIZE}::test_chunked_prefill",
        f"{_OPTIMIZE}::test_the_paged_cache",
    ),
    "errors": (f"{_OPTIMIZE}::test_rounded_models",),
    "paged cache": ("tests/models/test_paged_cache.py",),
    "compiled steps": (f"{_COMPILED}::",),
    "refusals": ("tests/models/test_hf_refusals.py",),
    "the rest": (
        _OPTIMIZE,
        "tests/models/test_absorbed.py",
        "tests/models/test_hf_cli.py",
        "tests/models/test_tensor_parallel.py",
    ),
}


def tests() -> list[str]:
    """The files that a release is tested with."""
    return sorted({prefix.partition("::")[0] for prefixes in CELLS.values() for prefix in prefixes})


def read(folder: Path) -> dict[str, Any]:
    """The row of one release: results of each cell, models converted, the largest error ratio."""
    cases: dict[str, ElementTree.Element] = {}
    for path in sorted(folder.glob("*.xml"), key=lambda path: path.stat().st_mtime):
        cases |= {_node(case): case for case in ElementTree.parse(path).getroot().iter("testcase")}
    found: dict[str, Counter[str]] = {name: Counter() for name in CELLS}
    models, ratios = [], []
    for node, case in cases.items():
        ending = ending_of(case)
        found[_cell(node)][ending] += 1
        if node.startswith(GREEDY) and ending == "passed":
            models.append(node.partition("[")[2].rstrip("]"))
        ratios += [
            float(item.get("value", 0))
            for item in case.iter("property")
            if item.get("name") == "ratio"
        ]
    return {
        "transformers": folder.name,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": date.today().isoformat(),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases.values())),
        "cells": {name: dict(sorted(counts.items())) for name, counts in found.items()},
        "models": models,
        "largest_ratio": max(ratios, default=None),
    }


def _node(case: ElementTree.Element) -> str:
    """``tests/a/test_b.py::test_c[d]``."""
    file = case.get("file") or str(case.get("classname")).replace(".", "/") + ".py"
    return f"{file}::{case.get('name')}"


def _cell(node: str) -> str:
    return next(
        name
        for name, prefixes in CELLS.items()
        if any(node.startswith(prefix) for prefix in prefixes)
    )


def ending_of(case: ElementTree.Element) -> str:
    for word, ending in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if case.find(word) is not None:
            return ending
    return "passed"


def word(counts: dict[str, int]) -> str:
    """A cell in numbers: those that passed; of those that failed, how many."""
    if counts.get("failed"):
        return f"{counts['failed']} of {sum(counts.values())} failed"
    return str(counts.get("passed", 0) or "-")


def merged(kept: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By release, the newest of each."""
    rows = {row["transformers"]: row for row in (*kept, *new)}
    return [
        rows[release]
        for release in sorted(
            rows, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]
        )
    ]


def failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for name, counts in row["cells"].items():
            if counts.get("failed"):
                yield f"transformers {row['transformers']}: {name}: {word(counts)}"


def main(arguments: list[str]) -> int:
    if "--tests" in arguments:
        print(*tests())
        return 0
    new = [read(folder) for folder in (sorted(RESULTS.iterdir()) if RESULTS.is_dir() else [])]
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else []
    KEPT.write_text(json.dumps(merged(kept, new), indent=1) + "\n")
    failed = list(failures(new))
    print(*(failed or [f"{len(new)} releases, nothing failed"]), sep="\n")
    return 1 if failed or not new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
