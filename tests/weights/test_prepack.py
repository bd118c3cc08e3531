"""``mf.prepack``: parameters are views of packed weights before compilation, and stay so."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.weights import cache
from mla_fusion.weights.prepack import _MODULES, is_laid_out
from tests.catalogue import base, prologues
from tests.harness import assert_as_exact, clones, flat, fused
from tests.weights.own import OwnAbsorb, assert_values, entries_of, layers, storage_bytes, values

VIEWS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")


pytestmark = pytest.mark.usefixtures("fresh")


class OneLayer:
    """A model that is prepacked and compiled, and where its weights lie."""

    def __init__(self, config: mf.Config | None = None, model: nn.Module | None = None) -> None:
        self.model = OwnAbsorb() if model is None else model
        self.args = base.paged_args()
        self.done = mf.prepack(self.model, *self.args, config=config)
        self.places = self.pointers()
        self.run = torch.no_grad()(fused(self.model, self.args, config))

    def weight(self, name: str) -> nn.Parameter:
        weight = getattr(self.model, name).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def pointers(self) -> list[int]:
        return [self.weight(name).data_ptr() for name in VIEWS]

    def assert_right(self) -> None:
        given = clones(self.args)
        found = flat(self.run(*given))
        assert mf.reports()[-1].fused
        assert_as_exact(self.model, self.args, [*found, *given], slack=1.2)


# -- the whole of it


def test_no_memory_is_added_and_values_stay() -> None:
    model, args = layers()
    wanted, before, strides = values(model), storage_bytes(model.parameters()), {}
    kept = len(mf.reports())
    done = mf.prepack(model, *args)
    assert storage_bytes(model.parameters()) == before == done.bytes_before == done.bytes_after
    assert done.laid_out == 3 * 3 and done.bytes_copied == 0 and not done.is_plan
    assert done.peak_over_end == max(p.nbytes for p in model.layers[0].parameters())  # type: ignore[union-attr,operator]
    assert_values(model, wanted)
    strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
    assert sum(not parameter.is_contiguous() for parameter in model.parameters()) == 3 * 3
    assert len(mf.reports()) == kept  # no graph that runs was compiled
    results = torch.no_grad()(torch.compile(model, backend=mf.backend(), fullgraph=True))
    given = clones(args)
    found = results(*given)
    assert mf.reports()[-1].bytes_added == 0 and len(mf.reports()[-1].fused) == 3
    assert_as_exact(model, args, [found, *given], slack=1.2)
    assert storage_bytes(model.parameters()) == before
    assert strides == {name: parameter.stride() for name, parameter in model.named_parameters()}


# -- what it says


def test_rows_say_what_became_of_each_weight() -> None:
    model, args = prologues.FusedQkvA(), base.paged_args()
    done = mf.prepack(model, *args)
    kinds = {row.weight: (row.name, row.kind) for row in done.rows}
    merged = ("fused_qkv_a_proj.weight", "copy")
    assert kinds == {
        "weight_dq": merged,
        "weight_dkv_kr": merged,
        "weight_uq_qr": ("q_b_proj.weight", "view"),
        "weight_uk": ("kv_b_proj.weight", "copy"),
    }
    assert all(row.reason for row in done.rows if row.kind == "copy")
    assert done.bytes_copied == sum(row.bytes for row in done.rows if row.kind == "copy")
    assert max(map(len, str(done).splitlines())) <= 80
    read = json.loads(done.to_json())
    assert read["laid_out"] == 1 and len(read["rows"]) == 4


def test_a_model_on_the_meta_device_is_planned() -> None:
    model, args = layers(2)
    plan = mf.prepack(copy.deepcopy(model).to("meta"), *args)
    done = mf.prepack(model, *args)
    assert plan.is_plan and "would be laid out" in str(plan)
    assert plan.rows == done.rows and plan.laid_out == done.laid_out == 6
    assert (plan.bytes_before, plan.bytes_after) == (done.bytes_before, done.bytes_after)


def test_memory_that_others_hold_is_left() -> None:
    model, args = OwnAbsorb(), base.paged_args()
    flat = torch.zeros(2 * model.q_b_proj.weight.numel(), dtype=torch.bfloat16)
    model.q_b_proj.weight.data = flat[: model.q_b_proj.weight.numel()].view_as(
        model.q_b_proj.weight
    )
    model.kv_a_proj_with_mqa.weight.grad = torch.zeros_like(model.kv_a_proj_with_mqa.weight)
    model.alias = nn.Linear(1, 1)
    model.alias.weight = model.q_a_proj.weight
    strides = [parameter.stride() for parameter in model.parameters()]
    reasons = {
        row.weight: row.reason for row in mf.prepack(model, *args).rows if row.kind == "left"
    }
    assert "tied to alias.weight" in reasons["weight_dq"]
    assert "flat buffer" in reasons["weight_uq_qr"] and "gradient" in reasons["weight_dkv_kr"]
    assert [parameter.stride() for parameter in model.parameters()] == strides


def test_a_state_dict_in_a_variable_keeps_weights_where_they_are() -> None:
    model, args = OwnAbsorb(), base.paged_args()
    held = model.state_dict()
    assert mf.prepack(torch.compile(model), *args).laid_out == 0
    assert all(
        held[name].data_ptr() == parameter.data_ptr()
        for name, parameter in model.named_parameters()
    )


class NoPrologue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: mf.prepack(NoPrologue(), torch.randn(2, 4)),
            ValueError,
            "no MLA prologue .*The parts of one",
        ),
        (
            lambda: mf.prepack(torch.relu, torch.randn(2)),
            TypeError,
            "torch.nn.Module, got a builtin",
        ),  # type: ignore
        (lambda: mf.refresh([torch.ones(2)]), TypeError, "takes the module .* got a list"),  # type: ignore[arg-type]
        (
            lambda: mf.prepack(NoPrologue(), torch.randn(2, 4), config="x"),
            TypeError,
            "config must be",
        ),  # type: ignore
    ],
)
def test_bad_input_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="(?s)" + text):
        call()


# -- updates


def copies_of(model: nn.Module) -> list[cache.Entry]:
    entries = (entry for entry in entries_of(model) if not entry.is_view)
    return sorted(entries, key=lambda entry: entry.bytes)


def memory_of(entry: cache.Entry) -> Tensor:
    assert entry.packed is not None
    return entry.packed


def test_refresh_packs_copies_anew_in_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    one = OneLayer(mf.Config(updates="counted"), prologues.Neox())
    one.assert_right()
    entries = copies_of(one.model)
    old = [(packed, packed.data_ptr(), packed.clone()) for packed in map(memory_of, entries)]
    made_of = [one.weight(name) for name in ("kv_a_proj_with_mqa", "q_b_proj")]
    assert [entry.bytes for entry in entries] == [weight.nbytes for weight in made_of]
    for name in VIEWS:
        one.weight(name).data.mul_(2.0)  # torch does not count it
    one.run(*clones(one.args))
    assert all(torch.equal(packed, held) for packed, _, held in old)
    assert mf.refresh(one.model) == 2
    for entry, (packed, place, held) in zip(entries, old, strict=True):
        assert entry.packed is packed and packed.data_ptr() == place
        assert torch.equal(packed, held * 2)
    with caplog.at_level(logging.WARNING, "mla_fusion"):
        one.assert_right()
    assert not caplog.records and copies_of(one.model) == entries


def test_a_parameter_of_another_form_is_not_put_back(caplog: pytest.LogCaptureFixture) -> None:
    one = OneLayer()
    one.model.double()
    with caplog.at_level(logging.WARNING, "mla_fusion"):
        assert mf.refresh(one.model) == 0
    assert "call mla_fusion.prepack again" in caplog.text and one.model not in _MODULES
    assert all(parameter.dtype == torch.float64 for parameter in one.model.parameters())


# -- its end


def test_release_undoes_it() -> None:
    one = OneLayer()
    one.run = torch.no_grad()(torch.compile(one.model, backend=mf.backend(), fullgraph=True))
    wanted = values(one.model)
    one.assert_right()
    assert mf.release(one.model) == 4 and mf.release(one.model) == 0
    assert all(parameter.is_contiguous() for parameter in one.model.parameters())
    assert_values(one.model, wanted)
    assert not any(is_laid_out(getattr(one.model, name), "weight") for name in VIEWS)
    assert not any(module._load_state_dict_post_hooks for module in one.model.modules())
    one.assert_right()
    assert mf.prepack(one.model, *one.args).laid_out == 3


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    one = OneLayer()
    other = copy.deepcopy(one.model)
    assert not any(is_laid_out(getattr(other, name), "weight") for name in VIEWS)
    assert_values(other, values(one.model))
    assert not {p.data_ptr() for p in other.parameters()} & {
        p.data_ptr() for p in one.model.parameters()
    }
    assert mf.refresh(other) == 0
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    one.assert_right()
    again = OneLayer(model=other)  # lies right already: it is known from here on
    assert again.done.laid_out == 0 and all(
        is_laid_out(getattr(other, name), "weight") for name in VIEWS
    )
    again.assert_right()
