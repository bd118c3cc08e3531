"""What looks like a prologue, and what does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base, prologues, public_refusals
from tests.catalogue.floats import Fp8Full, RowLinear
from tests.harness import refused, traced_graph


class GroupedQuery(torch.nn.Module):
    """Two layers of ordinary attention over keys that come from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = base.linear(256, 384), base.linear(256, 256)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q = self.qkv(x)[..., :256].view(-1, 4, 64).transpose(0, 1)
            rows = torch.bmm(torch.bmm(q, keys).softmax(-1), values)
            x = x + self.out(rows.transpose(0, 1).reshape(-1, 256))
        return x


def test_a_graph_for_no_tokens_says_so() -> None:
    report = mf.explain(traced_graph(prologues.PagedRotateHalf(), *base.paged_args(tokens=0)))
    assert not report.fused and not report.rejected
    assert len(report.absent) == 1 and report.absent[0].startswith("no tokens in this graph")


def test_other_attention_is_no_near_miss() -> None:
    args = (torch.randn(shape).bfloat16() for shape in ((8, 256), (4, 64, 32), (4, 32, 64)))
    assert mf.explain(traced_graph(GroupedQuery(), *args)).rejected == []


class InABranch(torch.nn.Module):
    """The prologue writes no cache here: a branch may not change what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.prologue = base.Base()

    def forward(
        self, flag: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        def computed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            p = self.prologue
            q_nope, q_pe = p.split(p.q_b_proj(p.q_a_layernorm(p.q_a_proj(x))))
            c_kv, k_pe = p.latent(x)
            c, s_ = cos.unsqueeze(1), sin.unsqueeze(1)
            k = p.rotate(k_pe.unsqueeze(1), c, s_).squeeze(1)
            return base.attend(p.absorb(q_nope), p.rotate(q_pe, c, s_), c_kv, k)

        def nothing(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return computed(x, cos, sin) * 0

        return torch.cond(flag, computed, nothing, (x, cos, sin))


class BranchedLatent(base.Base):
    def down(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.q_a_proj, lambda x: self.q_a_proj(-x), (x,))


def test_a_prologue_in_a_branch_or_a_part_of_it_is_named() -> None:
    args = base.paged_args()
    whole = traced_graph(InABranch(), torch.tensor(True), *args[:3])
    for graph in (whole, traced_graph(BranchedLatent(), *args)):
        rejection = refused(graph)
        assert rejection.code == "graph.branch" and "cond" in rejection.message


class ScaledByOthers(RowLinear):
    """The key's product, each token by the scale of another one."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return super().product(x, x_scale.flip(0))


def test_a_product_by_scales_of_other_tokens_is_said_to_be_one() -> None:
    class Model(Fp8Full):
        def __init__(self) -> None:
            super().__init__()
            self.kv_a_proj_with_mqa = ScaledByOthers(base.HE, base.HCKV + base.DR)

    report = mf.fuse(traced_graph(Model(), *base.paged_args()), mf.Config(soc="A5", verify="off"))
    assert not report.fused and "quant.scale" in [item.code for item in report.rejected], str(
        report
    )
    assert "q_lora.absent" not in [item.code for item in report.rejected], str(report)


@pytest.mark.parametrize(
    ("targets", "code"), [(("v3", "identity"), "rope.absent"), (("v3",), "absorb.absent")]
)
def test_a_key_that_is_neither_rotated_nor_handed_on(targets: tuple[str, ...], code: str) -> None:
    class Model(public_refusals.Unabsorbed):
        def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return x + cos

    graph = traced_graph(Model(), *base.paged_args())
    (rejection,) = mf.fuse(graph, mf.Config(targets=targets, verify="off")).rejected
    assert rejection.code == code
