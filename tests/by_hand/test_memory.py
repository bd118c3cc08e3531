"""Where caches lie, what memory holds that nobody wrote, what stands before the prologue: nothing
hides a mistake.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.tools.by_hand import memory
from tests.by_hand.faults import FAULTS, Hand, args, given, model
from tests.by_hand.test_audit import HandInt8, named
from tests.catalogue import base, int8

SWAPPED, LATE = FAULTS["tables_swapped"], FAULTS["block_late"]


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
    """The caches are buffers, or plain attributes, of the module."""

    def __init__(self, inner: nn.Module, caches: tuple[Tensor, ...], buffers: bool) -> None:
        super().__init__()
        self.inner = inner
        for name, cache in zip(("kv", "kr"), caches, strict=True):
            if buffers:
                self.register_buffer(name, cache.clone())
            else:
                setattr(self, name, cache.clone())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        return self.inner(x, cos, sin, self.kv, self.kr, slots)


@pytest.mark.parametrize("fault", [None, SWAPPED, LATE])
def test_caches_in_a_list(fault: Any) -> None:
    torch.manual_seed(0)
    module, (x, cos, sin, kv, kr, slots) = model(), args()
    before = kv.clone(), kr.clone()
    hand = Hand(module, *([fault[2]] if fault else []))
    found = mf.audit(CachesIn(hand), CachesIn(module), x, cos, sin, [kv, kr], slots)
    assert {"argument 3.0", "argument 3.1"} <= set(found.errors or {})
    assert named(found) == ({fault[:2]} if fault else set()), str(found)
    assert torch.equal(kv, before[0]) and torch.equal(kr, before[1])


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("fault", [None, SWAPPED, LATE])
def test_caches_of_a_module(buffers: bool, fault: Any) -> None:
    torch.manual_seed(0)
    module, (x, cos, sin, kv, kr, slots) = model(), args()
    hand = Holds(Hand(module, *([fault[2]] if fault else [])), (kv, kr), buffers)
    reference = Holds(module, (kv, kr), buffers)
    found = mf.audit(hand, reference, x, cos, sin, slots)
    kind = "buffer" if buffers else "attribute"
    assert {f"{kind} kv", f"{kind} kr"} <= set(found.errors or {})
    assert named(found) == ({fault[:2]} if fault else set()), str(found)
    assert torch.equal(reference.kv, kv) and torch.equal(hand.kv, kv), "as before"


def test_a_wrapper_of_the_reference_that_holds_the_caches() -> None:
    torch.manual_seed(0)
    module, (x, cos, sin, kv, kr, slots) = model(), args()
    reference = Holds(module, (kv, kr), True)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reference, self.hand = reference, Hand(module)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
            return self.hand(x, cos, sin, self.reference.kv, self.reference.kr, slots)

    found = mf.audit(Wrapper(), reference, x, cos, sin, slots)
    assert found.ok and found.equal, str(found)


def test_memory_that_nobody_wrote_may_be_nan() -> None:
    torch.manual_seed(0)
    module, (x, cos, sin, kv, kr, slots) = model(), args()
    kv[3], kr[3] = float("nan"), float("nan")  # a block without a slot

    class Rows(nn.Module):
        """Without the unwritten block."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.inner(*inputs)[..., : 3 * base.BLOCK_SIZE]

    inputs = x, cos, sin, kv, kr, slots
    assert mf.audit(Rows(Hand(module)), Rows(module), *inputs).equal is True
    found = mf.audit(Rows(Hand(module, SWAPPED[2])), Rows(module), *inputs)
    assert named(found) == {SWAPPED[:2]}, str(found)


class Finishes(nn.Module):
    """What is made of the scores: masked ones, nothing at all, and what rounding leaves."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        scores = self.inner(x, *rest)
        masked = scores.masked_fill(torch.arange(scores.shape[-1]) > 20, float("-inf"))
        return masked, scores[:0], (x / 3 * 3 - x)


@pytest.mark.parametrize("fault", [None, SWAPPED])
def test_odd_results(fault: Any) -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    found = mf.audit(
        Finishes(Hand(module, *([fault[2]] if fault else []))), Finishes(module), *inputs
    )
    assert named(found) == ({fault[:2]} if fault else set()), str(found)
    assert max((found.tolerance or {}).values()) < 0.2


class BehindANorm(nn.Module):
    """A decoder layer norms x: a smaller x changes nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, base.HfNorm(base.HE)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.inner(self.norm(x), *rest)


@pytest.mark.parametrize("name", ["eps_cq_default", "eps_ckv_default", "eps_ckv_small"])
def test_epsilons_behind_a_norm(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = model(), args()
    hand, reference = BehindANorm(Hand(module, FAULTS[name][2])), BehindANorm(module)
    hand.norm = reference.norm
    assert named(mf.audit(hand, reference, *inputs)) == {FAULTS[name][:2]}


@pytest.mark.parametrize("argument", ["rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv"])
def test_epsilons_of_int8(argument: str) -> None:
    torch.manual_seed(0)
    module = int8.Full()
    found = mf.audit(HandInt8(module, given(**{argument: 1e-4})), module, *args())
    assert ("epsilon", argument) in named(found), str(found)


def test_copies_share_what_the_inputs_share() -> None:
    pool = torch.arange(12.0).view(3, 4)
    whole, row, (nested,) = memory.copied([pool, pool[1], [pool.t()]])
    whole[1, 2] = -1.0
    assert row[2] == -1.0 and nested[2, 1] == -1.0 and pool[1, 2] == 6.0
    assert nested.stride() == pool.t().stride()
