"""What the wheel wants of CANN, and stand-ins for symbols of every kind, on small libraries."""

import subprocess
from pathlib import Path

import pytest

from mla_fusion.compile.offline import symbols
from mla_fusion.compile.offline.symbols import OfflineError, Wheel


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@pytest.mark.parametrize("version", ["2.12.0", "2.13.1", "2.9.0.post4"])
def test_other_torch_version_is_refused(version: str) -> None:
    with pytest.raises(
        OfflineError,
        match=r"was built for torch .* pip install torch==2\.13\.0 "
        r"torch_npu==2\.13\.0",
    ):
        symbols.check_versions(Wheel(version, Path("."), ()), "2.13.0+cpu")


@pytest.mark.parametrize("version", ["2.13.0.post1", "2.13.0rc1", "2.13.0.dev20261101"])
def test_releases_of_the_same_version_pass(version: str) -> None:
    symbols.check_versions(Wheel(version, Path("."), ()), "2.13.0+cpu")


def test_a_build_without_metadata_is_refused() -> None:
    with pytest.raises(OfflineError, match="'unknown' is no version"):
        symbols.check_versions(Wheel("unknown", Path("."), ()), "2.13.0")


def test_absent_torch_npu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "find_spec", lambda name: None)
    with pytest.raises(OfflineError, match="torch_npu is not installed"):
        symbols.find_wheel()
