"""What pip would install beside a torch and a torch_npu that work: this package alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion.releases import RELEASES, Release

ROOT = Path(__file__).parents[2]
PAIRS = [
    release
    for release in RELEASES
    if release.torch_npu in ("2.8.0.post5", "2.10.0.post7", "2.14.0")
]
# What an NPU machine takes, and a laptop with a pair.
EXTRAS = "torchair,offline"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, where pip may write beside them."""
    copied = tmp_path_factory.mktemp("source")
    for folder in ("mla_fusion", "meta", "converters", "examples"):
        shutil.copytree(
            ROOT / folder, copied / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copied)
    return copied


def installed(site: Path, name: str, version: str, *requires: str) -> None:
    """Metadata by which pip takes a release for installed."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "INSTALLER").write_text("pip\n")


def resolved(source: Path, site: Path, *arguments: str) -> dict[str, str]:
    """Name -> version of what pip's resolver would install beside the packages in ``site``."""
    report = site / "report.json"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--report",
        str(report),
        "--no-index",
    ]
    command += ["--no-build-isolation", f"{source}[{EXTRAS}]", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    items = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in items}


@pytest.mark.parametrize("release", PAIRS, ids=lambda release: release.torch_npu)
def test_a_pair_that_works_is_left_alone(release: Release, source: Path, tmp_path: Path) -> None:
    installed(tmp_path, "torch", release.torch)
    installed(
        tmp_path, "torch_npu", release.torch_npu, f"torch=={release.torch}", "numpy", "pyyaml"
    )
    # nothing else may be asked for beside it
    pair = (f"torch=={release.torch}", f"torch_npu=={release.torch_npu}")
    assert set(resolved(source, tmp_path, *pair)) == {"mla-fusion"}


def test_another_torch_would_be_seen(source: Path, tmp_path: Path) -> None:
    """The resolver does look: what the installed torch does not meet has nowhere to come from."""
    installed(tmp_path, "torch", "2.10.0+cpu")
    with pytest.raises(AssertionError, match=r"torch==2\.9\.0"):
        resolved(source, tmp_path, "torch==2.9.0")
