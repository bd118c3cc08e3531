"""The benchmarks run: every engine still finds every layer (it asserts so itself). No time is judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_layer(tmp_path: Path) -> None:
    target = tmp_path / "times.json"
    command = [sys.executable, "benchmarks/pass_time.py", "--layers", "1", "--dims", "small", "--repeat", "1"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([*command, "--json", str(target)], cwd=ROOT, env=environment, check=True, capture_output=True)
    (row,) = json.loads(target.read_text())["dims"]["small"]["rows"]
    assert row["layers"] == 1 and all(seconds > 0 for seconds in row["seconds"].values())
    assert set(row["seconds"]) >= {"fuse", "explain", "Inductor", "SubgraphMatcher"}


def test_boundary_of_one_layer(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    command = [sys.executable, "benchmarks/step_cost.py", "--layers", "1", "--repeat", "3", "--json", str(target)]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    rows = json.loads(target.read_text())
    assert [row["setting"] for row in rows] == ["views", "trusted", "checked"]
    assert [row["copied_bytes"] > 0 for row in rows] == [False, True, True]
