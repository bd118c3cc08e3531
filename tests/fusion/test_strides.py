"""The kernel's results lie otherwise in memory; who can tell gets the model's strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests import harness
from tests.catalogue import base
from tests.catalogue.base import Base
from tests.exhaustive import one_in

Reader = Callable[[Tensor], Tensor]


class Gives(Base):
    """Gives out the absorbed query, through ``reader``, as heads leave it: [N, T, 512] turned."""

    def __init__(self, reader: Reader, turned: bool = True) -> None:
        super().__init__()
        self.reader, self.turned = reader, turned

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c_kv, k_pe = self.latent(x)
        c, s_ = cos.unsqueeze(1), sin.unsqueeze(1)
        self.write(
            kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s_).squeeze(1)
        )
        query = torch.bmm(q_nope.transpose(0, 1), self.w_uk())
        return self.reader(query.transpose(0, 1) if self.turned else query), self.rotate(
            q_pe, c, s_
        )


READERS: dict[str, Reader] = {
    "the same again": lambda q: q.as_strided(q.size(), q.stride()),
    "rows of heads": lambda q: (q * 2).as_strided((16, 512), (512, 1)),
    "of a copy": lambda q: torch.empty_like(q).copy_(q).as_strided((16, 512), (512, 1)),
    "copied": lambda q: torch.as_strided_copy(q, (16, 512), (512, 1)),
}


@pytest.mark.parametrize("name", one_in(1, READERS))
def test_a_reader_with_strides_of_its_own(name: str) -> None:
    model, args = Gives(READERS[name]), base.paged_args()
    wanted = harness.eager(model, harness.clones(args))
    for report, found in harness.both_ways(model, args):
        assert harness.outcome(report) == ("in place",)
        assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("turned", one_in(1, [True, False]))
def test_results_leave_the_graph_with_the_strides_of_the_model(turned: bool, dynamic: bool) -> None:
    model, args = Gives(lambda q: q, turned), base.paged_args()
    wanted = harness.eager(model, harness.clones(args))
    found = harness.compiled(model, harness.clones(args), mf.backend(), dynamic)
    assert harness.outcome(mf.reports()[-1]) == ("in place",)
    assert [value.stride() for value in found] == [value.stride() for value in wanted]


class Behind(Gives):
    """The tokens behind the rows of a prefix: their number is a difference of two symbols."""

    def forward(self, prefix: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        n = len(prefix)
        x, cos, sin, kv, kr, slots = args
        return super().forward(x[n:], cos[n:], sin[n:], kv, kr, slots[n:])


def test_strides_of_tokens_that_are_a_difference() -> None:
    model, args = Behind(lambda q: q), (torch.ones(3), *base.paged_args())
    wanted = harness.eager(model, harness.clones(args))
    found = harness.compiled(model, harness.clones(args), mf.backend(), True)
    assert len(mf.reports()[-1].fused) == 1
    assert [value.stride() for value in found] == [value.stride() for value in wanted]


def test_results_may_leave_the_graph_as_the_kernel_leaves_them() -> None:
    found = harness.compiled(
        Gives(lambda q: q), base.paged_args(), mf.backend(mf.Config(strides="kernel"))
    )
    assert (
        found[0].is_contiguous() and "aten.clone.default" not in mf.reports()[-1].operators["after"]
    )


def test_one_token_needs_no_copy() -> None:
    """The stride of an axis of length one means nothing."""
    harness.run_fused(Gives(lambda q: q), base.paged_args(1))
    report = mf.reports()[-1]
    assert (
        harness.outcome(report) == ("in place",)
        and "aten.clone.default" not in report.operators["after"]
    )


def test_a_ge_graph_keeps_no_strides() -> None:
    """What leaves it has none: two Transposes would stand behind the kernel for nothing."""
    lowered = mf.lower(Gives(lambda q: q), *base.paged_args(), mode="ge")
    assert lowered.ge_ops["MlaPrologV3"] == 1 and "Transpose" not in lowered.ge_ops
    asked = mf.lower(
        Gives(lambda q: q), *base.paged_args(), mode="ge", config=mf.Config(strides="exact")
    )
    assert asked.ge_ops["Transpose"] == 2


def test_a_captured_graph_keeps_the_strides_of_the_model() -> None:
    lowered = mf.lower(Gives(lambda q: q), *base.paged_args(), mode="npugraph_ex")
    (end,) = lowered.fx_after.graph.find_nodes(op="output")
    query = end.args[0][0].meta["val"]
    assert query.stride() == (512, query.shape[0] * 512, 1)


@torch.library.custom_op("mla_fusion_tests::heads", mutates_args=())
def heads(query: Tensor) -> Tensor:
    """As a kernel that takes memory and sizes: dense, heads first."""
    return query.as_strided((query.numel(),), (1,), query.storage_offset()).view(query.shape) * 2


@heads.register_fake
def _(query: Tensor) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


HEEDING: dict[str, Reader] = {
    "a custom operator": lambda q: torch.ops.mla_fusion_tests.heads(q.transpose(0, 1)),
    "one behind others": lambda q: torch.ops.mla_fusion_tests.heads((q * 2).transpose(0, 1)),
    "one behind a copy": lambda q: torch.ops.mla_fusion_tests.heads(q.contiguous()),
    "dropout": lambda q: torch.nn.functional.dropout(q, 0.5, True),
    "noise": lambda q: q + torch.randn_like(q),
}


@pytest.mark.parametrize("name", HEEDING)
def test_a_reader_that_heeds_strides(name: str) -> None:
    model, args = Gives(HEEDING[name]), base.paged_args()
    torch.manual_seed(1)
    wanted = harness.eager(model, harness.clones(args))
    torch.manual_seed(1)
    found = harness.compiled(model, harness.clones(args), mf.backend())
    assert harness.outcome(mf.reports()[-1]) == ("in place",)
    assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))
