"""A root of a square has either sign: only what the kernel takes a root of has one, of anything
else it is a function.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from mla_fusion.prove import field, quantising
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


def is_proved(model: base.Base) -> bool:
    gm, _ = capture(model, *base.paged_args(), device="cpu")
    report = mf.explain(gm, mf.Config(verify="off"), boundary=True)
    return any("points" in line for fusion in report.fused for line in fusion.proof)


def test_another_root_may_cancel() -> None:
    assert is_proved(Plain()) and is_proved(TimesOne())


def test_no_root_is_a_size() -> None:
    assert not is_proved(TimesSign())


def test_roots_of_how_many_times() -> None:
    rows = field.random("rows", (5, 1))
    for times in (Fraction(1), Fraction(512), Fraction(1, 1536)):
        several = field.mul(rows, field.number(times))
        assert field.small_times(several, rows) == times
        assert field.small_times(several.moved(lambda part: part.expand(5, 3)), rows) == times
    for other in (field.neg(rows), field.random("others", (5, 1))):
        assert field.small_times(other, rows) is None
    one = field.random("one", (1, 1))  # of its square, nothing says which root is meant
    assert field.small_times(field.mul(rows, field.mul(one, one)), rows) is None


def test_squares_of_other_roots_are_known() -> None:
    """Of ``(sqrt(a) / 2) ** 2`` nothing depends on a sign, wherever it has been moved to."""
    point = field.Point(draws_roots=False)
    with field.at(point):
        a, four = field.random("a", (5, 5)), field.number(4)
        part = quantising.scaled(field.sqrt(a), 1536**-0.5)
        whole = field.mul(field.integer_power(part, 2), field.number(1536))
        assert field.small_times(whole, a) == 1
        half = field.mul(field.sqrt(a), field.number(Fraction(1, 2)))
        moved = field.neg(half).moved(torch.diagonal)
        assert field.equal(field.mul(field.mul(half, half), four), a)
        assert field.equal(field.mul(field.mul(moved, moved), four), a.moved(torch.diagonal))
        assert not field.equal(field.mul(half, field.sqrt(a)), field.mul(half, half))


def test_roots_of_the_kernel_are_met_moved_and_inverse() -> None:
    a = field.random("a", (5, 5))
    point = field.Point(draws_roots=False, roots=[a.moved(torch.diagonal)])
    with field.at(point):
        wanted = field.sqrt(a.moved(torch.diagonal))
        assert field.equal(field.mul(wanted, wanted), a.moved(torch.diagonal))
        assert field.equal(field.sqrt(a).moved(torch.diagonal), wanted)
        of_inverse = field.sqrt(field.inverse(a)).moved(torch.diagonal)
        assert field.equal(field.mul(of_inverse, wanted), field.number(1))
        negative = field.neg(field.sqrt(a)).moved(torch.diagonal)
        assert not field.equal(negative, field.neg(wanted))
        assert not field.equal(negative, wanted)
