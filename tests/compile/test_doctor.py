"""The survey behind ``mla-fusion doctor``."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fusion.tools import doctor


def test_survey_is_plain_data_about_this_machine() -> None:
    found = json.loads(json.dumps(doctor.survey()))
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch_npu"].startswith("2.")
    assert found["offline"]["active"] and found["offline"]["error"] is None
    assert (found["cann"], found["device"]) == (None, None)


def test_survey_says_who_converts_what() -> None:
    operators = doctor.survey()["operators"]
    everywhere = {"schema": "torch_npu", "cpu_kernel": "mla_fusion"}
    assert operators["npu_mla_prolog_v3_functional"] == everywhere | {"converter": "torchair"}
    # torchair converts only the functional form of this one.
    assert operators["npu_kv_rmsnorm_rope_cache_v2"] == everywhere | {"converter": "none"}
    assert operators["npu_format_cast"]["converter"] == "mla_fusion"
    assert operators["npu_kv_rmsnorm_rope_cache_v2_functional"]["converter"] == "torchair"


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("version.cfg", "runtime_running_version=[7.7.0.1.238:8.3.RC1]", "8.3.RC1"),
        ("ascend_toolkit_install.info", "package_name=toolkit\nversion=8.5.0\n", "8.5.0"),
    ],
)
def test_the_version_of_cann(
    name: str, text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib64" / "libascendcl.so"
    library.parent.mkdir()
    library.touch()
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctor, "cann_location", lambda: str(library))
    assert doctor._cann_version() == version


def doctor_beside(site: Path) -> tuple[int, dict[str, Any], str]:
    """Status, answer and stderr of `mla-fusion doctor --json`, with ``site`` searched first."""
    command = [
        sys.executable,
        "-c",
        "from mla_fusion.tools.cli import main; raise SystemExit(main(['doctor', '--json']))",
    ]
    environment = {**os.environ, "PYTHONPATH": str(site), "MLA_FUSION_CACHE": str(site / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def install(site: Path, version: str, code: str, torchair: str) -> None:
    """A torch_npu that is broken when it is imported, as the loader, pip and the doctor see it."""
    compiler = site / "torch_npu" / "dynamo" / "torchair" / "npu_fx_compiler.py"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(torchair)
    (site / "torch_npu" / "__init__.py").write_text(code)
    metadata = site / f"torch_npu-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")


COMPILES = "".join(
    f"\ndef {name}(): ...\n"
    for name in ("_compile_graph_with_aot", "_get_merged_decompositions", "_process_send_recv")
)


@pytest.mark.exhaustive
def test_an_import_that_fails_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    install(tmp_path, torch.__version__, "def f(): pass\nf(allow_override=True)\n", COMPILES)
    status, found, said = doctor_beside(tmp_path)
    assert status == 1 and "Traceback" not in said
    (problem,) = found["problems"]
    assert (
        problem["check"] == "offline"
        and "f() got an unexpected keyword argument" in problem["failed"]
    )
    assert "docs/releases.md" in problem["to do"]
    assert found["versions"]["python"] == platform.python_version()
    assert found["operators"]["npu_mla_prolog_v3"] == {
        "schema": "mla_fusion",
        "cpu_kernel": "mla_fusion",
        "converter": None,
    }


@pytest.mark.exhaustive
def test_an_import_that_ends_the_process_is_a_problem(tmp_path: Path) -> None:
    ends = "import os, sys\nprint('  what():  Duplicated key', file=sys.stderr)\nos.abort()\n"
    install(tmp_path, torch.__version__, ends, COMPILES)
    status, found, _ = doctor_beside(tmp_path)
    assert status == 1
    (problem,) = found["problems"]
    assert (
        problem["failed"]
        == "importing torch_npu ends the process with SIGABRT: what():  Duplicated key"
    )


def test_a_release_that_lacks_functions_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    install(tmp_path, "2.9.0", "raise AssertionError('imported')", "def get_npu_backend(): ...\n")
    status, found, _ = doctor_beside(tmp_path)
    assert status == 1
    (problem,) = found["problems"]
    assert "lacks _compile_graph_with_aot" in problem["failed"]
    assert "pip install torch==2.9.0+cpu torch_npu==2.9.0.post9" in problem["failed"]


def test_a_check_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise KeyError("field")

    monkeypatch.setattr(doctor, "_cann_version", fails)
    found = doctor.survey()
    assert found["cann_version"] is None
    assert [(problem["check"], problem["failed"]) for problem in found["problems"]] == [
        ("cann_version", "KeyError: 'field'")
    ]
    assert found["operators"]
