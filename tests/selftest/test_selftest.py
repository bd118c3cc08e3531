"""``mla-fusion selftest`` on the CPU kernels: all passes, and what is broken is found."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fusion import meta
from mla_fusion.tools import cli, selftest
from mla_fusion.tools.selftest import check
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.samples import Call, calls
from tests.exhaustive import one_in

CPU = Device("cpu", "CPU reference kernels", "A3", "latest")
CPU_OF_A5 = Device("cpu", "CPU reference kernels", "A5", "latest")


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", [CPU, CPU_OF_A5], ids=["A3", "A5"])
def test_every_check_passes_on_the_cpu_kernels(device: Device) -> None:
    outcome = selftest.run(device)
    assert not outcome.failed, str(outcome)
    assert {result.through for result in outcome.results} == {"eager", "graph", "fused"}


@pytest.mark.parametrize(
    ("only", "through"),
    [("v3* w[02]*PA_BSND", {"eager", "graph"}), ("rope_cache", {"eager"}), ("prologue", {"fused"})],
)
def test_some_checks_of_each_kind_pass(only: str, through: set[str]) -> None:
    outcome = selftest.run(CPU, only)
    assert not outcome.failed, str(outcome)
    assert {result.through for result in outcome.results} == through


@pytest.mark.parametrize(("cann", "soc"), one_in(4, itertools.product(meta.RELEASES, meta.SOCS)))
def test_calls_are_legal_distinct_and_complete(soc: str, cann: str) -> None:
    planned = calls(soc, cann)
    assert len({call.name for call in planned}) == len(planned)
    for op in {call.op for call in planned if call.kind}:
        found = {call.kind for call in planned if call.op == op}
        assert found == {(op, *pair) for pair in meta.limits(op, soc, cann).quant_modes}
    for call in planned[:: max(len(planned) // 12, 1)]:
        if call.kind:
            meta.check(call.op, soc=soc, cann=cann, values=True, **call.make())


def chosen(text: str) -> Call:
    return next(call for call in calls("A3", "latest") if text in call.name)


def tampering(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Let ``spoil(arguments, results)`` act after each call of the operator."""
    honest = check._operator

    def spoiled(call: Call, through: str) -> Any:
        operator = honest(call, through)

        def run(arguments: dict[str, Any]) -> Any:
            results = operator(arguments)
            return spoil(arguments, results) or results

        return run

    monkeypatch.setattr(check, "_operator", spoiled)


def scaled_query(arguments: dict[str, Any], results: Any) -> Any:
    return (results[0] * 1.05, *results[1:])


def touched_neighbour(arguments: dict[str, Any], results: Any) -> None:
    written = set(arguments["cache_index"].flatten().tolist())
    free = next(slot for slot in range(10_000) if slot not in written)
    cache = arguments["kv_cache"].flatten(0, 2)
    cache[free] = -cache[free]


def written_elsewhere(arguments: dict[str, Any], results: Any) -> None:
    arguments["kr_cache"].copy_(arguments["kr_cache"].roll(1, 1))


def refused(arguments: dict[str, Any], results: Any) -> None:
    raise RuntimeError("tiling failed: 561002")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (scaled_query, "query: "),
        (touched_neighbour, "cache rows that belong to no token have changed"),
        (written_elsewhere, "kr_cache: "),
        (refused, "RuntimeError: tiling failed: 561002"),
    ],
)
def test_what_is_broken_is_found(monkeypatch, spoil, complaint):
    tampering(monkeypatch, spoil)
    failures = check.check_call(chosen("npu_mla_prolog_v3 w0 kv0 PA_BSND"), CPU, "eager").failures
    assert any(text.startswith(complaint) for text in failures), failures


def test_a_functional_operator_that_writes_its_argument(monkeypatch):
    def zeroed_cache(arguments: dict[str, Any], results: Any) -> None:
        arguments["kr_cache"].zero_()

    tampering(monkeypatch, zeroed_cache)
    failures = check.check_call(chosen("v3_functional w0 kv0 PA_BSND"), CPU, "eager").failures
    assert failures == ["the functional operator has written its argument kr_cache"]


def test_a_prologue_that_is_not_fused_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(check.FUSED, "prologue in place", {"enable": False})
    failures = check.check_prologue("prologue in place", CPU).failures
    assert failures[0].startswith("not fused in place: ")


def test_a_fused_prologue_with_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_fusion import reference as kernels

    honest = kernels.npu_mla_prolog_v3_functional

    def wrong(*args: Any, **named: Any) -> Any:
        query, *others = honest(*args, **named)
        return query * 1.02, *others

    monkeypatch.setitem(check.FUSED, "prologue in place", {"verify": "off"})  # it would refuse
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_mla_prolog_v3_functional", wrong, "CPU", allow_override=True)
    try:
        failures = check.check_prologue("prologue in place", CPU).failures
    finally:
        library.impl("npu_mla_prolog_v3_functional", honest, "CPU", allow_override=True)
    assert failures and failures[0].startswith("query: fused error is ")


def test_the_command_prints_and_writes_a_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "selftest.txt"
    words = ["selftest", "--device", "cpu", "--only", "v3 w2 kv1 PA_NZ", "--out", str(file)]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert text == file.read_text()
    assert "ok     npu_mla_prolog_v3 w2 kv1 PA_NZ (eager): query 0, 0.00% off" in text
    assert "1 of 1 checks passed" in text and f"torch {torch.__version__}" in text


def test_a_failure_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tampering(monkeypatch, scaled_query)
    words = ["selftest", "--device", "cpu", "--only", "v2 w0 kv0 PA_BSND"]
    assert cli.main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == 2  # by itself, and in a graph
    assert found["results"][0]["failures"][0].startswith("query: ")
    assert cli.main(words) == 1
    assert "FAILED npu_mla_prolog_v2 w0 kv0 PA_BSND (graph)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "npu"], "no NPU is available here; `mla-fusion selftest --device cpu` runs"),
        (["--device", "cpu", "--only", "nothing"], "no check matches"),
    ],
)
def test_bad_input_is_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert cli.main(["selftest", *arguments]) == 2
    assert complaint in capsys.readouterr().err
