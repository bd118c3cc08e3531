"""The user's operators: known by a function, static and dynamic, left where nothing is fused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests import harness
from tests.catalogue import base
from tests.harness import graph_of, traced_graph

MINE = "mla_fusion_tests"


@torch.library.custom_op(f"{MINE}::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps)


@norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{MINE}::rope", mutates_args=())
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return roped(q, k, cos, sin)


@rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(
        k
    ).contiguous()


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def roped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return base.rotated(q, c, s).contiguous(), base.rotated(k, c, s).contiguous()


class Served(base.Prologue):
    """Norms and RoPE by operators of a library; one norm stands outside the prologue."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        c_q = norm(self.q_a_proj(x), self.q_a_layernorm.weight, 1e-6)
        q = self.q_b_proj(c_q).view(*x.shape[:-1], self.heads, base.D + base.DR)
        q_nope, q_pe = q.split([base.D, base.DR], -1)
        c_kv, k_pe = self.kv_a_proj_with_mqa(x).split([base.HCKV, base.DR], -1)
        c_kv = norm(c_kv.contiguous(), self.kv_a_layernorm.weight, 1e-6)
        q_pe, k_pe = rope(q_pe, k_pe.unsqueeze(1), cos, sin)
        kv_cache.view(-1, base.HCKV)[slots] = c_kv
        kr_cache.view(-1, base.DR)[slots] = k_pe.squeeze(1)
        scores = base.attend(
            self.absorb(q_nope), q_pe, kv_cache.view(-1, base.HCKV), kr_cache.view(-1, base.DR)
        )
        return scores, norm(scores, scores[0, 0] * 0 + 1, 1e-3)


@pytest.fixture
def known() -> Iterator[None]:
    mf.register_operator(norm, normed, torch.randn(4, 8), torch.randn(8), 1e-6)
    mf.register_operator(torch.ops.mla_fusion_tests.rope, roped)
    torch._dynamo.reset()
    yield
    for operator in (norm, rope):
        mf.register_operator(operator, None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_prologue_of_them_fuses_in_place(known: None, dynamic: bool) -> None:
    model = Served()
    args = base.paged_args()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True, dynamic=dynamic)
    mine, theirs = harness.clones(args), harness.clones(args)
    with torch.no_grad():
        found, wanted = [*run(*mine), *mine], [*model(*theirs), *theirs]
    (fusion,) = mf.reports()[-1].fused
    assert fusion.placement == "in place", str(mf.reports()[-1])
    assumed = f"{MINE}.rope.default computes what was registered for it"
    assert assumed in fusion.assumptions and f"assumed: {assumed}" in str(mf.reports()[-1])
    assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))


def test_what_was_not_fused_calls_them_still(known: None) -> None:
    gm = traced_graph(Served(), *base.paged_args())
    before = [str(node) for node in gm.graph.nodes]
    mf.explain(gm)
    assert [str(node) for node in gm.graph.nodes] == before
    report = mf.fuse(gm)
    assert len(report.fused) == 1, str(report)
    left = [str(node.target) for node in gm.graph.nodes if MINE in str(node.target)]
    assert left == [f"{MINE}.norm.default"]
    assert not any("rsqrt" in str(node.target) for node in gm.graph.nodes)
    gm.graph.lint()


def test_unknown_they_are_named() -> None:
    gm = traced_graph(Served(), *base.paged_args())
    (left,) = mf.explain(gm).rejected
    assert left.code == "norm.absent" and "mf.register_operator" in left.remedy
    assert f"{MINE}.norm.default) is not known" in left.message


def exchanged(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return roped(q, k, sin, cos)


@pytest.mark.parametrize("function", [None, lambda q, k, cos, sin: (q,), exchanged])
def test_an_unknown_rotation_of_query_and_key_is_named(function: Any) -> None:
    """Halfway: the norms are registered, the rotation is not, or by one that is wrong.
    It reads the products of both sides, so neither alone leads to it.
    """
    mf.register_operator(norm, normed)
    mf.register_operator(rope, function)
    try:
        gm = graph_of(Served(), *base.paged_args())
        (left,) = mf.explain(gm).rejected
    finally:
        mf.register_operator(norm, None)
        mf.register_operator(rope, None)
    assert left.code == "rope.absent" and f"{MINE}.rope.default) is not known" in left.message
    assert ("cannot be used" in left.message) == (function is not None)
    assert "rope(q_pe" in left.source and "mf.register_operator" in left.remedy


def wrong(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps) * 2


@pytest.mark.parametrize("function", [None, wrong], ids=["none", "wrong"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_norm_that_is_unknown_or_told_wrong(known: None, function: Any, dynamic: bool) -> None:
    """A wrong function is found out by the operator's own kernel, without an example."""
    mf.register_operator(norm, function)
    run = torch.compile(Served(), backend=mf.backend(), fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        run(*base.paged_args())
    report = mf.reports()[-1]
    assert not report.fused
    assert "mf.register_operator" in str(report) and f"{MINE}.norm.default" in str(report)
    assert ("is off by 1 of the largest number" in str(report)) == (function is not None)


def of_another_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps)[..., :1]


def with_numbers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps) * torch.tensor([1.0])


@pytest.mark.parametrize("function", [of_another_shape, with_numbers])
def test_a_function_that_does_not_fit_is_not_used(
    function: Callable[..., Any], caplog: Any
) -> None:
    mf.register_operator(norm, function)
    try:
        gm = traced_graph(Served(), *base.paged_args())
        with caplog.at_level(logging.WARNING, "mla_fusion"):
            assert not mf.explain(gm).fused
        assert f"the decomposition of {MINE}.norm.default is not used for " in caplog.text
    finally:
        mf.register_operator(norm, None)


@torch.library.custom_op(f"{MINE}::writes", mutates_args=("x",))
def writes(x: Tensor) -> None:
    x.add_(1)


OF_ROPE = torch.randn(4, 1, 64), torch.randn(4, 1, 64), torch.randn(4, 64), torch.randn(4, 64)
REFUSED = {
    "no operator": (TypeError, "expected an operator", ("norm", normed)),
    "an overload is to be named": (TypeError, "name one", (torch.ops.aten.add, torch.add)),
    "torch's": (ValueError, "not yours", (torch.ops.aten.silu.default, torch.relu)),
    "a writer": (ValueError, "writes into an argument", (writes, writes)),
    "no function": (TypeError, "expected a function", (norm, 1)),
    "other numbers": (ValueError, "off by", (norm, wrong, torch.randn(4, 8), torch.randn(8), 1e-6)),
    "another shape": (
        ValueError,
        "result 0",
        (norm, of_another_shape, torch.randn(4, 8), torch.randn(8), 1e-6),
    ),
    "other arguments": (TypeError, "takes other arguments: too many", (norm, lambda x: x)),
    "a failure": (
        ValueError,
        "fails on the example: RuntimeError",
        (norm, lambda x, *_: x.view(3), torch.randn(4, 8), torch.randn(8), 1e-6),
    ),
    "another count": (ValueError, "gives 2 results", (rope, lambda *a: a[0], *OF_ROPE)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, said, arguments = REFUSED[name]
    with pytest.raises(error, match=said):
        mf.register_operator(*arguments)


def test_no_compile_cache_has_a_graph_of_them() -> None:
    before = mf.torchair_pass().digest
    mf.register_operator(norm, normed)
    try:
        assert len({before, mf.torchair_pass().digest, mf.torchair_pass().digest}) == 3
    finally:
        mf.register_operator(norm, None)
    assert mf.torchair_pass().digest == before


def test_a_function_that_depends_on_the_number_of_tokens_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it does at the number that was traced with says nothing of others."""

    def long_is_doubled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found = normed(x, weight, eps)
        return found if x.shape[0] < 100 else 2 * found

    mf.register_operator(norm, long_is_doubled)
    mf.register_operator(rope, roped)
    try:
        gm, _ = capture(Served(), *base.paged_args(), device="cpu", dynamic=True)
        assert not mf.explain(gm).fused
        assert "it depends on a size" in caplog.text
    finally:
        for operator in (norm, rope):
            mf.register_operator(operator, None)


# -- what is compared on an example, and what the report says


@torch.library.custom_op("mine_told::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * 1.5


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    mf.register_operator(scaled, None)


def by(factor: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def test_complex_results_are_compared_whole() -> None:
    example = torch.randn(4, dtype=torch.complex64)
    for other in (torch.conj_physical, lambda x: x * 1.5 + 5j):
        with pytest.raises(ValueError, match="off by"):
            mf.register_operator(scaled, other, example)
    mf.register_operator(scaled, by(1.5), example)


def test_infinities_are_what_they_are() -> None:
    example = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    mf.register_operator(scaled, by(1.5), example)
    for other in (torch.Tensor.nan_to_num, by(-1.5), lambda x: x.clamp(max=10.0) * 1.5):
        with pytest.raises(ValueError, match="off by"):
            mf.register_operator(scaled, other, example)


def test_an_example_without_numbers_shows_nothing() -> None:
    for example in (torch.ones(0, 4), torch.zeros(4), torch.full((4,), math.nan)):
        with pytest.raises(ValueError, match="no numbers to compare"):
            mf.register_operator(scaled, by(3.0), example)


class Scaled(base.Base):
    """What W_dq makes of x goes through the operator."""

    def down(self, x: Tensor) -> Tensor:
        return scaled(super().down(x))


class Alone(Scaled):
    """A graph that calls the operator, and has nothing of a prologue."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)


@pytest.mark.parametrize(("model", "count"), [(Scaled, 6), (Alone, 1)])
def test_the_report_says_why_a_function_is_not_used(model: type[base.Base], count: int) -> None:
    """The log says so once; whoever reads the report has not seen it."""
    mf.register_operator(scaled, lambda x: x[..., :1])
    gm = traced_graph(model(), *base.paged_args()[:count])
    report = mf.explain(gm)
    assert not report.fused
    said = "a function is registered for it and cannot be used: it gives bfloat16[8, 1], not "
    assert said in str(report), str(report)


def test_a_function_that_calls_its_own_operator_is_no_end() -> None:
    mf.register_operator(scaled, lambda x: scaled(x) * 1.0)
    gm = traced_graph(Scaled(), *base.paged_args())
    report = mf.explain(gm)
    assert not report.fused and "cannot be used: it calls the operator itself" in str(report)
