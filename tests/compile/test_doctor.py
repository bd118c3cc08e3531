"""The survey behind ``mla-fusion doctor``."""

import json
import platform
from pathlib import Path

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compile import doctor


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


def test_survey_says_which_hooks_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_FUSION_REPORT", raising=False)
    found = doctor.survey()["hooks"]
    assert found['torch.compile(backend="mla_fusion")'] == "known"
    assert found["Inductor post_grad_custom_pre_pass"] == "none"
    assert found["MLA_FUSION_REPORT"].startswith("not set")
    monkeypatch.setenv("MLA_FUSION_REPORT", "out")
    with torch._inductor.config.patch(post_grad_custom_pre_pass=mf.torchair_pass()):
        found = doctor.survey()["hooks"]
    assert found["Inductor post_grad_custom_pre_pass"].endswith("mla_fusion_pass")
    assert found["MLA_FUSION_REPORT"] == "out"


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


def test_traps_are_told_with_what_to_do() -> None:
    found = doctor.survey()["traps"]
    assert "specialize_float = True" in found["torch.compile(dynamic=True)"]
    assert found["pattern_fusion_pass"].startswith("on by default")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set" in found["import torch"]
    assert "vllm-ascend" not in found
    with torch._dynamo.config.patch(specialize_float=True):
        assert "stays a constant" in doctor.survey()["traps"]["torch.compile(dynamic=True)"]


def test_the_raw_operators_converter_is_looked_at() -> None:
    assert "npu_mla_prolog_v3 in GE mode" in doctor.survey()["traps"]
