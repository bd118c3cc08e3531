"""The matrix: a named subset of the tests on every pair of torch and torch_npu, each in an
environment of its own.

    make matrix                        every pair of mla_fusion/releases.py
    make matrix PAIR=2.10.0            the pairs of that torch; PAIR=2.9.0.post9 for one of several
    make matrix PAIR=2.13.0 WITH=3.12  with another interpreter
    make matrix PAIR=2.14.0 QUICK=1    the subset that CI runs

An environment stays in .nox, so that a second run installs nothing. Results go to build/matrix as
JUnit XML, of which tests/matrix/outcome.py makes the table.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))

from mla_fusion.releases import RELEASES, Release
from tests.matrix import hf
from tests.matrix.cells import cells

RESULTS = Path("build/matrix")
# The interpreter of all environments; by default the one that nox runs with.
PYTHON = os.environ.get("MATRIX_PYTHON") or f"{sys.version_info.major}.{sys.version_info.minor}"

# What torch itself imports. Resolved with its dependencies, a CUDA build brings 3 GB of CUDA's
# wheels.
TORCH_NEEDS = (
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "setuptools<81",
    "sympy>=1.13.3",
    "typing-extensions",
)
# What torch_npu and torchair import, and the tests.
NEEDS = (
    "numpy",
    "packaging",
    "protobuf",
    "pyyaml",
    "pyelftools>=0.30",
    "expecttest",
    "hypothesis>=6",
    "pytest>=9",
)

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["matrix"]


def _param(release: Release) -> object:
    tags = dict.fromkeys((release.torch_npu, _public(release.torch)))
    return nox.param(release, id=release.torch_npu, tags=list(tags))


def _public(version: str) -> str:
    """Without the local part: not every index serves CPU builds, and any build becomes one."""
    return version.partition("+")[0]


@nox.session(python=[PYTHON])  # a list, so that it is part of the name of the environment
@nox.parametrize("release", [_param(release) for release in RELEASES if release.tested])
def matrix(session: nox.Session, release: Release) -> None:
    """Tests of one pair."""
    _install(session, release)
    chosen = cells(release.works, quick="--quick" in session.posargs)
    tests = [test for group in chosen.values() for test in group]
    session.run(
        *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"),
        f"--junitxml={RESULTS / f'{release.torch_npu}+py{PYTHON}.xml'}",
        *tests,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
    )


@nox.session(python=[PYTHON])
@nox.parametrize(
    "release", [nox.param(release, id=release, tags=[release]) for release in hf.RELEASES]
)
def transformers(session: nox.Session, release: str) -> None:
    """Conversion of Hugging Face models in one release of transformers; `python -m tests.matrix.hf`
    makes the table.
    """
    _install(session, next(row for row in RELEASES if row.torch_npu == hf.TORCH_NPU))
    session.install(f"transformers=={release}")
    session.run(
        *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"),
        f"--junitxml={hf.RESULTS / release / 'all.xml'}",
        *hf.tests(),
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
    )


def _install(session: nox.Session, release: Release) -> None:
    stamp = Path(session.virtualenv.location, ".ready")
    wanted = f"{release.torch} {release.torch_npu}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    # Files of torch are changed afterwards: not those of uv's cache.
    environment = {"UV_LINK_MODE": "copy", "UV_NO_CACHE": "1", "UV_HTTP_TIMEOUT": "600"}
    pair = (f"torch=={_public(release.torch)}", f"torch_npu=={release.torch_npu}")
    session.install("--no-deps", *pair, env=environment)
    session.install(*TORCH_NEEDS, *NEEDS)
    session.install("--no-deps", "-e", ".")
    folder = session.run_install(
        "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True
    )
    without_cuda = (sys.executable, "-m", "tests.matrix.without_cuda", str(folder).strip())
    session.run_install(
        *without_cuda, external=True, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    stamp.write_text(wanted)
