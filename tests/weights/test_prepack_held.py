"""What :func:`mf.prepack` watches beside the parameters that it lays out: buffers, parameters that
do not lie as they came, norm weights in float32; and what is said where a captured graph is old.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.weights.cache import WeightError
from tests.catalogue import base, prologues
from tests.catalogue.int8_plain_models import HalfRope, PlainLinear
from tests.weights.served import Served, other

pytestmark = pytest.mark.usefixtures("fresh")


class OfBuffers(PlainLinear):
    """Its int8 weight and its scales are buffers."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        for name, held in list(self._parameters.items()):
            assert held is not None
            delattr(self, name)
            self.register_buffer(name, held.data)


class Quantised(HalfRope):
    linear = OfBuffers


class Float32Norm(base.HfNorm):
    """DeepSeek-V3.2's: the weight in float32 holds bfloat16 numbers."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)
        self.weight = nn.Parameter(self.weight.data.float())

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)


class WithFloat32Norm(prologues.Neox):
    norm = Float32Norm


def fresh_state(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return type(model)().state_dict()


def test_buffers_are_laid_out_anew_when_a_state_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``assign=True`` buffers are other memory, with and without a fusion."""
    served = Served(monkeypatch, model=Quantised())
    state = fresh_state(served.model)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    served.model.load_state_dict(state)
    served.assert_replay_right()
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == places
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state.items())


def transposed(weight: nn.Parameter) -> None:
    weight.data = weight.data.t().contiguous().t()


def part_of_other_memory(weight: nn.Parameter) -> None:
    memory = torch.zeros(2 * weight.numel(), dtype=weight.dtype)
    memory[: weight.numel()] = weight.data.flatten()
    weight.data = memory[: weight.numel()].view_as(weight)


@pytest.mark.parametrize("lies", [transposed, part_of_other_memory])
def test_a_copied_parameter_comes_back_however_it_lies(
    lies: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prologues.Neox()
    assert callable(lies)
    lies(model.q_b_proj.weight)
    served = Served(monkeypatch, model=model)
    model.q_b_proj.load_state_dict({"weight": other(model.q_b_proj.weight)}, assign=True)
    served.assert_replay_right()


def test_memory_that_is_in_use_elsewhere_is_left_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(monkeypatch)
    kept = served.weight("q_b_proj").data
    before = kept.clone()
    state = {"weight": other(kept)}
    with caplog.at_level(logging.WARNING, "mla_fusion"):
        served.model.q_b_proj.load_state_dict(state, assign=True)
    assert "captured before read the old numbers" in caplog.text
    assert torch.equal(kept, before)
    served.assert_right()


def test_norm_weights_in_float32_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, model=WithFloat32Norm())
    served.model.load_state_dict(fresh_state(served.model))
    served.assert_replay_right()


def test_a_weight_that_cannot_be_packed_keeps_no_other_old(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, prepacked=False, model=WithFloat32Norm())
    for name in ("q_b_proj", "q_a_layernorm"):
        weight = served.weight(name)
        weight.data.copy_(torch.randn(weight.shape) * 0.1)
    with pytest.raises(WeightError):
        mf.refresh(served.model)
    with pytest.raises(WeightError), torch.no_grad():
        served.run(*served.args)
    weight = served.weight("q_a_layernorm")
    weight.data.copy_(weight.data.to(torch.bfloat16))
    served.assert_right()


class Repeated(Quantised):
    """One scale, expanded to all columns."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.q_b_proj
        layer.scale = layer.scale[:1].expand_as(layer.scale)


def test_repeated_numbers_can_be_assigned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, model=Repeated())
    served.model.load_state_dict(fresh_state(served.model), assign=True)
    served.assert_right()
