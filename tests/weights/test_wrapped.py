"""Parameters that wrap other tensors (DTensor, quantised weights): torch counts a change of the
wrapper for the wrapper alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import mla_fusion as mf
from mla_fusion.weights.cache import Packed
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import clones, distance, eager, flat

pytestmark = pytest.mark.usefixtures("fresh")


class Wrapper(torch.Tensor):
    """Holds one tensor, and computes with it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[return-value]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Wrapper:
        return Wrapper(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, call: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Wrapper, lambda each: each.inner, args)
        found = call(*given, **(kwargs or {}))
        if call is torch.ops.aten.detach.default:
            return Wrapper(found)
        return args[0] if found is given[0] else found


class Model(prologues.Neox):
    """Two of its weights are packed as copies, since RoPE columns are halves."""

    def __init__(self) -> None:
        super().__init__()
        for name in "q_b_proj", "kv_a_proj_with_mqa":
            inner = getattr(self, name).weight.data
            getattr(self, name).weight = nn.Parameter(Wrapper(inner), requires_grad=False)


def other(weight: Tensor) -> Tensor:
    return (torch.randn(weight.shape) * 0.05).to(weight.dtype)


@torch.no_grad()
def copied(model: Model) -> None:
    model.q_b_proj.weight.copy_(Wrapper(other(model.q_b_proj.weight)))


@torch.no_grad()
def loaded(model: Model) -> None:
    model.load_state_dict({name: other(value) for name, value in model.state_dict().items()})


@torch.no_grad()
def inside(model: Model) -> None:
    model.q_b_proj.weight.inner.mul_(-2)


def replaced(model: Model) -> None:
    weight = model.kv_a_proj_with_mqa.weight
    model.kv_a_proj_with_mqa.weight = nn.Parameter(Wrapper(other(weight)), requires_grad=False)


def refreshed(model: Model) -> None:
    model.q_b_proj.weight.inner.data.mul_(-2)
    assert mf.refresh(model) == 2


def released(model: Model) -> None:
    model.q_b_proj.weight.inner.data.mul_(-2)
    assert mf.release(model)


CHANGES = [copied, loaded, inside, replaced, refreshed, released]


@pytest.mark.parametrize("change", one_in(1, CHANGES), ids=lambda change: change.__name__)
def test_next_call_computes_with_what_the_wrapper_holds(change: Callable[[Model], None]) -> None:
    model, args = Model(), base.paged_args()
    run = torch.compile(model, backend=mf.backend(mf.Config(updates="counted")), fullgraph=True)
    for step in range(3):
        if step == 1:
            change(model)
        given = clones(args)
        with torch.no_grad():
            found = [*flat(run(*given)), *given]
        for want, got in zip(eager(model, clones(args)), found, strict=True):
            assert distance(got, want) < 0.02
    assert mf.reports()[-1].fused


def test_wrapper_that_stays_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, asked = Model(), base.paged_args(), []
    usual = Packed.of
    monkeypatch.setattr(Packed, "of", lambda *given: asked.append(0) or usual(*given))
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)
    with torch.no_grad():
        run(*clones(args))
        before = len(asked)
        run(*clones(args))
    assert before and len(asked) == before
