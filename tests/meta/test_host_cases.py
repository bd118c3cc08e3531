"""The official host check's own unit-test cases, replayed against `mf.meta.check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fusion import meta

CASES = json.loads((Path(__file__).parent / "data" / "mla_prolog_v3_host_cases.json").read_text())[
    "cases"
]
SOC = {"Ascend910_B3": "A3", "Ascend950": "A5"}
DTYPES = {
    "BF16": torch.bfloat16,
    "FLOAT16": torch.float16,
    "FLOAT": torch.float32,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FLOAT8_E4M3FN": torch.float8_e4m3fn,
    "FLOAT8_E8M0": torch.float8_e8m0fnu,
    "HIFLOAT8": torch.uint8,
}
PARSE = {"cache_mode": lambda text: text.strip('"'), "query_norm_flag": lambda text: text == "true"}
FLOATS = ("rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv", "qc_qr_scale", "kc_scale")


def unreachable(case: dict[str, Any]) -> str | None:
    """Why torch_npu cannot issue the call of this case, or None."""
    attributes = case["attrs"]
    if "nullptr" in case["comment"] or any(value is None for value in attributes.values()):
        return "an attribute is absent: torch_npu always passes every attribute"
    inputs = {tensor["name"].split()[0]: tensor for tensor in case["inputs"]}
    if inputs["rope_sin"]["storage_shape"] == [0]:
        return (
            "RoPE switched off by empty sin/cos: aclnnMlaPrologV4WeightNz, which torch_npu does "
            "not call"
        )
    if (
        "query_norm dtype must be" in case["comment"]
        or "dequant_scale_q_norm dtype must be" in case["comment"]
    ):
        return "an output tensor of the wrong dtype: torch_npu allocates the outputs itself"
    return None


def call_of(case: dict[str, Any]) -> dict[str, Any]:
    tensors = [t for t in case["inputs"] if t["storage_shape"]][:21]
    arguments: dict[str, Any] = {}
    for tensor in tensors:
        name = tensor["name"].split()[0]
        if name in ("query", "query_rope"):  # one case lists outputs among its inputs
            continue
        arguments[name] = torch.empty(
            tensor["storage_shape"], dtype=DTYPES[tensor["dtype"]], device="meta"
        )
    for name, text in case["attrs"].items():
        parse = float if name in FLOATS else PARSE.get(name, int)
        arguments[name] = parse(text.rstrip("f") if name in FLOATS else text)
    return arguments


REACHABLE = [case for case in CASES if unreachable(case) is None]


def incomplete(case: dict[str, Any]) -> bool:
    """Case test4 of the extraction lost weight_dq, weight_uq_qr and weight_dkv_kr."""
    return len({"weight_dq", "weight_uq_qr"} - {t["name"].split()[0] for t in case["inputs"]}) > 0


@pytest.mark.parametrize(
    "case", [c for c in REACHABLE if not incomplete(c)], ids=lambda case: case["case"]
)
def test_check_agrees_with_the_official_host_check(case: dict[str, Any]) -> None:
    def run() -> None:
        meta.check("npu_mla_prolog_v3", soc=SOC[case["soc"]], cann="latest", **call_of(case))

    if case["expected"] == "OK":
        run()
    else:
        with pytest.raises(meta.ContractError):
            run()


def test_the_unreachable_cases_are_these() -> None:
    reasons: dict[str, int] = {}
    for case in CASES:
        reason = unreachable(case)
        if reason:
            reasons[reason.split(":")[0]] = reasons.get(reason.split(":")[0], 0) + 1
    assert reasons == {
        "an attribute is absent": 10,
        "RoPE switched off by empty sin/cos": 3,
        "an output tensor of the wrong dtype": 2,
    }
    assert sum(map(incomplete, REACHABLE)) == 1
