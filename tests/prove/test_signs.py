"""A root of a square has either sign: only what the kernel takes a root of has one, of anything
else it is a function.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.prove import field
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


def test_roots_of_how_many_times() -> None:
    rows = field.random("rows", (5, 1))
    for times in (Fraction(1), Fraction(512), Fraction(1, 1536)):
        several = rows * field.number(times)
        assert field.small_times(several, rows) == times
        assert field.small_times(several.moved(lambda part: part.expand(5, 3)), rows) == times
    for other in (-rows, field.random("others", (5, 1))):
        assert field.small_times(other, rows) is None
    one = field.random("one", (1, 1))  # of its square, nothing says which root is meant
    assert field.small_times(rows * (one * one), rows) is None


def test_roots_of_the_kernel_are_met_moved_and_inverse() -> None:
    a = field.random("a", (5, 5))
    point = field.Point(draws_roots=False, roots=[a.moved(torch.diagonal)])
    with field.at(point):
        wanted = field.sqrt(a.moved(torch.diagonal))
        assert field.equal(wanted * wanted, a.moved(torch.diagonal))
        assert field.equal(field.sqrt(a).moved(torch.diagonal), wanted)
        of_inverse = field.sqrt(field.inverse(a)).moved(torch.diagonal)
        assert field.equal(of_inverse * wanted, field.number(1))
        negative = (-field.sqrt(a)).moved(torch.diagonal)
        assert field.equal(negative, -wanted)
        assert not field.equal(negative, wanted)


def test_roots_of_numbers() -> None:
    """Those of products are products, also of primes that have no root among the integers."""
    with field.at(field.Point(draws_roots=False)):
        root = {n: field.number(n**0.5) for n in (43, 47, 43 * 47, 2, 1 / 512)}
        assert field.equal(root[43] * root[47], root[43 * 47])
        assert field.equal(root[43] * root[43], field.number(43))
        assert field.equal(field.sqrt(field.integers(torch.full((4, 1), 43))), root[43])
        assert field.equal(root[1 / 512] * root[2] * field.number(16), field.number(1))


def test_a_square_of_a_root_is_as_large_as_the_product() -> None:
    with field.at(field.Point(draws_roots=False)):
        root = field.sqrt(field.random("a", (8, 1)))
        spread = root.moved(lambda part: part.expand(8, 512))
        assert (root * spread).shape == (spread * root).shape == (8, 512)


def test_roots_of_the_kernel_are_met_spread_and_by_fractions() -> None:
    b = field.random("b", (8, 1))
    with field.at(field.Point(draws_roots=False, roots=[b])) as point:
        root, spread = field.sqrt(b), b.moved(lambda part: part.expand(8, 512))
        assert field.equal(field.sqrt(spread), root) and not point.times
        for over, under in ((25, 4), (2, 3), (1, 1 << 20)):
            times = field.number(Fraction(over, under))
            root_of_inverse = field.number((under / over) ** 0.5)
            found = field.sqrt(spread * times) * root_of_inverse
            assert field.equal(found, root)
            assert point.times.pop() == Fraction(over, under)
        negative = field.sqrt(b * field.number(-4))
        assert not field.equal(negative * negative, root * root)
        assert not field.equal(negative, root * field.number(2))


def test_what_the_kernel_takes_a_root_of_is_no_square() -> None:
    v = field.random("v", (40, 1))
    assert field.are_squares(v) == {True, False}
    assert field.are_squares(v * v * field.number(3)) == {True}
    assert len(field.are_squares(-(v * v))) == 1


class OneColumn(base.Base):
    """A key latent whose columns are one: its size is a square, and its norm a sign."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(heads)
        self.row = torch.nn.Parameter(torch.randn(1, base.HE).bfloat16())

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k_pe = self.kv_a_proj_with_mqa(x)[..., base.HCKV :]
        c_kv = torch.nn.functional.linear(x, self.row.expand(base.HCKV, base.HE)).float()
        normed = torch.nn.functional.normalize(c_kv, dim=-1) * base.HCKV**0.5
        return (normed * self.kv_a_layernorm.weight).to(x.dtype), k_pe


def test_a_sign_is_no_norm() -> None:
    assert not is_proved(OneColumn())
