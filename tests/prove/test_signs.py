"""A root of a square has either sign: where the kernel does not draw it, enough signs are looked
at.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.prove import field
from tests.catalogue import base


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


def proved(model: base.Base) -> tuple[int, float]:
    """At how many points, wrong by which chance; of a refusal 0."""
    gm, _ = capture(model, *base.paged_args(), device="cpu")
    report = mf.explain(gm, mf.Config(verify="off"), boundary=True)
    lines = [line for fusion in report.fused for line in fusion.proof if "points" in line]
    found = [re.search(r"at (\d+) points, wrong by a chance below (\S+)", line) for line in lines]
    return (int(found[0][1]), float(found[0][2])) if found and found[0] else (0, 1.0)


def test_roots_of_the_kernel_need_no_more_points() -> None:
    points, chance = proved(Plain())
    assert points == 3 and chance <= 1e-15


def test_other_roots_are_looked_at_until_chance_is_small() -> None:
    points, chance = proved(TimesOne())
    assert points > 3 and chance <= 1e-15
    assert proved(TimesSign()) == (0, 1.0)


def test_roots_of_one_sign() -> None:
    rows = field.random("rows", (5, 1))
    of_4, of_minus_1 = (field.mul(rows, field.number(times)) for times in (4, -1))
    assert field.is_square_times(of_4, rows)
    assert not field.is_square_times(of_minus_1, rows)
    assert not field.is_square_times(rows, field.random("others", (5, 1)))
