"""int8 prologues of plain operators: fused no less exact, and with one thing wrong never fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.compile.device_graph import capture
from tests.catalogue.foreign_int8 import (
    LINEARS,
    MODELS,
    WITH_INT8_CACHES,
    PlainFull,
    PlainLinear,
    PlainPartial,
    largest,
    many_tokens,
    model_of,
    one_token,
    to_int8,
)
from tests.catalogue.quantised import npu
from tests.catalogue.spellings import paged_args
from tests.harness import assert_as_exact, clones, distance, eager, flat

FLOAT8 = torch.float8_e4m3fn


def traced(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The functional graph and its first arguments, the parameters; cheaper than torch.compile."""
    weights = dict(model.named_parameters())

    def call(values: list[Tensor], *args: Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(weights, values, strict=True)), args)

    functional = torch.func.functionalize(call, remove="mutations")
    with torch.no_grad():
        return make_fx(functional, tracing_mode="fake")(list(weights.values()), *given), list(weights.values())


def fused(model: nn.Module, given: tuple[Tensor, ...], mode: int) -> list[Tensor]:
    """Outputs and arguments of the graph in which the prologue has become one kernel of ``weight_quant_mode`` mode."""
    gm, weights = traced(model, given)
    report = mf.fuse(gm, mf.Config(verify="off"))
    assert [(f.placement, f.attributes["weight_quant_mode"]) for f in report.fused] == [("in place", mode)], str(report)
    given = clones(given)
    with torch.no_grad():
        return [*flat(gm(weights, *given)), *given]


@lru_cache
def exact() -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Arguments, and what PlainFull makes of them in float64 and in int8: all of LINEARS hold the same numbers."""
    torch.manual_seed(0)
    model, given = PlainFull(), paged_args()
    unfused = eager(model, clones(given))
    return given, eager(model.double(), clones(given, wide=True)), unfused


@pytest.mark.parametrize("name", LINEARS)
def test_fuses_as_exactly(name: str) -> None:
    given, want, unfused = exact()
    torch.manual_seed(0)
    got = fused(model_of(PlainFull, LINEARS[name]), given, 2)
    for index, value in enumerate(want):
        if value.is_floating_point():
            assert distance(got[index], value) <= 1.2 * distance(unfused[index], value) + 1e-12, index


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    model, mode = MODELS[name]
    module, given = model(), paged_args()
    assert_as_exact(module, given, fused(module, given, mode), slack=1.1)


@pytest.mark.parametrize("name", WITH_INT8_CACHES)
def test_int8_caches(name: str) -> None:
    torch.manual_seed(0)
    model, args, mode = WITH_INT8_CACHES[name]
    gm, _ = traced(model(), args())
    (fusion,) = mf.fuse(gm).fused
    assert (fusion.placement, fusion.attributes["kv_cache_quant_mode"]) == ("in place", mode)


@pytest.mark.parametrize("args", [one_token, many_tokens])
def test_other_numbers_of_tokens(args: Callable[[], tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    module, given = model_of(PlainFull, LINEARS["by_norm"]), args()
    assert_as_exact(module, given, fused(module, given, 2), slack=1.1)


@pytest.mark.parametrize(("device", "dynamic"), [("cpu", True), ("npu", False)])
def test_other_graphs(device: str, dynamic: bool) -> None:
    model = model_of(PlainFull, LINEARS["by_reciprocal"])
    with torch._dynamo.config.patch(specialize_float=True):
        gm, _ = capture(model, *paged_args(), device=device, dynamic=dynamic)
    report = mf.fuse(gm)
    assert [f.attributes["weight_quant_mode"] for f in report.fused] == [2], str(report)


# -- one thing wrong


def over(scale: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Rows divided by another scale, which the product is multiplied by."""
    return {"quantise": lambda self, x: (to_int8(x.float() / scale(x.float())), scale(x.float()))}


def of_steps(values: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Other int8 values of rows brought to steps; the scale is right."""
    unit = lambda x: largest(x) / 127  # noqa: E731
    return {"quantise": lambda self, x: (values(x.float() / unit(x.float())).to(torch.int8), unit(x.float()))}


def scaled_by(scale: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The right values, and another token scale, made from c_q."""
    return {"quantise": lambda self, x: (to_int8(x.float() * 127 / largest(x.float())), scale(x.float()))}


def product(multiply: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    return {"multiply": lambda self, values, matrix: multiply(values, matrix)}


def back(bring_back: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Of the sums, the token scale and the scales of the columns."""
    return {"bring_back": lambda self, sums, scale: bring_back(sums.float(), scale, self.scale).bfloat16()}


def per_group(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, 128))
    return to_int8(groups / (largest(groups) / 127)).flatten(-2), largest(x.float()) / 127


MISSES: dict[str, dict[str, Any]] = {
    # another maximum
    "128 steps": over(lambda v: largest(v) / 128),
    "whole tensor": over(lambda v: (v.abs().max() / 127).expand(v.shape[0], 1)),
    "no abs": over(lambda v: v.amax(-1, keepdim=True) / 127),
    "half of the row": over(lambda v: largest(v[:, : v.shape[1] // 2]) / 127),
    "all but the last": over(lambda v: largest(v[:, :-1]) / 127),
    "every other": over(lambda v: largest(v[:, ::2]) / 127),
    "outliers clipped": over(lambda v: torch.minimum(largest(v), 6 * v.std(-1, keepdim=True)) / 127),
    "high floor": over(lambda v: largest(v).clamp(min=5.0) / 127),
    "floor of another row": over(lambda v: torch.maximum(largest(v), 0.05 * v.abs().max()) / 127),
    "in groups": {"quantise": per_group},
    # other values
    "truncated": of_steps(lambda v: v),
    "zero point": of_steps(lambda v: (v.round() + 1).clamp(-128, 127)),
    "clamped at 126": of_steps(lambda v: v.round().clamp(-126, 126)),
    "columns moved": of_steps(lambda v: v.round().roll(1, -1)),
    "rows moved": of_steps(lambda v: v.round().roll(1, 0)),
    "noise": of_steps(lambda v: (v + torch.rand_like(v) - 0.5).round().clamp(-128, 127)),
    "through float8": of_steps(lambda v: v.to(FLOAT8).float().round()),
    # another token scale
    "of the next row": scaled_by(lambda v: largest(v).roll(1, 0) / 127),
    "of another tensor": scaled_by(lambda v: largest(v * v) / 127),
    "in float8": scaled_by(lambda v: (largest(v) / 127).to(FLOAT8).float()),
    "in float16": scaled_by(lambda v: (largest(v) / 127).half().float()),
    # another product
    "in int8": product(lambda x, w: x @ w),
    "weight as uint8": product(lambda x, w: x.float() @ w.to(torch.uint8).float()),
    "weight in float8": product(lambda x, w: x.float() @ w.float().to(FLOAT8).float()),
    "with a bias": product(lambda x, w: torch.addmm(torch.ones(w.shape[1]), x.float(), w.float())),
    "rescaled to int8": product(
        lambda x, w: npu.npu_quant_matmul(x, w, torch.ones(w.shape[1]), output_dtype=torch.int8)
    ),
    # another way back
    "bias": back(lambda a, s, w: a * s * w + 0.5),
    "sums added to": back(lambda a, s, w: (a + 3000) * s * w),
    "token scale twice": back(lambda a, s, w: a * s * w * s * 50),
    "no token scale": back(lambda a, s, w: a * w * 0.01),
    "scales added": back(lambda a, s, w: a * (s + w)),
    "scales in float8": back(lambda a, s, w: a * (s * w).to(FLOAT8).float()),
    "over 127 again": back(lambda a, s, w: a * s * w / 127),
}


def outcome(model: nn.Module, given: tuple[Tensor, ...]) -> list[str]:
    gm, _ = traced(model, given)
    before = str(gm.graph)
    report = mf.fuse(gm, mf.Config(verify="off"))
    assert report.fused == [] and str(gm.graph) == before, str(report)
    return [rejection.code for rejection in report.rejected]


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_is_refused(name: str) -> None:
    linear = type("Missing", (PlainLinear,), MISSES[name])
    assert outcome(model_of(PlainPartial, linear), paged_args()) == ["quant.dynamic"]


@pytest.mark.parametrize("name", ["no abs", "all but the last", "high floor"])
def test_a_miss_of_one_row_is_refused(name: str) -> None:
    linear = type("Missing", (PlainLinear,), MISSES[name])
    assert outcome(model_of(PlainPartial, linear), one_token()) == ["quant.dynamic"]


def test_float16_is_refused() -> None:
    linear = type("Missing", (PlainLinear,), back(lambda a, s, w: (a * s * w).half()))
    assert outcome(model_of(PlainFull, linear), paged_args()) == ["dtype.region"]


def test_values_that_are_moved_are_not_looked_through() -> None:
    linear = type("Missing", (PlainLinear,), product(lambda x, w: (x.int() - 1) @ w.int()))
    assert outcome(model_of(PlainPartial, linear), paged_args())


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda c_q: c_q * 2,
    "its maximum": lambda c_q: c_q.abs().amax(-1),
    "its steps": lambda c_q: (c_q.float() / (largest(c_q.float()) / 127)).round(),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_not_given_out_may_not_be_read(name: str) -> None:
    class Model(PlainFull):
        def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
            return READERS[name](c_q)

    assert outcome(Model(), paged_args()) == ["reader.latent"]


@pytest.mark.portable
def test_scales_and_weights_may_be_computed() -> None:
    """By whatever: the kernel is handed the results. (Without VNNI, torch._int_mm itself saturates its sums.)"""

    def computed(multiply: Callable[[Tensor, Tensor], Tensor]) -> Any:
        torch.manual_seed(0)
        methods = product(lambda x, w: multiply(x, w.flip(0)))
        methods["bring_back"] = lambda self, sums, scale: (sums.float() * scale * self.scale.roll(1)).bfloat16()
        return model_of(PlainFull, type("Computed", (PlainLinear,), methods))

    model, exactly = computed(torch._int_mm), computed(lambda x, w: (x.long() @ w.long()).int())
    given = paged_args()
    unfused = eager(exactly, clones(given))
    assert distance(fused(model, given, 2)[0], unfused[0]) < 2e-2
