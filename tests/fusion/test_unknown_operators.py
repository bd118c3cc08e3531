"""An operator that nobody listed, in the midst of a prologue: refused by its name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.prologues import PagedRotateHalf
from tests.harness import traced_graph


@torch.library.custom_op("mla_fusion_graph_test::mystery", mutates_args=())
def mystery(rows: Tensor) -> Tensor:
    return rows.clone()


@mystery.register_fake
def _(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


class BeforeNorm(PagedRotateHalf):
    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q_b_proj(self.q_a_layernorm(mystery(self.q_a_proj(x))))
        return self.halves(q)

    def halves(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = q.view(q.shape[0], self.heads, -1).split([128, 64], -1)
        return q_nope, q_pe


class BehindNorm(BeforeNorm):
    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.halves(self.q_b_proj(mystery(self.q_a_layernorm(self.q_a_proj(x)))))


class OnTheLatent(PagedRotateHalf):
    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([512, 64], -1)
        return self.kv_a_layernorm(mystery(c_kv)), k_pe


@pytest.mark.parametrize("model", [BeforeNorm, BehindNorm, OnTheLatent])
def test_it_is_refused_by_name(model: type[PagedRotateHalf]) -> None:
    gm = traced_graph(model(), *paged_args())
    before = str(gm.graph)
    report = mf.fuse(gm)
    assert not report.fused and str(gm.graph) == before
    rejection, *_ = report.rejected
    assert rejection.code in (
        "step.unknown",
        "linear.hidden",
        "norm.absent",
        "q_lora.interrupted",
    ), rejection.code
    assert "mystery" in str(rejection)
