"""The plan's refusals beside the catalogue's near misses: each code, the graph just as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue import base, prologues, rotations
from tests.harness import clones, graph_of, refused, traced_graph


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_model_dtype(dtype: torch.dtype) -> None:
    model = prologues.PagedRotateHalf().to(dtype)
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in base.paged_args())
    rejection = refused(traced_graph(model, *args))
    assert rejection.code in ("dtype.region", "norm.gamma_dtype")
    assert str(dtype).removeprefix("torch.") in rejection.message


def test_runtime_epsilon() -> None:
    gm, _ = capture(prologues.PagedRotateHalf(), *base.paged_args(), device="cpu", dynamic=True)
    assert refused(gm).code == "norm.runtime_eps"


def test_staging_forbidden() -> None:
    gm = traced_graph(prologues.ComplexDense(), *prologues.dense_args())
    rejection = refused(gm, mf.Config(staging="never"))
    assert rejection.code == "cache.staging_forbidden"


class ManyHeads(rotations.GptjStack):
    """Without a product with W_uk: the kernel's own, with 16 MB of ones and zeros, costs more than
    the launches that a staged call saves.
    """

    def __init__(self, heads: int = 128) -> None:
        super().__init__(heads)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        return q_nope

    def forward(self, *args: torch.Tensor) -> Any:
        x, cos, sin, kv_cache, kr_cache, slots = args
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        c, s = cos[:, None], sin[:, None]
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe[:, None], c, s)[:, 0])
        return q_nope, self.rotate(q_pe, c, s)


def test_staging_that_gains_nothing() -> None:
    gm = traced_graph(ManyHeads(), *base.paged_args())
    identity = {"targets": ("v3", "identity"), "verify": "off"}
    rejection = refused(gm, mf.Config(**identity))
    assert rejection.code == "staging.gains_nothing"
    assert "a call takes 4 us more; not in place: [rope.pairs]" in rejection.message
    (fusion,) = mf.fuse(gm, mf.Config(staging="always", **identity)).fused
    assert fusion.staged_by and fusion.saves == "up to 0 us less a call"


def test_a_report_says_what_a_fusion_saves() -> None:
    """The model's own five cache writes are kernels before and after."""
    gm = traced_graph(prologues.ComplexDense(), *prologues.dense_args())
    dense = mf.explain(gm, boundary=True)
    paged = mf.explain(traced_graph(base.Base(), *base.paged_args()))
    assert "operators become 11, up to 11 us less a call;" in str(dense)
    assert "operators become 1, up to 32 us less a call;" in str(paged)


class SomeHeads(base.Prologue):
    """The first heads of a larger weight: how many, a number says."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Any:
        kv_cache, kr_cache, slots, heads = rest
        q = (
            self.q_a_layernorm(self.q_a_proj(x))
            @ self.q_b_proj.weight[: heads * (base.D + base.DR)].T
        )
        q_nope, q_pe = q.view(-1, heads, base.D + base.DR).split([base.D, base.DR], -1)
        c_kv, k_pe = self.latent(x)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            x = base.hf_interleave(x)
            return x * cos.unsqueeze(1) + base.rotate_half(x) * sin.unsqueeze(1)

        query = torch.einsum("tnd,ndc->tnc", q_nope, self.w_uk()[:heads])
        kv_cache.view(-1, base.HCKV)[slots] = c_kv
        kr_cache.view(-1, base.DR)[slots] = rotate(k_pe.unsqueeze(1)).squeeze(1)
        return query, rotate(q_pe)


@pytest.mark.exhaustive
def test_a_symbolic_number_of_heads() -> None:
    model, args = SomeHeads(4), base.paged_args()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        for heads in (2, 3):
            given = clones(args)
            torch.testing.assert_close(
                run(*given, heads), model(*clones(args), heads), rtol=2e-2, atol=2e-2
            )
    assert [item.code for report in mf.reports() for item in report.rejected] == ["linear.symbolic"]


def test_weights_of_symbolic_sizes() -> None:
    model = prologues.PagedRotateHalf().requires_grad_(False)
    run = torch.func.functionalize(partial(torch.func.functional_call, model))
    gm = make_fx(run, tracing_mode="symbolic")(dict(model.named_parameters()), base.paged_args())
    assert refused(gm).code == "linear.symbolic"


class SlotsLowered(base.Base):
    def slots(self, slots: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return slots - 1


def test_slots_may_be_negative() -> None:
    gm = graph_of(SlotsLowered(), *base.paged_args())
    assert refused(gm, mf.Config(staging="never")).code == "slots.unproven"
    (fusion,) = mf.explain(gm).fused
    assert fusion.placement.startswith("staged: the slots, made of slots, are not shown to be")


def test_operator_cache_mode() -> None:
    gm = traced_graph(prologues.NpuOperators(), *base.paged_args())
    for node in gm.graph.nodes:
        if "kv_rmsnorm_rope_cache" in str(node.target):
            node.kwargs = {**node.kwargs, "cache_mode": "Norm"}
    rejection = refused(gm)
    assert rejection.code == "reader.latent" and "[cache.writer] npu_kv" in rejection.message


def test_operator_with_fewer_slots_than_tokens() -> None:
    *args, slots = base.paged_args(8)
    rejection = refused(traced_graph(prologues.NpuOperators(), *args, slots[:4]))
    assert rejection.code == "reader.latent" and "4 slots for tokens [8]" in rejection.message
