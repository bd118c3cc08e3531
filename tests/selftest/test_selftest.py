"""``mla-fusion selftest`` on the CPU kernels: everything passes, and what is broken on purpose is
found.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from mla_fusion import meta
from mla_fusion.tools import cli, selftest
from mla_fusion.tools.selftest import fused, operator, unfused
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.scenarios import Scenario, key_scenarios, scenarios
from tests.exhaustive import one_in

CPU = Device("cpu", "CPU reference kernels", "A3", "latest")
CPU_OF_A5 = Device("cpu", "CPU reference kernels", "A5", "latest")
SCENARIOS = scenarios("A3")


@pytest.mark.exhaustive
def test_every_check_passes_on_the_cpu_kernels():
    outcome = selftest.run(CPU)
    assert not outcome.failed, str(outcome)
    assert {result.through for result in outcome.results} == {"eager", "graph", "fused"}


@pytest.mark.parametrize(
    ("only", "through"),
    [
        ("v3* w[02]*PA_BSND T8", {"eager", "graph"}),
        ("preprocess", {"eager"}),
        ("half", {"fused"}),
        ("static", {"fused"}),
    ],
)
def test_some_checks_of_each_kind_pass(only, through):
    outcome = selftest.run(CPU, selftest.Options(only=only))
    assert not outcome.failed, str(outcome)
    assert {result.through for result in outcome.results} == through
    assert "A CPU stands in for the device: its times mean nothing" in str(outcome)


def test_a_fused_prologue_in_a_format_of_a5_passes():
    outcome = selftest.run(CPU_OF_A5, selftest.Options(only="mxfp8 weights"))
    assert not outcome.failed, str(outcome)
    assert [result.through for result in outcome.results] == ["fused"] * len(outcome.results) != []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("only", "least"), [("w3*PA_BSND T8", 3), ("w[345]*PA_BSND T8", 9), ("w[345]", 9)]
)
def test_the_formats_of_a5_pass(only, least):
    """In a process of its own: torch_npu's meta kernels, once loaded, refuse mode 3 on the chip of
    the stand-ins.
    """
    command = [
        sys.executable,
        "-m",
        "mla_fusion.cli",
        "selftest",
        "--device",
        "cpu",
        "--soc",
        "A5",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--only", f"npu_mla_prolog_v3 {only}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout)["passed"] >= least


@pytest.mark.parametrize(("cann", "soc"), one_in(4, itertools.product(meta.RELEASES, meta.SOCS)))
def test_scenarios_are_legal_distinct_and_complete(soc, cann):
    planned = scenarios(soc, cann)
    assert len({scenario.name for scenario in planned}) == len(planned)
    found = {(s.op, s.weight_quant_mode, s.kv_cache_quant_mode) for s in planned}
    wanted = set()
    for op in {scenario.op for scenario in planned}:
        limits = meta.limits(op, soc, cann)
        wanted |= {(op, *pair) for pair in limits.quant_modes}
    assert found == wanted
    for scenario in planned[:: max(len(planned) // 12, 1)]:
        meta.check(scenario.op, soc=soc, cann=cann, values=True, **scenario.call())


def chosen(text: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if text in scenario.name)


def tampering(monkeypatch, spoil: Any) -> None:
    """Let ``spoil(arguments, results)`` act after each call of the operator."""
    honest = operator._operator

    def spoiled(op: str, placed: dict[str, Any], through: str) -> Any:
        call = honest(op, placed, through)

        def run(arguments: dict[str, Any]) -> Any:
            results = call(arguments)
            return spoil(arguments, results) or results

        return run

    monkeypatch.setattr(operator, "_operator", spoiled)


def scaled_query(arguments: dict[str, Any], results: Any) -> Any:
    return (results[0] * 1.05, *results[1:])


def touched_neighbour(arguments: dict[str, Any], results: Any) -> None:
    written = set(arguments["cache_index"].flatten().tolist())
    free = next(slot for slot in range(10_000) if slot not in written)
    cache = arguments["kv_cache"].flatten(0, 2)
    cache[free] = -cache[free]


def written_elsewhere(arguments: dict[str, Any], results: Any) -> None:
    arguments["kr_cache"].copy_(arguments["kr_cache"].roll(1, 1))


def another_tensor(arguments: dict[str, Any], results: Any) -> None:
    arguments["kv_cache"] = arguments["kv_cache"].clone()


def refused(arguments: dict[str, Any], results: Any) -> None:
    raise RuntimeError("tiling failed: 561002")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (scaled_query, "query: "),
        (touched_neighbour, "cache rows that belong to no token have changed"),
        (written_elsewhere, "kr_cache: "),
        (another_tensor, "kv_cache is another tensor after the call"),
        (refused, "RuntimeError: tiling failed: 561002"),
    ],
)
def test_what_is_broken_is_found(monkeypatch, spoil, complaint):
    tampering(monkeypatch, spoil)
    failures = operator.run(chosen("npu_mla_prolog_v3 w0 kv0 PA_BSND T8"), CPU, repeats=1).failures
    assert any(text.startswith(complaint) for text in failures), failures


def test_a_functional_operator_that_writes_its_argument(monkeypatch):
    def zeroed_cache(arguments: dict[str, Any], results: Any) -> None:
        arguments["kr_cache"].zero_()

    tampering(monkeypatch, zeroed_cache)
    failures = operator.run(chosen("v3_functional w0 kv0 PA_BSND T8"), CPU, repeats=1).failures
    assert failures == ["the functional operator has written its argument kr_cache"]


def test_a_prologue_that_is_not_fused_fails_with_the_reason(monkeypatch):
    class Gated(unfused.Prologue):
        def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return super().rotate(x, cos, sin) * x

    monkeypatch.setattr(fused, "Prologue", Gated)
    result = fused.run(unfused.FORMS[0], CPU, SCENARIOS[0].dims, repeats=1)
    assert result.failures and result.failures[0].startswith("fused by target key, expected v3: [")


def test_the_keys_operator(monkeypatch):
    planned = list(key_scenarios("A5"))
    assert [operator.run(scenario, CPU_OF_A5, repeats=1).failures for scenario in planned] == [
        []
    ] * len(planned)

    def touches_a_neighbour(arguments: dict[str, Any], results: Any) -> None:
        row = next(row for row in range(128) if row not in arguments["index"])
        arguments["ckv_cache"].flatten(0, 2)[row] += 1

    tampering(monkeypatch, touches_a_neighbour)
    assert operator.run(planned[0], CPU_OF_A5, repeats=1).failures


def test_the_keys_half_is_fused():
    form = next(form for form in unfused.FORMS if form.target == "key")
    assert not fused.run(form, CPU, SCENARIOS[0].dims, repeats=1).failures


def test_the_command_prints_a_table_and_writes_json(capsys, tmp_path):
    file = tmp_path / "selftest.json"
    assert (
        cli.main(["selftest", "--device", "cpu", "--only", "v3 w2 kv1 PA_NZ", "--out", str(file)])
        == 0
    )
    text = capsys.readouterr().out
    assert "npu_mla_prolog_v3 w2 kv1 PA_NZ T8" in text and "2 of 2 checks passed" in text
    data = json.loads(file.read_text())
    assert data["failed"] == 0 and data["versions"]["torch"] == torch.__version__
    outputs = {item["output"]: item for item in data["results"][0]["comparisons"]}
    assert outputs["query"]["dtype"] == "int8" and outputs["kv_cache"]["largest"] == 0


def test_a_failure_is_status_1(monkeypatch, capsys):
    tampering(monkeypatch, scaled_query)
    assert (
        cli.main(["selftest", "--device", "cpu", "--only", "v2 w0 kv0 PA_BSND T8", "--json"]) == 1
    )
    assert json.loads(capsys.readouterr().out)["failed"] == 2  # by itself, and in a graph


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "npu"], "no NPU is available here"),
        (["--device", "cpu", "--only", "nothing"], "no scenario matches"),
    ],
)
def test_bad_input_is_status_2(capsys, arguments, complaint):
    assert cli.main(["selftest", *arguments]) == 2
    assert complaint in capsys.readouterr().err
