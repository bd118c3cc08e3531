"""Where a proof ends in a difference, steps are named of which it knows only that they are
functions.
"""

from torch import Tensor

import mla_fusion as mf
from mla_fusion.report.rejection import Rejection
from tests.catalogue import base
from tests.catalogue.prologues import PagedRotateHalf
from tests.harness import traced_graph


class RootByLogarithm(base.HfNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True) + self.eps
        return self.weight * (wide * (mean.log2() * -0.5).exp2()).to(x.dtype)


class Twice(base.HfNorm):
    """Normed before its norm: another epsilon than the kernel's, by steps that all have rules."""

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float()
        for _ in range(2):
            normed = normed * (normed.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * normed.to(x.dtype)


def rejection(norm: type[base.HfNorm]) -> Rejection:
    model = PagedRotateHalf()
    model.kv_a_layernorm = norm(model.kv_a_layernorm.weight.numel())
    gm = traced_graph(model, *base.paged_args())
    (rejected,) = mf.explain(gm).rejected
    return rejected


def test_they_come_first() -> None:
    rejected = rejection(RootByLogarithm)
    assert rejected.code == "proof.differs"
    assert "log2 (aten.log2.default)" in rejected.message
    assert "exp2 (aten.exp2.default)" in rejected.message
    assert rejected.nodes[0].startswith(("log2", "exp2"))


def test_none_is_named_where_all_steps_have_rules() -> None:
    rejected = rejection(Twice)
    assert rejected.code == "proof.differs"
    assert "it is a function" not in rejected.message
