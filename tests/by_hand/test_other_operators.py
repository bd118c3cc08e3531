"""ATB's MlaPreprocess and the operator for the key alone, with one thing wrong beside the right
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.reference.sample import sample_call
from mla_fusion.reference.sample_preprocess import SMALL, sample_preprocess
from tests.by_hand.test_audit import named

Fault = Callable[[dict[str, Any]], dict[str, Any]]


class Calls(nn.Module):
    """An operator on tensors by name, its other arguments fixed."""

    def __init__(
        self, operator: Callable[..., Any], call: dict[str, Any], fault: Fault | None = None
    ) -> None:
        super().__init__()
        self.operator, self.fault = operator, fault
        self.names = [name for name, value in call.items() if isinstance(value, Tensor)]
        self.options = {name: value for name, value in call.items() if name not in self.names}

    def forward(self, *tensors: Tensor) -> Any:
        arguments = dict(zip(self.names, tensors, strict=True)) | self.options
        return tuple(self.operator(**(self.fault(arguments) if self.fault else arguments)))


def audited(operator: Callable[..., Any], call: dict[str, Any], fault: Fault | None) -> mf.Audit:
    right = Calls(operator, call)
    return mf.audit(Calls(operator, call, fault), right, *(call[name] for name in right.names))


def swapped(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "cos": arguments["sin"], "sin": arguments["cos"]}


def query_first(arguments: dict[str, Any]) -> dict[str, Any]:
    """[q | kv], and so the scales."""
    turned = {
        name: torch.cat([arguments[name][576:], arguments[name][:576]])
        for name in ("wdqkv", "descale0")
    }
    return arguments | turned


def on(name: str, function: Callable[[Tensor], Tensor]) -> Fault:
    return lambda arguments: {**arguments, name: function(arguments[name])}


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (None, set()),
        (swapped, {("tables.swapped", "cos, sin")}),
        (query_first, {("columns.query_first", "wdqkv")}),
        (on("slotmapping", lambda v: v.roll(1, 0)), {("slots.rolled", "slotmapping")}),
        (on("descale1", torch.reciprocal), {("scale.inverted", "descale1")}),
        (on("gamma1", lambda gamma: gamma - 1), {("gamma.offset", "gamma1")}),
    ],
)
def test_preprocess(fault: Fault | None, found: set[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    call = sample_preprocess(dims=SMALL | {"C": 512, "R": 64})
    audit = audited(torch.ops.atb.npu_mla_preprocess, call, fault)
    assert named(audit) == found, str(audit)
    assert audit.equal is (not found)


def test_preprocess_writes_caches_of_its_own() -> None:
    """Only the overload ``out`` writes the caller's."""
    torch.manual_seed(0)
    call = sample_preprocess(dims=SMALL | {"C": 512, "R": 64})
    atb = torch.ops.atb.npu_mla_preprocess
    outs = {"kv_cache_out0": "kv_cache", "kv_cache_out1": "kv_cache_rope"}

    def out(**given: Any) -> Any:
        caches = {name: given[cache] for name, cache in outs.items()}
        wide = {"q_out0": 512, "q_out1": 64}
        queries = {name: given["input"].new_empty(5, 2, width) for name, width in wide.items()}
        return atb.out(**given, **queries, **caches)

    right = Calls(out, call)
    audit = mf.audit(Calls(atb, call), right, *(call[name] for name in right.names))
    assert {code for code, _ in named(audit)} == {"cache.not_written"}, str(audit)


@pytest.mark.parametrize(
    ("modes", "fault", "found"),
    [
        ((2, 1), None, set()),
        ((2, 1), on("quant_scale_ckv", torch.reciprocal), {("scale.inverted", "quant_scale_ckv")}),
        ((1, 3), None, set()),
        ((1, 3), on("cache_index", lambda v: v.roll(1, 0)), {("slots.rolled", "cache_index")}),
        (
            (2, 3),
            on("rmsnorm_gamma_ckv", lambda gamma: gamma - 1),
            {("gamma.offset", "rmsnorm_gamma_ckv")},
        ),
    ],
)
def test_int8_caches(
    modes: tuple[int, int], fault: Fault | None, found: set[tuple[str, str]]
) -> None:
    """One step for all numbers, and one for each tile of a row of bytes."""
    dims = dict(He=1024, Hcq=1536, N=2, D=128, Dr=64, Hckv=512, BlockNum=4, BlockSize=16, Nkv=1)
    call = sample_call(
        weight_quant_mode=modes[0], kv_cache_quant_mode=modes[1], dims=dims, lead=(8,)
    )
    audit = audited(torch.ops.npu.npu_mla_prolog_v3, call, fault)
    assert named(audit) == found, str(audit)
    assert audit.equal is (not found)


def key_call() -> dict[str, Any]:
    tokens, rows = 8, 64
    caches = {
        "k_cache": torch.randn(4, 16, 1, 64).bfloat16(),
        "ckv_cache": torch.randn(4, 16, 1, 512).bfloat16(),
    }
    tables = {name: torch.randn(tokens, 1, 1, 64).bfloat16() for name in ("cos", "sin")}
    latent = {
        "kv": torch.randn(tokens, 1, 1, 576).bfloat16(),
        "gamma": (1 + torch.rand(512)).bfloat16(),
    }
    return {
        **latent,
        **tables,
        "index": torch.randperm(rows - 40)[:tokens] + 20,
        **caches,
        "epsilon": 1e-6,
        "cache_mode": "PA_BNSD",
    }


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (None, set()),
        (swapped, {("tables.swapped", "cos, sin")}),
        (on("index", lambda v: v + 16), {("slots.off", "index")}),
        (on("gamma", lambda gamma: gamma - 1), {("gamma.offset", "gamma")}),
        (lambda arguments: arguments | {"cache_mode": "PA_NZ"}, {("cache_mode", "cache_mode")}),
    ],
)
def test_key_operator(fault: Fault | None, found: set[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    audit = audited(torch.ops.npu.npu_kv_rmsnorm_rope_cache, key_call(), fault)
    assert named(audit) == found, str(audit)
