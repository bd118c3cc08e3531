"""The survey behind ``mla-fusion doctor``."""

import json
import platform

import torch

from mla_fusion.compile import doctor


def test_survey_is_plain_data_about_this_machine() -> None:
    found = json.loads(json.dumps(doctor.survey()))
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch_npu"].startswith("2.")
    assert found["offline"]["active"] and found["offline"]["error"] is None
    assert (found["cann"], found["device"]) == (None, None)


def test_survey_says_who_converts_what() -> None:
    operators = doctor.survey()["operators"]
    assert operators["npu_mla_prolog_v3_functional"] == {"schema": True, "converter": "torchair"}
    # torchair converts only the functional form of this one.
    assert operators["npu_kv_rmsnorm_rope_cache_v2"] == {"schema": True, "converter": "none"}
    assert operators["npu_kv_rmsnorm_rope_cache_v2_functional"]["converter"] == "torchair"


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
