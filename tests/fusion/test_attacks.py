"""Programs that once were fused into something else: steps that probes of ordinary size, or of few
tokens, miss.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import base
from tests.catalogue.base import Base
from tests.exhaustive import one_in
from tests.harness import traced_graph


class After(nn.Module):
    """A step behind a norm."""

    def __init__(self, norm: nn.Module, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.step = norm, step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.norm(x))


def attention_temperature(y: Tensor) -> Tensor:
    """Llama 4's: later tokens are scaled up, in steps of so many."""
    count = torch.floor((torch.arange(y.shape[0]) + 1) / 256.0)
    return (y * (torch.ones(()) + 0.1 * torch.log(count + 1))[:, None]).to(y.dtype)


def late_tokens(y: Tensor) -> Tensor:
    return (y * (y.new_ones(()) * (1 + (torch.arange(y.shape[0]) * 0.004).floor()))[:, None]).to(
        y.dtype
    )


def halved_now_and_then(y: Tensor) -> Tensor:
    factor = torch.pow(torch.full((), 0.5), torch.floor(torch.arange(y.shape[0]) / 200.0))
    return (y * factor[:, None]).to(y.dtype)


@pytest.mark.parametrize("side", ["q_a_layernorm", "kv_a_layernorm"])
@pytest.mark.parametrize(
    "step", one_in(1, [attention_temperature, halved_now_and_then, late_tokens])
)
def test_steps_by_the_token_number_are_not_fused_away(
    step: Callable[[Tensor], Tensor], side: str
) -> None:
    model, args = Base(), base.paged_args(8)
    setattr(model, side, After(getattr(model, side), step))
    gm = traced_graph(model, *args, dynamic=True)
    assert all(fusion.placement.startswith("staged") for fusion in mf.fuse(gm).fused)
    steps = [node for node in gm.graph.nodes if "floor" in str(node.target)]
    assert steps, "the step stays in the graph"


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": lambda y: (y.float() + 50 * (1 + torch.erf(-y.float() - 80))).to(y.dtype),
    "sigmoid": lambda y: y * torch.sigmoid(80.0 - y.float()).to(y.dtype),
    "rational": lambda y: (y.float() / (1 + (y.float() / 80).pow(32))).to(y.dtype),
    "rational, by squares": lambda y: (
        y.float() / (1 + (y.float() / 80).square().square().square())
    ).to(y.dtype),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_that_open_far_from_the_probes(name: str) -> None:
    model = Base()
    model.q_a_layernorm = After(model.q_a_layernorm, GATES[name])  # type: ignore[assignment]
    gm = traced_graph(model, *base.paged_args())
    assert mf.fuse(gm).fused == []


class SmallGate(Base):
    """1 at a magnitude of 1 and at a million, 0 near zero."""

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = super().split(q)
        return q_nope * torch.tanh(1e4 * q_nope.float().square()).to(q.dtype), q_pe


def test_a_gate_on_the_query() -> None:
    gm = traced_graph(SmallGate(), *base.paged_args())
    assert mf.fuse(gm).fused == []


class SignBuffer(Base):
    """A buffer is no literal: it may be written between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.cat([-torch.ones(32), torch.ones(32)]).bfloat16())

    def rotate(self, x: Tensor, c: Tensor, s_: Tensor) -> Tensor:
        x = base.hf_interleave(x)
        return x * c + torch.cat([x[..., 32:], x[..., :32]], -1) * self.signs * s_


def test_a_buffer_of_signs_is_no_literal() -> None:
    gm = torch.export.export(SignBuffer(), base.paged_args(), strict=False).module()
    mf.fuse(gm)
    assert any(node.target == "signs" and node.users for node in gm.graph.nodes)


class Masked(Base):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.mask.float().sum() if not self.mask.is_complex() else self.mask.real.sum()


MASKS = {
    "bool": torch.ones(4, 4, dtype=torch.bool),
    "complex": torch.polar(torch.ones(4), torch.zeros(4)),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", MASKS)
def test_buffers_of_any_dtype_do_not_matter(kind: str) -> None:
    gm = torch.export.export(Masked(MASKS[kind]), base.paged_args(), strict=False).module()
    report = mf.fuse(gm)
    assert len(report.fused) == 1, str(report)


class SlotsByTwoCounts(Base):
    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return slots + torch.arange(7, -1, -1)


def test_slots_plus_a_vector_may_repeat() -> None:
    gm = traced_graph(SlotsByTwoCounts(), *base.paged_args())
    (fusion,) = mf.fuse(gm).fused
    assert fusion.placement.startswith("staged")
