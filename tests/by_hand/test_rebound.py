"""Tensors that a run binds anew to attributes of its modules are compared by name, or nothing is
decided; the modules are left as they were.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.tools.by_hand.memory import held_by
from tests.catalogue.base import Base, paged_args


class Grows(nn.Module):
    """As a dynamic cache does."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.cache = torch.zeros(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x * self.factor])
        return x + 1


class InDict(Grows):
    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.held = {"kv": torch.zeros(3, 8)}

    def forward(self, x: Tensor) -> Tensor:
        self.held["kv"] = x * self.factor
        return x + 1


class InList(Grows):
    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(x * self.factor)
        return x + 1


@pytest.mark.filterwarnings("ignore:.*assigned during export")
@pytest.mark.parametrize("kind", [Grows, InDict, InList])
def test_functions_that_bind_tensors_anew_are_not_decided(kind: type[Grows]) -> None:
    one, other = kind(2.0), kind(3.0)
    before = [held_by(each) for each in (one, other)]
    found = mf.audit(one, other, torch.randn(3, 8))
    assert found.equal is None, str(found)
    for each, held in zip((one, other), before, strict=True):
        after = held_by(each)
        assert after.keys() == held.keys()
        assert all(after[name] is value for name, value in held.items())


class Holds(nn.Module):
    """Its caches are attributes, given anew by each call."""

    def __init__(self, model: Base, shift: int = 0) -> None:
        super().__init__()
        self.model, self.shift = model, shift
        generator = torch.Generator().manual_seed(0)
        _, _, _, kv, kr, _ = paged_args()
        self.kv = torch.randn(kv.shape, generator=generator).bfloat16()
        self.kr = torch.randn(kr.shape, generator=generator).bfloat16()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        kv, kr = self.kv.clone(), self.kr.clone()
        found: Tensor = self.run(x, cos, sin, kv, kr, slots)
        self.kv, self.kr = kv, kr
        return found

    def run(self, *args: Tensor) -> Tensor:
        self.model(*args)
        return args[0].float().sum(-1)


class ByHand(Holds):
    def run(self, *args: Tensor) -> Tensor:
        x, cos, sin, kv, kr, slots = args
        m = self.model
        torch.ops.npu.npu_mla_prolog_v3(
            x,
            m.q_a_proj.weight.T.contiguous(),
            m.q_b_proj.weight.T.contiguous(),
            m.w_uk().contiguous(),
            m.kv_a_proj_with_mqa.weight.T.contiguous(),
            m.q_a_layernorm.weight,
            m.kv_a_layernorm.weight,
            sin,
            cos,
            kv,
            kr,
            cache_index=slots.roll(self.shift),
            rmsnorm_epsilon_cq=1e-6,
            rmsnorm_epsilon_ckv=1e-6,
            cache_mode="PA_BSND",
        )
        return x.float().sum(-1)


@pytest.mark.parametrize("shift", [0, 1])
def test_caches_that_are_bound_anew_are_compared(shift: int) -> None:
    torch.manual_seed(0)
    model = Base()
    x, cos, sin, *_, slots = paged_args()
    found = mf.audit(ByHand(model, shift), Holds(model), x, cos, sin, slots, seconds=2.0)
    assert found.equal is (shift == 0), str(found)
    assert not found.findings or shift, str(found)
    assert found.errors and {"attribute kv", "attribute kr"} <= found.errors.keys()
