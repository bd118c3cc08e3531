"""Hand-written calls: equal to the model, different (where, by which slip), or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.tools.by_hand import entry
from mla_fusion.tools.cli import main
from tests.by_hand.faults import FAULTS, UNEXPLAINED, Fault, Hand, args, given, model, on
from tests.catalogue import base
from tests.exhaustive import one_in
from tests.samples import sample_call


def audited(*faults: Fault, op: str = "npu_mla_prolog_v3") -> mf.Audit:
    torch.manual_seed(0)
    module, inputs = model(), args()
    return mf.audit(Hand(module, *faults, op=op), module, *inputs)


def named(found: mf.Audit) -> set[tuple[str, str]]:
    """The slips that were found: those with the error that they leave."""
    return {(item.code, item.argument) for item in found.findings if item.error is not None}


@pytest.mark.parametrize("name", one_in(4, FAULTS))
def test_each_slip_of_the_table_is_named(name: str) -> None:
    code, argument, fault = FAULTS[name]
    found = audited(fault)
    assert found.equal is False and not found.ok
    assert named(found) == {(code, argument)}, str(found)
    assert [item.code for item in found.findings] == [code, "values.differ"]
    assert all("faults.py" in item.line for item in found.findings)


@pytest.mark.parametrize("name", one_in(2, UNEXPLAINED))
def test_what_no_slip_explains_is_different(name: str) -> None:
    found = audited(UNEXPLAINED[name])
    assert found.equal is False and not named(found)
    (finding,) = found.findings
    assert finding.code == "values.differ" and "output 0 differs by" in finding.message


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
    assert found.equal is False
    assert "other rows in kv_cache (argument 3) and kr_cache (argument 4)" in str(found)


# -- what the contract refuses


@pytest.mark.parametrize("compared", [True, False])
def test_a_refusal_ends_it(compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reference and without one it is the same finding; nothing is tried after it."""
    monkeypatch.setattr(entry, "slips", lambda *_: pytest.fail("a slip was tried"))
    module, inputs = model(), args()
    hand = Hand(module, on("weight_dq", lambda weight: weight.T), FAULTS["tables_swapped"][2])
    found = mf.audit(hand, module if compared else None, *inputs)
    assert not found.ok and found.equal is None and found.errors is None
    assert [item.code for item in found.findings] == ["contract:shape.weight_dq"]
    assert "faults.py" in found.findings[0].line and "nothing is compared" in str(found)


def test_without_a_reference() -> None:
    module, inputs = model(), args()
    found = mf.audit(Hand(module), None, *inputs)
    assert found.ok and found.equal is None and "nothing is compared" in str(found)
    late = Hand(module, on("cache_index", lambda slots: slots + 1000))
    found = mf.audit(late, None, *inputs)
    assert [item.code for item in found.findings] == ["contract:values.cache_index.range"]


def test_what_cannot_be_audited() -> None:
    with pytest.raises(ValueError, match="calls none of"):
        mf.audit(model(), None, *args())
    with pytest.raises(TypeError, match="expected a module"):
        mf.audit("model.py", None)  # type: ignore[arg-type]
    x, *others = args()
    with pytest.raises(ValueError, match="no finite number but 0"):
        mf.audit(Hand(model()), model(), x * float("nan"), *others)


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


@pytest.mark.exhaustive
def test_the_step_at_which_two_layers_part() -> None:
    torch.manual_seed(0)
    x, cos, sin, kv, kr, slots = args()
    models = [model(), model()]
    inputs = x, cos, sin, kv, kr, kv.clone(), kr.clone(), slots
    hands = Hand(models[0]), Hand(models[1], FAULTS["key_first"][2])
    found = mf.audit(Layers(*hands), Layers(*models), *inputs)
    slip, parted = found.findings
    assert (slip.code, slip.call, parted.call) == ("columns.key_first", 1, 1), str(found)
    assert "of layers.1" in parted.line and "kv_cache (argument 5)" in parted.message


# -- where caches lie


class CachesIn(nn.Module):
    """The caches come in a list."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: list[Tensor], slots: Tensor
    ) -> Tensor:
        return self.inner(x, cos, sin, *caches, slots)


class Holds(nn.Module):
    """The caches are buffers, or plain attributes, of the module; ``anew``: others after a run."""

    def __init__(
        self, inner: nn.Module, caches: tuple[Tensor, ...], buffers: bool, anew: bool = False
    ) -> None:
        super().__init__()
        self.inner, self.anew = inner, anew
        for name, cache in zip(("kv", "kr"), caches, strict=True):
            if buffers:
                self.register_buffer(name, cache.clone())
            else:
                setattr(self, name, cache.clone())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        if self.anew:
            self.kv, self.kr = self.kv.clone(), self.kr.clone()
        return self.inner(x, cos, sin, self.kv, self.kr, slots)


@pytest.mark.parametrize("fault", [None, FAULTS["tables_swapped"]])
def test_caches_in_a_list(fault: Any) -> None:
    torch.manual_seed(0)
    module, (x, cos, sin, kv, kr, slots) = model(), args()
    before = kv.clone(), kr.clone()
    hand = Hand(module, *([fault[2]] if fault else []))
    found = mf.audit(CachesIn(hand), CachesIn(module), x, cos, sin, [kv, kr], slots)
    assert {"argument 3.0", "argument 3.1"} <= set(found.errors or {})
    assert named(found) == ({fault[:2]} if fault else set()), str(found)
    assert torch.equal(kv, before[0]) and torch.equal(kr, before[1])


@pytest.mark.parametrize(("buffers", "anew"), [(True, False), (False, False), (False, True)])
def test_caches_of_a_module(buffers: bool, anew: bool) -> None:
    torch.manual_seed(0)
    module, (x, cos, sin, kv, kr, slots) = model(), args()
    code, argument, fault = FAULTS["tables_swapped"]
    hand = Holds(Hand(module, fault), (kv, kr), buffers, anew)
    reference = Holds(module, (kv, kr), buffers, anew)
    found = mf.audit(hand, reference, x, cos, sin, slots)
    kind = "buffer" if buffers else "attribute"
    assert f"{kind} kr" in (found.errors or {}) and named(found) == {(code, argument)}, str(found)
    assert torch.equal(reference.kv, kv) and torch.equal(hand.kv, kv), "as before"


def test_a_cache_that_nobody_holds_is_not_decided() -> None:
    """Attention reads the copy that the call writes: the model's cache is not compared."""
    torch.manual_seed(0)
    module, (x, cos, sin, kv, kr, slots) = model(), args()

    class Copies(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
            return self.inner(x, cos, sin, kv.clone(), kr.clone(), slots)

    found = mf.audit(Copies(Hand(module)), Copies(module), x, cos, sin, slots)
    assert found.equal is None and found.ok and "not decided" in str(found)
    assert [item.code for item in found.findings] == ["cache.elsewhere"] * 2


def test_results_of_other_number_and_shape() -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    hand = Hand(module)
    found = mf.audit(lambda *given: (hand(*given), inputs[0]), module, *inputs)
    assert found.equal is None and [item.code for item in found.findings] == ["results.differ"]
    flat = mf.audit(lambda *given: hand(*given).flatten(), module, *inputs)
    cut = mf.audit(hand, lambda *given: module(*given)[:, 1:], *inputs)
    assert flat.equal and json.loads(cut.to_json(), parse_constant=pytest.fail)["equal"] is False


class BehindANorm(nn.Module):
    """A decoder layer norms x: a smaller x changes nothing."""

    def __init__(self, inner: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, norm

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.inner(self.norm(x), *rest)


def test_an_epsilon_that_results_do_not_show_is_held_against_the_modules() -> None:
    torch.manual_seed(0)
    module, inputs, norm = model(), args(), base.HfNorm(base.HE)
    hand = BehindANorm(Hand(module, FAULTS["eps_cq_default"][2]), norm)
    found = mf.audit(hand, BehindANorm(module, norm), *inputs)
    found_in = {(item.code, item.argument) for item in found.findings}
    assert ("epsilon.differs", "rmsnorm_epsilon_cq") in found_in


# -- other operators


class Calls(nn.Module):
    """An operator on tensors by name, its other arguments fixed."""

    def __init__(self, operator: Any, call: dict[str, Any], fault: Fault = dict) -> None:
        super().__init__()
        self.operator, self.fault = operator, fault
        self.names = [name for name, value in call.items() if isinstance(value, Tensor)]
        self.options = {name: value for name, value in call.items() if name not in self.names}

    def forward(self, *tensors: Tensor) -> Any:
        arguments = dict(zip(self.names, tensors, strict=True)) | self.options
        return tuple(self.operator(**self.fault(arguments)))


def of_operator(operator: Any, call: dict[str, Any], fault: Fault) -> mf.Audit:
    right = Calls(operator, call)
    return mf.audit(Calls(operator, call, fault), right, *(call[name] for name in right.names))


def swapped(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "cos": arguments["sin"], "sin": arguments["cos"]}


@pytest.mark.parametrize(
    ("fault", "found"), [(given(), set()), (swapped, {("tables.swapped", "cos, sin")})]
)
def test_key_operator(fault: Fault, found: set[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    call = {
        "kv": torch.randn(8, 1, 1, 576).bfloat16(),
        "gamma": (1 + torch.rand(512)).bfloat16(),
        "cos": torch.randn(8, 1, 1, 64).bfloat16(),
        "sin": torch.randn(8, 1, 1, 64).bfloat16(),
        "index": torch.randperm(24)[:8] + 20,
        "k_cache": torch.randn(8, 16, 1, 64).bfloat16(),
        "ckv_cache": torch.randn(8, 16, 1, 512).bfloat16(),
        "epsilon": 1e-6,
        "cache_mode": "PA_BNSD",
    }
    audit = of_operator(torch.ops.npu.npu_kv_rmsnorm_rope_cache, call, fault)
    assert named(audit) == found and audit.equal is (not found), str(audit)


@pytest.mark.parametrize(("cache", "equal"), [(1, True), (3, None)])
def test_int8_caches(cache: int, equal: bool | None) -> None:
    """One step for all numbers; one for each tile of a row of bytes is not compared."""
    dims = dict(He=1024, Hcq=1536, N=2, D=128, Dr=64, Hckv=512, BlockNum=4, BlockSize=16, Nkv=1)
    call = sample_call(weight_quant_mode=2, kv_cache_quant_mode=cache, dims=dims, lead=(8,))
    operator = torch.ops.npu.npu_mla_prolog_v3
    assert of_operator(operator, call, given()).equal is equal
    assert of_operator(operator, call, given(rope_cos=call["rope_sin"])).equal is False


# -- forms, and what is left behind


def test_nothing_of_the_callers_changes() -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    before = [value.clone() for value in inputs]
    mf.audit(Hand(module, FAULTS["tables_swapped"][2]), module, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


# -- the command

SOURCE = """
import torch
from tests.by_hand.faults import FAULTS, Hand, args, model, on

torch.manual_seed(0)
MODEL, INPUTS = model(), args()


def right():
    return Hand(MODEL), INPUTS


def wrong():
    return Hand(MODEL, FAULTS["tables_swapped"][2]), INPUTS


def refused():
    return Hand(MODEL, on("weight_dq", lambda weight: weight.T)), INPUTS


def unfused():
    return MODEL, INPUTS
"""


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    reference = ["--reference", f"{file}:unfused"]
    assert main(["audit", f"{file}:right", *reference]) == 0
    capsys.readouterr()
    assert main(["audit", f"{file}:wrong", *reference, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and found["findings"][0]["code"] == "tables.swapped"
    assert main(["audit", f"{file}:refused", *reference]) == 1
    assert "[contract:shape.weight_dq]" in capsys.readouterr().out
    assert main(["audit", f"{file}:unfused"]) == 2
