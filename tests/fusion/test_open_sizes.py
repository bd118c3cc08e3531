"""Sizes that the graph leaves open, and the operator takes for some of their values only.

A graph that serves several sizes never calls the kernel with one that its contract refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from mla_fusion.compile.device_graph import capture
from tests.catalogue.base import DR, HCKV, HCQ, Base, HfNorm, paged_args
from tests.soundness.compare import differs


class Checked(TorchDispatchMode):
    """Each call of the prologue has to be one that its contract takes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "npu_mla_prolog_v3" in func._schema.name:
            names = [one.name for one in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            for name in names:  # a CPU reads weights as the model holds them
                if name.startswith("weight_") and isinstance(given.get(name), Tensor):
                    given[name] = given[name].contiguous()
            mf.meta.check("npu_mla_prolog_v3_functional", path="graph", **given)
        return func(*args, **(kwargs or {}))


def _compiled(model: Base) -> Any:
    def checked(gm: GraphModule, inputs: list[Any]) -> Any:
        run = mf.backend()(gm, inputs)

        def call(*args: Any) -> Any:
            with Checked():
                return run(*args)

        return call

    return torch.compile(model, backend=checked, dynamic=True)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _model() -> Base:
    torch.manual_seed(0)
    return Base().requires_grad_(False)


def _args(tokens: int, block_size: int, blocks: int = 0) -> list[Tensor]:
    blocks = blocks or -(-tokens // block_size) + 1
    args = list(paged_args(tokens))
    args[3] = torch.randn(blocks, block_size, 1, HCKV).bfloat16()
    args[4] = torch.randn(blocks, block_size, 1, DR).bfloat16()
    args[5] = torch.randperm(blocks * block_size)[:tokens]
    return args


def _run_beside(model: Base, compiled: Any, args: list[Tensor]) -> None:
    """One call of both; all that they give and write is the same."""
    own = [arg.clone() for arg in args]
    with torch.no_grad():
        got, want = compiled(*args)[0], model(*own)[0]
    assert not differs((got, *args[3:5]), (want, *own[3:5]))


TAKEN, REFUSED = (16, 32, 1024), (8, 17, 24, 2048)


@pytest.mark.parametrize("first", [16, pytest.param(24, marks=pytest.mark.exhaustive)])
def test_block_sizes(first: int) -> None:
    model = _model()
    compiled = _compiled(model)
    before = len(mf.reports())
    for tokens, size in enumerate((first, *REFUSED, *TAKEN, first), start=5):
        _run_beside(model, compiled, _args(tokens, size))
    placements = [report.fused[0].placement.partition(":")[0] for report in mf.reports()[before:]]
    wanted = ["in place", "staged"]  # a graph for all sizes that the kernel takes, and one
    assert placements == (wanted if first in TAKEN else wanted[::-1])


def test_without_a_compiler_that_guards_it_is_assumed() -> None:
    args = _args(5, 16)
    for place in (3, 4):
        torch._dynamo.mark_dynamic(args[place], 1)
    gm, _ = capture(_model(), *args, device="cpu")
    (fusion,) = mf.explain(gm).fused
    assert fusion.placement == "in place"
    (line,) = [line for line in fusion.assumptions if "BlockSize" in line]
    assert "16..1024, a multiple of 16" in line


def test_traced_with_a_size_that_the_kernel_refuses() -> None:
    args = _args(5, 24)
    for place in (3, 4):
        torch._dynamo.mark_dynamic(args[place], 1)
    gm, _ = capture(_model(), *args, device="cpu")
    (fusion,) = mf.explain(gm).fused
    assert fusion.placement.startswith("staged") and "found BlockSize 24" in fusion.placement


class _AsMany(Base):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *more: Tensor) -> Any:
        for other in (cos, sin, more[-1]):
            torch._check(other.shape[0] == x.shape[0])
        return super().forward(x, cos, sin, *more)


def test_tokens_that_may_be_none() -> None:
    model, args = _AsMany().requires_grad_(False), _args(5, 16)
    for place in (0, 1, 2, 5):
        torch._dynamo.decorators.mark_unbacked(args[place], 0)
    _run_beside(model, torch.compile(model, backend="mla_fusion"), args)
    (fusion,) = mf.reports()[-1].fused
    assert any("is at least 1" in line for line in fusion.assumptions), fusion.assumptions


def _sequences(batch: int, length: int, axes: tuple[int, ...]) -> list[Tensor]:
    """Arguments of sequences, with these axes of x open."""
    x, cos, sin, *_ = paged_args(batch * length)
    args = [x.view(batch, length, -1), cos[:length], sin[:length]]
    for part, axis in (*((args[0], axis) for axis in axes), (args[1], 0), (args[2], 0)):
        torch._dynamo.mark_dynamic(part, axis)
    return [*args, *(torch.zeros(8, 64, width).bfloat16() for width in (HCKV, DR))]


@pytest.mark.parametrize("axes", [(1,), (0, 1)])
def test_the_first_sequences_from_their_start(axes: tuple[int, ...]) -> None:
    model = OfSequences().requires_grad_(False)
    compiled = torch.compile(model, backend="mla_fusion")
    for batch, length in (3, 2), (3, 4) if axes == (1,) else (2, 6):
        _run_beside(model, compiled, _sequences(batch, length, axes))
    assert [item.placement for item in mf.reports()[-1].fused] == ["in place"]


class OfSequences(Base):
    """Rows of some sequences, from a position on, in caches of a fixed size."""

    def forward(self, x, cos, sin, kv_cache, kr_cache, start=0):  # type: ignore[no-untyped-def,override]
        batch, length, _ = x.shape
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        kv_cache[:batch, start : start + length] = c_kv
        kr_cache[:batch, start : start + length] = self.rotate(k_pe, cos, sin)
        query = torch.einsum("bsnd,ndc->bsnc", q_nope, self.w_uk())
        return query, self.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))


class _ByLength(HfNorm):
    def forward(self, h: Tensor) -> Tensor:
        return h / (h.norm(dim=-1, keepdim=True) + 1e-6) * h.shape[-1] ** 0.5 * self.weight


def test_a_norm_by_the_length_of_rows_of_two_symbols() -> None:
    model = OfSequences().requires_grad_(False)
    model.q_a_layernorm = _ByLength(HCQ).requires_grad_(False)
    gm, _ = capture(model, *_sequences(3, 2, (0, 1)), device="cpu")
    (rejection,) = mf.explain(gm).rejected  # its epsilon is looked for without a row a token
    assert rejection.code == "norm.absent"


def test_some_sequences_from_a_position_on() -> None:
    model = OfSequences()
    x, cos, sin, *_ = paged_args(6)
    caches = torch.zeros(8, 64, HCKV).bfloat16(), torch.zeros(8, 64, DR).bfloat16()
    model.register_buffer("kv_cache", caches[0])
    model.register_buffer("kr_cache", caches[1])

    def run(x: Tensor, cos: Tensor, sin: Tensor, start: int) -> Any:
        return model(x, cos, sin, model.kv_cache, model.kr_cache, start)

    step = torch.compile(run, backend=mf.backend(), dynamic=True)
    with torch.no_grad():
        step(x.view(3, 2, -1), cos[:2], sin[:2], 7)
        assert [item.placement for item in mf.reports()[-1].fused] == ["in place"]
        for start, batch, length in ((11, 2, 3), (0, 6, 1)):
            args = x.view(batch, length, -1), cos[:length], sin[:length], start
            expected = run(*args)
            rows = model.kv_cache.clone()
            model.kv_cache.copy_(caches[0])
            assert not differs(expected, step(*args)) and not differs(rows, model.kv_cache)
