"""Two queries on one latent: the second is reported."""

from __future__ import annotations

import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base
from tests.harness import assert_as_exact, clones, run_fused


class TwoQueries(base.Prologue):
    """A second query goes with the latent of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = base.Prologue()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        def rotate(x: Tensor) -> Tensor:
            x = base.hf_interleave(x)
            return x * cos.unsqueeze(1) + base.rotate_half(x) * sin.unsqueeze(1)

        c_kv, k_pe = self.latent(x)
        kv_cache.view(-1, base.HCKV)[slots] = c_kv
        kr_cache.view(-1, base.DR)[slots] = rotate(k_pe.unsqueeze(1)).squeeze(1)
        scores = []
        for side in (self, self.other):
            q_nope, q_pe = side.query(x)
            rows = kv_cache.view(-1, base.HCKV), kr_cache.view(-1, base.DR)
            scores.append(base.attend(side.absorb(q_nope), rotate(q_pe), *rows))
        return torch.stack(scores)


def test_two_queries_of_one_latent() -> None:
    torch.manual_seed(0)
    model, args = TwoQueries(), base.paged_args()
    fused = run_fused(model, clones(args))
    report = mf.reports()[-1]
    places = [item.placement for item in report.fused]
    assert places[0] == "in place" and "another fusion writes" in places[1], str(report)
    assert_as_exact(model, args, fused)
