"""One step on all parts of a prologue leaves no fact standing, and is named all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.catalogue.base import DR, HCKV, D, paged_args
from tests.catalogue.prologues import PagedRotateHalf
from tests.harness import refused, traced_graph

Step = Callable[[Tensor], Tensor]


class Everywhere(PagedRotateHalf):
    """``at``: "parts" (of the query and of the key), "products" (W_uq_qr x and W_dkv_kr x) or
    "c_q" (and W_dkv_kr x).
    """

    def __init__(self, step: Step, at: str) -> None:
        super().__init__()
        self.step, self.at = step, at

    def on(self, where: str, value: Tensor) -> Tensor:
        return self.step(value) if where in self.at.split() else value

    def query(self, x: Tensor) -> list[Tensor]:
        c_q = self.on("c_q", self.q_a_layernorm(self.q_a_proj(x)))
        q = self.on("products", self.q_b_proj(c_q)).view(*x.shape[:-1], self.heads, D + DR)
        return [self.on("parts", part) for part in q.split([D, DR], -1)]

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = self.kv_a_proj_with_mqa(x)
        both = self.on("products", self.on("c_q", both))
        c_kv, k_pe = both.split([HCKV, DR], -1)
        return self.on("parts", self.kv_a_layernorm(c_kv)), self.on("parts", k_pe)


STEPS = {
    "clamp": lambda x: x.clamp(-9, 9),
    "dropout": lambda x: torch.ops.aten.native_dropout.default(x, 0.1, True)[0],
    "gate": lambda x: x * x.sigmoid(),
    "roll": lambda x: x.roll(1, 0),
}
CODES = {
    "parts": ("step.choice", "step.random", "scale.unequal", "rope.absent"),
    "products": ("step.choice", "step.random", "scale.unequal", "rope.absent"),
    "c_q": ("q_lora.interrupted", "step.random", "q_lora.interrupted", "q_lora.interrupted"),
}


@pytest.mark.parametrize("at", CODES)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_everywhere(step: str, at: str) -> None:
    rejection = refused(traced_graph(Everywhere(STEPS[step], at), *paged_args()))
    assert rejection.code == CODES[at][[*STEPS].index(step)], rejection.message
