"""Equal layers share verdicts; a layer that differs in anything is judged by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from benchmarks.model import Decoder, Sizes, model_arguments
from mla_fusion.commit import verified
from mla_fusion.compile.device_graph import capture
from mla_fusion.plan import planner

LAYERS = 4
SIZES = Sizes(tokens=4)


def fused(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[nn.ModuleList, list[Tensor]], None] = lambda layers, arguments: None,
) -> tuple[mf.Report, list[int]]:
    """The report on a decoder whose layers were changed, and how many layers were proved, asked
    of the contract, and compared.
    """
    counts = [0, 0, 0]
    owners = (
        (planner.Planner, "_prove"),
        (planner.contract, "check_contract"),
        (verified, "compare"),
    )

    def counted(place: int, of: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **rest: Any) -> Any:
            counts[place] += 1
            return of(*args, **rest)

        return called

    for place, (owner, name) in enumerate(owners):
        monkeypatch.setattr(owner, name, counted(place, getattr(owner, name)))
    with torch.device("meta"):
        model = Decoder(SIZES, LAYERS)
    arguments = list(model_arguments(SIZES, LAYERS))
    change(model.layers, arguments)
    gm, _ = capture(model, *arguments, device="cpu")
    return mf.fuse(gm, mf.Config(strict=True)), counts


def test_equal_layers_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    report, counts = fused(monkeypatch)
    assert [fusion.placement for fusion in report.fused] == ["in place"] * LAYERS
    assert counts == [1, 2, 1]  # x of the first layer is an input: its dtype is looked at
    own = [fusion.verified for fusion in report.fused]
    assert own == ["verified", *["equal in structure to layers.0"] * (LAYERS - 1)]


def _epsilon(layers: nn.ModuleList, arguments: list[Tensor]) -> None:
    layers[2].sizes = replace(SIZES, eps=1e-5)


def _blocks(layers: nn.ModuleList, arguments: list[Tensor]) -> None:
    for place in (8, 9):
        arguments[place] = arguments[place].reshape(2, 32, 1, -1)


def _parameters(layers: nn.ModuleList, arguments: list[Tensor]) -> None:
    layers[2].gamma_cq = nn.Parameter(
        torch.empty(1, SIZES.q_lora, dtype=torch.bfloat16, device="meta")
    )


@pytest.mark.parametrize("change", [_epsilon, _blocks, _parameters])
def test_a_layer_that_differs_is_judged_by_itself(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.ModuleList, list[Tensor]], None]
) -> None:
    report, counts = fused(monkeypatch, change)
    assert counts[1:] == [3, 2]
    own = [fusion.verified for fusion in report.fused]
    equal = "equal in structure to layers.0"
    assert own == ["verified", equal, "verified", equal]


def test_a_layer_in_another_dtype_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(layers: nn.ModuleList, arguments: list[Tensor]) -> None:
        layers[2].w_dq = nn.Parameter(layers[2].w_dq.float())

    report, _ = fused(monkeypatch, change)
    assert [fusion.layer for fusion in report.fused] == ["layers.0", "layers.1", "layers.3"]
    assert [(one.code, one.layer) for one in report.rejected] == [("dtype.region", "layers.2")]
