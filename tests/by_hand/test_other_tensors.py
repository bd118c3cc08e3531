"""Another tensor was meant: the audit names the weight or the cache that the model has in that
place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.tools.by_hand.outcome import Finding
from tests.by_hand.faults import FAULTS, Fault, Hand, args, given, model
from tests.by_hand.test_audit import Layers, named
from tests.catalogue import base


def only(found: mf.Audit) -> Finding:
    (repair,) = [item for item in found.findings if item.error is not None]
    assert all(error <= found.tolerance[name] for name, error in found.repaired.items()), str(found)
    return repair


def of_values(module: nn.Module) -> Fault:
    """W_uk taken from the rows of W_uv."""
    rows = module.kv_b_proj.weight.unflatten(0, (-1, 2 * base.D))
    return given(weight_uk=rows[:, base.D :].contiguous())


def test_rows_of_the_values_and_tables() -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    found = mf.audit(Hand(module, of_values(module), FAULTS["tables_swapped"][2]), module, *inputs)
    assert named(found) == {
        ("weight.other", "weight_uk"),
        ("tables.swapped", "rope_cos, rope_sin"),
    }, str(found)
    (said,) = [item.message for item in found.findings if item.code == "weight.other"]
    assert said.endswith(f"the first {base.D} rows of each head of model.kv_b_proj.weight")


@pytest.mark.parametrize(
    ("argument", "source"), [("weight_dq", "q_a_proj"), ("weight_uq_qr", "q_b_proj")]
)
def test_the_weight_of_another_layer(argument: str, source: str) -> None:
    torch.manual_seed(0)
    module, other, inputs = model(), model(), args()
    wrong = getattr(other, source).weight.T.contiguous()
    repair = only(mf.audit(Hand(module, given(**{argument: wrong})), module, *inputs))
    assert (repair.code, repair.argument) == ("weight.other", argument)
    assert f"{source}.weight" in repair.message


def two_layers() -> tuple[Layers, list[base.Prologue], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    x, cos, sin, kv, kr, slots = args()
    models = [model(), model()]
    return Layers(*models), models, (x, cos, sin, kv, kr, kv.clone(), kr.clone(), slots)


class Writes(nn.Module):
    """The second layer's call is given the first one's caches; attention reads the right ones."""

    def __init__(self, models: list[base.Prologue]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> Any:
        wrong = given(kv_cache=rest[0], kr_cache=rest[1])
        return Layers(Hand(self.models[0]), Hand(self.models[1], wrong))(x, cos, sin, *rest)


def test_the_caches_of_another_layer() -> None:
    reference, models, inputs = two_layers()
    found = mf.audit(Writes(models), reference, *inputs)
    assert named(found) == {("cache.other", "kv_cache"), ("cache.other", "kr_cache")}, str(found)
    assert {item.call for item in found.findings if item.error is not None} == {1}


def test_a_copied_cache() -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()

    def copied(arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments | {"kr_cache": arguments["kr_cache"].clone()}

    found = mf.audit(Hand(module, copied), module, *inputs)
    repair = only(found)
    assert (repair.code, repair.argument) == ("cache.other", "kr_cache")
    assert repair.message == "kr_cache is memory of its own (a copy?); the model writes argument 4"
    assert [item.code for item in found.findings] == ["cache.other"]
