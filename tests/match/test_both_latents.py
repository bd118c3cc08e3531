"""One step behind both down-projections hides both latents: the report still has a word for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.harness import refused, traced_graph

Step = Callable[[Tensor], Tensor]


class Stepped(Base):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def down(self, x: Tensor) -> Tensor:
        return self.step(self.q_a_proj(x))

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.step(self.kv_a_proj_with_mqa(x)).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


@pytest.mark.parametrize(
    "step, code, named",
    [
        (lambda rows: rows + 0.01, "norm.absent", "is made of"),
        (torch.tanh, "norm.absent", "is made of"),
        (F.gelu, "norm.absent", "is made of"),
        (lambda rows: rows.to(torch.float8_e4m3fn).bfloat16(), "norm.absent", "is made of"),
        (lambda rows: rows.clamp(-5, 5), "step.choice", "clamp"),
        (lambda rows: torch.where(rows > 9, 9, rows), "step.choice", "gt"),
    ],
    ids=["added to", "tanh", "gelu", "rounded", "clamped", "bounded"],
)
def test_it_is_told(step: Step, code: str, named: str) -> None:
    rejection = refused(traced_graph(Stepped(step), *paged_args()))
    assert rejection.code == code and named in rejection.message


def test_without_a_step_it_fuses() -> None:
    (fusion,) = mf.fuse(traced_graph(Stepped(lambda rows: rows), *paged_args())).fused
    assert fusion.placement == "in place"
