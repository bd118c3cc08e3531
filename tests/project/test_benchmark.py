"""The benchmarks run: every engine still finds every layer. No time is judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import one_in

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.exhaustive
def test_one_layer(tmp_path: Path) -> None:
    target = tmp_path / "times.json"
    options = [*"--layers 1 --dims small --repeat 1 --json".split(), target]
    subprocess.run([sys.executable, FOLDER / "pass_time.py", *options], check=True)
    (row,) = json.loads(target.read_text())["dims"]["small"]["rows"]
    assert row["layers"] == 1 and all(seconds > 0 for seconds in row["seconds"].values())
    assert set(row["seconds"]) >= {"fuse", "explain", "Inductor", "SubgraphMatcher"}


FILES = sorted(FOLDER.glob("*.py"))
SCRIPTS = [path for path in FILES if '__name__ == "__main__"' in path.read_text("utf-8")]


@pytest.mark.parametrize("script", one_in(5, SCRIPTS), ids=lambda script: script.stem)
def test_each_begins_in_a_shell_of_its_own(script: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
    asked = [sys.executable, str(script), "--help"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True)
    assert not done.returncode and "usage" in done.stdout, done.stderr
