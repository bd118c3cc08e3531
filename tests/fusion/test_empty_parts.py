"""Slices that keep nothing read nothing: partial RoPE of a model whose rotation takes all
columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base
from tests.harness import assert_as_exact, clones, compiled


class PartialRope(base.Base):
    """``cat((rotated, the rest))``, where the rest is empty."""

    def rotate(self, x: Tensor, c: Tensor, s_: Tensor) -> Tensor:
        width = c.shape[-1]
        return torch.cat((super().rotate(x[..., :width], c, s_), x[..., width:]), -1)


class EmptyReader(base.Base):
    """Somebody keeps a slice of the raw query that is empty."""

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return c_q_raw[:, c_q_raw.shape[1] :].clone()


def test_an_empty_rest_is_dropped() -> None:
    torch.manual_seed(0)
    model, args = PartialRope(), base.paged_args()
    fused = compiled(model, clones(args), mf.backend())
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place"
    assert_as_exact(model, args, fused)


def test_an_empty_slice_of_the_raw_latent_does_not_matter() -> None:
    torch.manual_seed(0)
    model, args = EmptyReader(), base.paged_args()
    fused = compiled(model, clones(args), mf.backend())
    assert len(mf.reports()[-1].fused) == 1, str(mf.reports()[-1])
    assert_as_exact(model, args, fused)
