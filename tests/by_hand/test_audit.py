"""Seeded mistakes in hand-written calls: each is detected, and named with the repair that mends
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.tools.by_hand.of_dump import audit_dump
from mla_fusion.tools.cli import main
from tests.by_hand.faults import FAULTS, Fault, Hand, args, combinations, given, model, on
from tests.catalogue import base, int8
from tests.exhaustive import one_in

npu = torch.ops.npu


def audited(*faults: Fault, op: str = "npu_mla_prolog_v3") -> mf.Audit:
    torch.manual_seed(0)
    module, inputs = model(), args()
    return mf.audit(Hand(module, *faults, op=op), module, *inputs)


def named(found: mf.Audit) -> set[tuple[str, str]]:
    """The repairs that were found: those with the error that they leave."""
    return {(item.code, item.argument) for item in found.findings if item.error is not None}


@pytest.mark.parametrize("name", one_in(8, FAULTS))
def test_one_fault(name: str) -> None:
    code, argument, fault = FAULTS[name]
    found = audited(fault)
    assert found.equal is False and not found.ok
    assert named(found) == {(code, argument)}, str(found)
    assert found.repaired is not None and found.tolerance is not None
    assert all(error <= found.tolerance[name] for name, error in found.repaired.items())
    assert all("faults.py" in item.line for item in found.findings)


@pytest.mark.parametrize(
    "names", [*combinations(3, seed=7), ("slots_rolled_back", "key_first", "eps_cq_default")]
)
def test_several_faults(names: tuple[str, ...]) -> None:
    found = audited(*(FAULTS[name][2] for name in names))
    assert named(found) == {FAULTS[name][:2] for name in names}, str(found)


def test_a_right_call() -> None:
    found = audited()
    assert found.equal is True and found.ok and not found.findings
    assert set(found.errors or {}) == {"output 0", "argument 3", "argument 4"}, (
        "the result and both caches"
    )
    assert "equal to the reference" in str(found)


def test_caches_that_are_not_written() -> None:
    """The functional operator returns its caches; whoever drops them reads the old rows."""
    found = audited(op="npu_mla_prolog_v3_functional")
    assert named(found) == {("cache.not_written", "kv_cache, kr_cache")} or {
        code for code, _ in named(found)
    } == {"cache.not_written"}, str(found)


def test_what_no_repair_explains() -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    noise = torch.randn(inputs[0].shape).bfloat16()
    found = mf.audit(Hand(module, on("token_x", lambda x: x + noise)), module, *inputs, tries=150)
    assert found.equal is False and not named(found)
    assert "no repair that is known explains it" in str(found)


# -- one layer of several


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> Tensor:
        *caches, slots = rest
        total = x.new_zeros(())
        for layer, kv, kr in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            total = total + layer(x, cos, sin, kv, kr, slots).sum() * 1e-3
        return total


def test_one_layer_of_two() -> None:
    torch.manual_seed(0)
    x, cos, sin, kv, kr, slots = args()
    models = [model(), model()]
    inputs = x, cos, sin, kv, kr, kv.clone(), kr.clone(), slots
    hands = Hand(models[0]), Hand(models[1], FAULTS["key_first"][2])
    found = mf.audit(Layers(*hands), Layers(*models), *inputs)
    (repair,) = [item for item in found.findings if item.error is not None]
    assert (repair.code, repair.call) == ("columns.key_first", 1), str(found)


# -- quantised


class HandInt8(nn.Module):
    """W8A8 by hand; the scale of c_q's weight is what a fault changes."""

    def __init__(self, model: int8.Full, fault: Fault) -> None:
        super().__init__()
        self.model, self.fault = model, fault

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        m = self.model
        quantised, scale = npu.npu_dynamic_quant(x)
        arguments = {
            "token_x": quantised,
            "weight_dq": m.q_a_proj.weight,
            "weight_uq_qr": m.q_b_proj.weight,
            "weight_uk": m.w_uk().contiguous(),
            "weight_dkv_kr": m.kv_a_proj_with_mqa.weight,
            "rmsnorm_gamma_cq": m.q_a_layernorm.weight,
            "rmsnorm_gamma_ckv": m.kv_a_layernorm.weight,
            "rope_sin": sin,
            "rope_cos": cos,
            "kv_cache": kv_cache,
            "kr_cache": kr_cache,
            "cache_index": slots,
            "dequant_scale_x": scale.reshape(-1, 1),
            "dequant_scale_w_dq": m.q_a_proj.scale.reshape(1, -1),
            "dequant_scale_w_uq_qr": m.q_b_proj.scale.reshape(1, -1),
            "dequant_scale_w_dkv_kr": m.kv_a_proj_with_mqa.scale.reshape(1, -1),
            "rmsnorm_epsilon_cq": 1e-6,
            "rmsnorm_epsilon_ckv": 1e-6,
            "cache_mode": "PA_BSND",
            "weight_quant_mode": 2,
        }
        query, query_rope, *_ = npu.npu_mla_prolog_v3(**self.fault(arguments))
        return base.attend(
            query, query_rope, kv_cache.view(-1, base.HCKV), kr_cache.view(-1, base.DR)
        ), torch.zeros(1)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (given(), None),
        (on("dequant_scale_w_uq_qr", torch.reciprocal), "scale.inverted"),
        (on("dequant_scale_w_dkv_kr", torch.reciprocal), "scale.inverted"),
        (FAULTS["tables_swapped"][2], "tables.swapped"),
        (FAULTS["slot_late"][2], "slots.off"),
    ],
)
def test_int8(fault: Fault, code: str | None) -> None:
    torch.manual_seed(0)
    module = int8.Full()
    found = mf.audit(HandInt8(module, fault), module, *args())
    assert {item for item, _ in named(found)} == ({code} if code else set()), str(found)
    assert found.equal is (code is None)


# -- without a reference

FIRST = torch.tensor([0])


def suspicions(*faults: Fault) -> set[str]:
    found = mf.audit(Hand(model(), *faults), None, *args())
    assert found.equal is None
    return {item.code for item in found.findings}


def test_what_a_call_shows_by_itself() -> None:
    assert suspicions() == set()
    assert suspicions(given(rmsnorm_epsilon_cq=1e-5)) == {"epsilon.default"}
    assert "tables.interleaved" in suspicions(FAULTS["tables_interleaved"][2])
    assert suspicions(on("rmsnorm_gamma_cq", torch.ones_like)) == {"gamma.ones"}
    ones, zeros = (
        (lambda table: table.index_fill(0, FIRST, 1.0)),
        (lambda table: table.index_fill(0, FIRST, 0.0)),
    )
    at_zero = on("rope_cos", ones), on("rope_sin", zeros)
    assert suspicions(*at_zero) == set()
    assert suspicions(*at_zero, FAULTS["tables_swapped"][2]) == {"tables.swapped"}
    assert suspicions(on("cache_index", lambda v: v + 1000)) == {
        "contract:values.cache_index.range"
    }


class PaddedTooLate(Hand):
    """Heads are added to a weight that is in FRACTAL_NZ already."""

    def __init__(self, model: base.Prologue, late: bool) -> None:
        super().__init__(model, self.padded)
        self.late = late

    def padded(self, arguments: dict[str, Any]) -> dict[str, Any]:
        def more(weight: Tensor) -> Tensor:
            return torch.nn.functional.pad(weight, (0, 4 * (base.D + base.DR)))

        weight = arguments["weight_uq_qr"]
        weight = (
            more(npu.npu_format_cast(weight, 29))
            if self.late
            else npu.npu_format_cast(more(weight), 29)
        )
        w_uk = torch.nn.functional.pad(arguments["weight_uk"], (0, 0, 0, 0, 0, 4))
        return {**arguments, "weight_uq_qr": weight, "weight_uk": w_uk}


@pytest.mark.parametrize("late", [False, True])
def test_padding_after_the_format_cast(late: bool) -> None:
    found = mf.audit(PaddedTooLate(model(), late), None, *args())
    assert [item.code for item in found.findings] == ["nz.reworked"] * late


# -- forms


def test_an_exported_program_knows_the_lines() -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    exported = torch.export.export(
        Hand(module, FAULTS["key_first"][2], op="npu_mla_prolog_v3"), inputs
    )
    found = mf.audit(exported, module, *inputs)
    assert ("columns.key_first", "weight_dkv_kr") in named(found), str(found)
    assert "faults.py" in found.findings[0].line


def test_a_function_without_calls() -> None:
    with pytest.raises(ValueError, match="calls none of"):
        mf.audit(model(), None, *args())
    with pytest.raises(TypeError, match="expected a module"):
        mf.audit("model.py", None)  # type: ignore[arg-type]


def test_nothing_of_the_callers_changes() -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    before = [value.clone() for value in inputs]
    mf.audit(Hand(module, FAULTS["tables_swapped"][2]), module, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


FIXTURES = Path(__file__).parents[1]


def fixture(name: str) -> Path:
    (found,) = FIXTURES.glob(f"*/fixtures/{name}")
    return found


@pytest.mark.parametrize(
    "name", ["fused.pbtxt", "fused_py.txt", "fx_after.txt", "ge_onnx_fused.pbtxt"]
)
def test_dumps_of_right_calls(name: str) -> None:
    found = audit_dump(fixture(name))
    assert found.operators and found.ok, str(found)


def test_a_dump_of_a_wrong_call(tmp_path: Path) -> None:
    text = fixture("fx_after.txt").read_text()
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(text.replace("weight_quant_mode = 0", "").replace("PA_BSND", "PA_XX"))
    found = audit_dump(wrong)
    assert not found.ok and found.findings[0].code.startswith("contract:")


# -- the command, text, JSON and page

SOURCE = """
import torch
from tests.by_hand.faults import FAULTS, Hand, args, model

torch.manual_seed(0)
MODEL, INPUTS = model(), args()


def right():
    return Hand(MODEL), INPUTS


def wrong():
    return Hand(MODEL, FAULTS["tables_swapped"][2]), INPUTS


def unfused():
    return MODEL, INPUTS
"""


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    assert main(["audit", f"{file}:right", "--reference", f"{file}:unfused"]) == 0
    capsys.readouterr()
    page = tmp_path / "audit.html"
    assert (
        main(
            [
                "audit",
                f"{file}:wrong",
                "--reference",
                f"{file}:unfused",
                "--json",
                "--html",
                str(page),
            ]
        )
        == 1
    )
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and found["findings"][0]["code"] == "tables.swapped"
    assert "rope_cos and rope_sin are exchanged" in page.read_text()
    assert main(["audit", str(fixture("fused.pbtxt"))]) == 0
    assert main(["audit", str(fixture("fused.pbtxt")), "--reference", f"{file}:unfused"]) == 2
    assert main(["audit", f"{file}:unfused"]) == 2
