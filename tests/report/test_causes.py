"""Messages name what is the case: the compiler, the cause, the operator, the line."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile import boundary
from tests.catalogue import prologues
from tests.catalogue.base import DR, HCKV, Base, paged_args
from tests.harness import graph_of, traced_graph


def of_a_block_major_pool() -> tuple[Tensor, ...]:
    """The caches of one layer, strided in their first axis."""
    x, cos, sin, kv, kr, slots = paged_args()
    pools = (torch.stack([cache, cache], 1) for cache in (kv, kr))
    return (x, cos, sin, *(pool[:, 0] for pool in pools), slots)


class ByBlockAndPlace(Base):
    """What is made of it is given out, not attended over."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        c, s = cos[:, None], sin[:, None]
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe[:, None], c, s)[:, 0])
        return self.absorb(q_nope), self.rotate(q_pe, c, s)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache[slots // 16, slots % 16] = c_kv[:, None]
        kr_cache[slots // 16, slots % 16] = k_pe[:, None]


@pytest.mark.parametrize("hook", [False, True])
def test_ge_copies_a_strided_cache_and_the_report_says_so(hook: bool) -> None:
    args = of_a_block_major_pool()
    report = mf.lower(ByBlockAndPlace(), *args, hook=hook).report
    assert report is not None
    (fusion,) = report.fused
    assert fusion.placement == "in place"
    assert len(fusion.warnings) == 2
    assert f"{2 * args[3].numel() * 2 // 1024}.0 KiB a step" in fusion.warnings[0]
    named = "arg" if hook else "kv_cache"  # a hook is not told how the model calls its inputs
    assert f"warning: {named}" in str(report) and "has strides" in fusion.warnings[0]
    assert "stored as halves" not in fusion.rope


def test_only_ge_copies_it() -> None:
    args = of_a_block_major_pool()
    lowered = mf.lower(ByBlockAndPlace(), *args, mode="npugraph_ex").report
    here = mf.explain(traced_graph(ByBlockAndPlace(), *args), boundary=True)
    contiguous = mf.lower(ByBlockAndPlace(), *paged_args()).report
    for report in (lowered, here, contiguous):
        assert report is not None
        assert [(one.placement, one.warnings) for one in report.fused] == [("in place", ())]


# -- unknown steps on both sides at once


@torch.library.custom_op("mla_fusion_tests::both_sides", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def exchanged(x: Tensor) -> Tensor:
    world = torch.distributed.GroupMember.WORLD
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x, "sum", str(world))
    )


@pytest.mark.parametrize(
    ("step", "named"),
    [(opaque, "both_sides"), (exchanged, "all_reduce")],
    ids=["own", "collective"],
)
def test_unknown_steps_on_both_sides_are_named(step: Any, named: str) -> None:
    class Both(ByBlockAndPlace):
        def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.split(self.q_b_proj(step(self.q_a_layernorm(self.q_a_proj(x)))))

        def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
            c_kv, k_pe = step(self.kv_a_proj_with_mqa(x)).split([HCKV, DR], -1)
            return self.kv_a_layernorm(c_kv), k_pe

    (left,) = mf.explain(traced_graph(Both(), *paged_args()), boundary=True).rejected
    assert left.code in ("norm.absent", "step.unknown") and named in left.message
    assert "mf.register_operator" in left.remedy


def test_an_operator_that_writes_its_arguments_is_named() -> None:
    class Hidden(ByBlockAndPlace):
        def write(
            self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
        ) -> None:
            writes(c_kv, kv_cache, slots)
            writes(k_pe, kr_cache, slots)

    (fusion,) = mf.explain(graph_of(Hidden(), *paged_args()), boundary=True).fused
    assert "mla_fusion_tests.into" in fusion.staged_by[0].message
    assert "auto_functionalized" not in str(fusion.staged_by)

    class Whole(nn.Module):
        def forward(self, x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
            writes(x, cache, slots)
            return x

    args = torch.randn(4, 8), torch.randn(64, 8), torch.arange(4)
    assert "does not know: mla_fusion_tests::into" in str(mf.explain(graph_of(Whole(), *args)))


@torch.library.custom_op("mla_fusion_tests::into", mutates_args=("cache",))
def writes(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    cache.view(-1, rows.shape[-1])[slots] = rows


# -- why a cache is not written in place, by cause


def staged_by(model: nn.Module, *args: Tensor, dynamic: bool = False) -> dict[str, str]:
    """What the last fusion of a compiled model says: messages and remedies by code."""
    torch._dynamo.reset()
    backend = mf.backend(mf.Config(verify="off"))
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic)(*args)
    found = mf.reports()[-1].fused[-1].staged_by
    return {one.code: f"{one.message}. {one.remedy}" for one in found}


class Twice(nn.Module):
    """Two layers, each with caches of its own, or both with the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ByBlockAndPlace(), ByBlockAndPlace()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> Any:
        *caches, slots = rest
        return self.first(x, cos, sin, *caches[:2], slots), self.second(
            x + 1, cos, sin, *caches[-2:], slots
        )


def test_arguments_that_overlap_in_memory() -> None:
    x, cos, sin, kv, kr, slots = paged_args()
    pools = [torch.stack([cache, cache], 1) for cache in (kv, kr)]
    layers = [pool[:, layer] for layer in (0, 1) for pool in pools]
    found = staged_by(Twice(), x, cos, sin, *layers, slots)
    assert found.keys() == {"cache.no_input"}  # the slots are no second reason
    assert "arguments that overlap in memory" in found["cache.no_input"]
    assert "layer-major" in found["cache.no_input"]
    apart = [pool[:, layer].contiguous() for layer in (0, 1) for pool in pools]
    assert staged_by(Twice(), x, cos, sin, *apart, slots) == {}


# -- what the compiler knows


@pytest.mark.parametrize("method", ["latent", "write"])  # of a write the prologue is staged
def test_a_graph_that_dynamo_broke(method: str) -> None:
    def broken(self: ByBlockAndPlace, *args: Tensor) -> Any:
        torch._dynamo.graph_break()
        return getattr(ByBlockAndPlace, method)(self, *args)

    torch._dynamo.reset()
    before = len(mf.reports())
    with torch.no_grad():
        broken_model = type("Broken", (ByBlockAndPlace,), {method: broken})()
        torch.compile(broken_model, backend="mla_fusion")(*paged_args())
        torch.compile(ByBlockAndPlace(), backend="mla_fusion")(*paged_args())
    *pieces, whole = mf.reports()[before:]
    assert len(pieces) == 3 and whole.notes == ()
    for report in pieces:
        assert "Dynamo broke the graph in pieces" in str(report) and "fullgraph=True" in str(report)
        assert "test_causes.py:" in str(report)


def test_weights_made_under_inference_mode(caplog: pytest.LogCaptureFixture) -> None:
    boundary.warn_once.cache_clear()  # it says so once in a process
    with torch.inference_mode():
        model = ByBlockAndPlace()
    torch._dynamo.reset()
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        torch.compile(model, backend="mla_fusion")(*paged_args())
    (note,) = mf.reports()[-1].notes
    assert "made under torch.inference_mode()" in note and "mla_fusion.refresh" in note
    assert note in caplog.text


def test_a_dropped_cache_operator(caplog: pytest.LogCaptureFixture) -> None:
    class Dropped(prologues.NpuOperators):
        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            cos, sin, kv_cache, kr_cache, slots = rest
            latent = self.kv_a_proj_with_mqa(x).view(len(x), 1, 1, HCKV + DR)
            c, s = (table.view(len(x), 1, 1, DR) for table in (cos, sin))
            gamma = self.kv_a_layernorm.weight
            torch.ops.npu.npu_kv_rmsnorm_rope_cache(
                latent, gamma, c, s, slots, kr_cache, kv_cache, cache_mode="PA"
            )
            return self.query(x)[0]

    torch._dynamo.reset()
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        torch.compile(Dropped(), backend="mla_fusion")(*paged_args())
    assert "AOT autograd drops the call" in caplog.text
    assert "AOT autograd drops the call" in str(mf.reports()[-1])
