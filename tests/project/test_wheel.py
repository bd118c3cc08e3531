"""What a wheel of the project holds: one package, and nothing generic beside it."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
SOURCES = {
    "mla_fusion": "mla_fusion",
    "meta": "mla_fusion/meta",
    "converters": "mla_fusion/converters",
    "examples": "mla_fusion/examples",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The file names in a wheel built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    wheels = tmp_path_factory.mktemp("wheels")
    for folder in SOURCES:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(wheels)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = wheels.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_only_mla_fusion_lands_at_the_top(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mla_fusion"}


def test_every_module_is_shipped(names: set[str]) -> None:
    """A new package directory must be added to pyproject.toml."""
    for folder, home in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{home}/{path.relative_to(ROOT / folder).as_posix()}" in names


def test_the_source_archive_holds_what_a_wheel_is_built_from(tmp_path: Path) -> None:
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "build", "tests", "docs", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=left_out)
    build = BUILD.replace("build_wheel", "build_sdist")
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    wanted = [
        path.relative_to(ROOT)
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    missing = [
        path for path in wanted if "__pycache__" not in path.parts and path.as_posix() not in names
    ]
    assert not missing and {"pyproject.toml", "LICENSE", "CHANGELOG.md"} <= names


def test_data_files_are_shipped(names: set[str]) -> None:
    wanted = [
        f"{home}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, home in SOURCES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert "mla_fusion/py.typed" in wanted
    assert not [name for name in wanted if name not in names]
