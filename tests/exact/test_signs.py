"""A root of a square has either sign: only what the kernel takes a root of has one, of anything
else it is a function.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base
from tests.harness import traced_graph


class Plain(base.Base):
    pass


class TimesOne(base.Base):
    """The latent, times a root of its row and through it."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([base.HCKV, base.DR], -1)
        root = torch.sqrt(c_kv[..., :1].float().square() + 1)
        return self.kv_a_layernorm((c_kv.float() * root / root).to(c_kv.dtype)), k_pe


class TimesSign(base.Base):
    """The latent, turned over in some rows."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([base.HCKV, base.DR], -1)
        one = c_kv[..., :1].float()
        return self.kv_a_layernorm(
            (c_kv.float() * torch.sqrt(one.square()) / one).to(c_kv.dtype)
        ), k_pe


def is_proved(model: base.Base) -> bool:
    gm = traced_graph(model, *base.paged_args())
    report = mf.explain(gm, mf.Config(verify="off"), boundary=True)
    return any("points" in line for fusion in report.fused for line in fusion.proof)


def test_another_root_may_cancel() -> None:
    assert is_proved(Plain()) and is_proved(TimesOne())


def test_no_root_is_a_size() -> None:
    assert not is_proved(TimesSign())
