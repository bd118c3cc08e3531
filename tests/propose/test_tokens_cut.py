"""Tokens that are taken behind a projection are named, wherever that is; other parts are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, D, Prologue, hf_interleave, paged_args, rotate_half
from tests.harness import refused, traced_graph

FEW = 5
Cut = Callable[[Tensor], Tensor]


class Padded(Prologue):
    """Serving pads the batch: of what is named in ``at`` the first tokens go on."""

    def __init__(self, at: str, cut: Cut = lambda value: value[:FEW]) -> None:
        super().__init__()
        self.at, self.cut = at.split(), cut

    def part(self, name: str, value: Tensor) -> Tensor:
        return self.cut(value) if name in self.at else value

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        def rotate(value: Tensor) -> Tensor:
            value, (c, s) = hf_interleave(value), (table[: len(value)] for table in (cos, sin))
            return value * c.unsqueeze(1) + rotate_half(value) * s.unsqueeze(1)

        c_q = self.part("c_q", self.q_a_layernorm(self.q_a_proj(x)))
        q = self.part("q", self.q_b_proj(c_q)).view(-1, self.heads, D + DR)
        q_nope, q_pe = q.split([D, DR], -1)
        q_nope, q_pe = self.part("q_nope", q_nope), self.part("q_pe", q_pe)
        c_kv, k_pe = self.latent(x)
        k_pe = rotate(self.part("k_pe", k_pe).unsqueeze(1)).squeeze(1)
        query_rope = self.part("query_rope", rotate(q_pe))
        rows = min(len(c_kv), len(k_pe))
        kv.view(-1, HCKV)[slots[:rows]] = c_kv[:rows]
        kr.view(-1, DR)[slots[:rows]] = k_pe
        return torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk()), query_rope


@pytest.mark.parametrize("at", ["q", "q_nope", "q_pe", "q_nope q_pe", "k_pe", "c_q", "c_q k_pe"])
def test_tokens_that_are_cut_are_named(at: str) -> None:
    rejection = refused(traced_graph(Padded(at), *paged_args()))
    assert rejection.code == "tokens.cut" and " some of the tokens of " in rejection.message


def test_the_last_token_alone() -> None:
    last = Padded("q_nope q_pe", lambda value: value[-1].unsqueeze(0))
    assert refused(traced_graph(last, *paged_args())).code == "tokens.cut"


def test_what_the_kernel_gives_may_be_cut() -> None:
    report = mf.fuse(traced_graph(Padded("query_rope"), *paged_args()))
    assert len(report.fused) == 1, str(report)


def test_heads_are_no_tokens() -> None:
    class Heads(Padded):
        def part(self, name: str, value: Tensor) -> Tensor:
            return value[:, :1] if name in self.at else value

    for tokens in (8, 2):  # two heads
        assert refused(traced_graph(Heads("q_pe"), *paged_args(tokens))).code != "tokens.cut"
