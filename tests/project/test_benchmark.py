"""The benchmarks run: every engine still finds every layer (it asserts so itself). No time is
judged here.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import one_in

FOLDER = Path(__file__).parents[2] / "benchmarks"


def measured(patch: pytest.MonkeyPatch, target: Path, script: str, *options: str) -> Any:
    patch.syspath_prepend(str(FOLDER))
    patch.setattr(sys, "argv", [script, *options, "--json", str(target)])
    held = set(sys.modules)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    for name in set(sys.modules) - held:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]
    assert not end.value.code
    return json.loads(target.read_text())


def test_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = ("--layers", "1", "--dims", "small", "--repeat", "1")
    (row,) = measured(monkeypatch, tmp_path / "times.json", "pass_time.py", *once)["dims"]["small"][
        "rows"
    ]
    assert row["layers"] == 1 and all(seconds > 0 for seconds in row["seconds"].values())
    assert set(row["seconds"]) >= {"fuse", "explain", "Inductor", "SubgraphMatcher"}


SCRIPTS = [
    path
    for path in sorted(FOLDER.glob("*.py"))
    if '__name__ == "__main__"' in path.read_text("utf-8")
]


@pytest.mark.parametrize("script", one_in(5, SCRIPTS), ids=lambda script: script.stem)
def test_each_begins_in_a_shell_of_its_own(script: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
    asked = [sys.executable, str(script), "--help"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True)
    assert not done.returncode and "usage" in done.stdout, done.stderr
