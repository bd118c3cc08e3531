"""Whatever changes a parameter, the next call of a compiled model computes with that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.weights import rounds
from mla_fusion.weights.source import SHARES
from tests.catalogue import base, prologues
from tests.exhaustive import one_in, pairs
from tests.harness import assert_no_worse, clones, eager, exact, flat, fused

Update = Callable[[nn.Module], None]


pytestmark = pytest.mark.usefixtures("fresh")


def weights(model: nn.Module) -> list[nn.Parameter]:
    """Those of which prologues.Neox needs packed copies: its rope columns are halves."""
    return [model.kv_a_proj_with_mqa.weight, model.q_b_proj.weight]  # type: ignore[union-attr,list-item]


def delta(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape).to(weight.dtype) * 0.05


def merged_like_peft(model: nn.Module) -> None:
    for weight in weights(model):
        weight.data = weight.data.add_(delta(weight))


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round has as many steps as weights are copied; of prologues.Neox these are two."""
    monkeypatch.setitem(rounds.STEPS_A_LOOK, "cpu", 1)
    monkeypatch.setitem(SHARES, "cpu", 1 << 30)


def assert_current(model: nn.Module, run: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    given = clones(args)
    with torch.no_grad():
        found = [*flat(run(*given)), *given]
    assert_no_worse(exact(model, args), eager(model, clones(args)), found, slack=1.2)


def follow(model: nn.Module, update: Update, updates: str = "rounds", steps: int = 0) -> None:
    """``steps``: how many calls may use the old weights."""
    args = base.paged_args()
    run = fused(model, args, mf.Config(updates=updates))
    assert_current(model, run, args)
    assert len(mf.reports()[-1].fused) == 1 and mf.reports()[-1].bytes_added > 0
    for _ in range(2):
        update(model)
        with torch.no_grad():
            for _ in range(steps):
                run(*clones(args))
        assert_current(model, run, args)


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize("updates", one_in(1, ["rounds", "every call"]))
def test_parameters_made_under_inference_mode_are_reloaded(updates: str) -> None:
    with torch.inference_mode():
        model = prologues.Neox()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    assert all(weight.is_inference() for weight in weights(model))

    def reload(model: nn.Module) -> None:
        other = prologues.Neox().state_dict()
        with torch.inference_mode():
            model.load_state_dict(other)

    args = base.paged_args()
    run = torch.compile(model, backend=mf.backend(mf.Config(updates=updates)), fullgraph=True)
    for _ in range(3):
        given = clones(args)
        with torch.inference_mode():
            found = [*flat(run(*given)), *given]
            plain = eager(model, clones(args))
        copied = prologues.Neox()
        copied.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        assert_no_worse(exact(copied, args), plain, found, slack=1.2)
        reload(model)
        for _ in range(2 if updates == "rounds" else 0):
            given = clones(args)  # inference tensors would be another graph
            with torch.inference_mode():
                run(*given)


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.parametrize(("updates", "by_data"), pairs(["rounds", "every call"], [False, True]))
def test_views_of_a_flat_buffer_that_is_updated(updates: str, by_data: bool) -> None:
    """As FSDP and ZeRO keep parameters."""
    model = prologues.Neox()
    flat = torch.cat([weight.detach().flatten() for weight in weights(model)])
    pieces = flat.split([weight.numel() for weight in weights(model)])
    for module, piece in zip((model.kv_a_proj_with_mqa, model.q_b_proj), pieces, strict=True):
        if by_data:
            module.weight.data = piece.view_as(module.weight)
        else:
            module.weight = nn.Parameter(piece.view_as(module.weight), requires_grad=False)

    def update(_: nn.Module) -> None:
        flat.data.add_(delta(flat))

    follow(model, update, updates, steps=2 if updates == "rounds" else 0)


def test_an_update_between_two_graphs_reaches_both() -> None:
    """What is merged, used by one graph and unmerged again, is not left in the other."""
    model, args = prologues.Neox(), base.paged_args()
    backend = mf.backend(mf.Config(updates="every call"))
    first = torch.compile(model, backend=backend, fullgraph=True)
    assert_current(model, first, args)
    torch._dynamo.reset()
    second = torch.compile(model, backend=backend, fullgraph=True)
    kept = [weight.detach().clone() for weight in weights(model)]
    merged_like_peft(model)
    assert_current(model, second, args)
    for weight, value in zip(weights(model), kept, strict=True):
        weight.data.copy_(value)
    assert_current(model, first, args)
    assert_current(model, second, args)
