"""A plain prologue compiled with and without the pass, both against the same maths in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fusion.commit.interpreter import widened
from mla_fusion.compile.backend import backend
from mla_fusion.config import Config
from mla_fusion.report.store import reports
from mla_fusion.tools.accuracy import error_ratio
from mla_fusion.tools.by_hand.memory import Tensors, same_bits
from mla_fusion.tools.selftest.compare import Comparison
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.result import Result
from mla_fusion.tools.selftest.unfused import Dims, Form, Prologue, arguments


def run(form: Form, device: Device, dims: Dims, *, repeats: int = 3) -> Result:
    """Fuse one prologue, and compare outputs and written cache rows with a float64 run on the CPU.

    Passed where the fused graph's relative L2 errors are at most ``largest_ratio`` times the
    unfused graph's, all other cache rows keep their bits, and the caches are still the caller's
    memory. What a compilation raises is the result's problem.
    """
    model, given = Prologue(form, form.dims(dims)), arguments(form, form.dims(dims))
    exact_arguments = list(map(widened, given))
    exact = _values(given, copy.deepcopy(model).double()(*exact_arguments), exact_arguments)
    try:
        (before, unfused), (after, result) = (
            _measure(model, given, device, enable, repeats) for enable in (False, True)
        )
    except Exception as error:
        return Result(form.name, "fused", problems=[f"{type(error).__name__}: {error}"])
    result.unfused_milliseconds = unfused.milliseconds
    result.others_untouched &= unfused.others_untouched
    result.problems += _what_the_pass_did(form)
    for name, value in exact.items():
        ratio, problem = error_ratio(before[name], after[name], value)
        comparison = Comparison(name, "error ratio", tuple(value.shape), ratio, 0.0, problem)
        result.comparisons.append(comparison)
    return result


def _measure(
    model: Prologue, given: tuple[Tensor, ...], device: Device, enable: bool, repeats: int
) -> tuple[Tensors, Result]:
    """Compile with the pass on or off, and call once for the values, then for the time. The result
    compares no values yet.
    """
    config = Config(
        enable=enable, soc=device.soc, cann=device.cann, targets=("v3", "preprocess", "key")
    )
    placed = [device.place(tensor) for tensor in given]
    before = [cache.data_ptr() for cache in placed[-2:]]
    torch.compiler.reset()
    on_device = copy.deepcopy(model).to(device.kind)
    mode = model.form.mode if device.kind == "npu" else None
    compiled = torch.compile(
        on_device, backend=backend(config), fullgraph=True, dynamic=False, mode=mode
    )
    result = Result(model.form.name, "fused")
    with torch.no_grad():
        outputs = [output.cpu() for output in compiled(*placed)]
        home = [tensor.to("cpu", copy=True) for tensor in placed]  # timing writes the caches again
        result.milliseconds = device.milliseconds(lambda: compiled(*placed), repeats)
    if [cache.data_ptr() for cache in placed[-2:]] != before:
        result.problems.append("a cache is another tensor after the call")
    slots, caches = given[3], zip(given[-2:], home[-2:], strict=True)
    others = [[_split_rows(cache, slots)[1] for cache in pair] for pair in caches]
    result.others_untouched = all(same_bits(*pair) for pair in others)
    return _values(given, outputs, home), result


def _values(given: tuple[Tensor, ...], outputs: Any, after: Sequence[Tensor]) -> Tensors:
    """Outputs and the written rows of both caches, by name."""
    rows = (_split_rows(cache, given[3])[0] for cache in after[-2:])
    named = dict(zip(("query", "query_rope", "query_norm"), outputs, strict=False))
    return named | dict(zip(("kv_cache", "kr_cache"), rows, strict=True))


def _split_rows(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are written, in the order of the slots, and all others."""
    rows = cache.reshape(-1, cache.shape[-1])
    others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, slots, False)
    return rows[slots], rows[others]


def _what_the_pass_did(form: Form) -> list[str]:
    report = reports()[-1]
    if len(report.fused) != 1:
        reasons = (
            "; ".join(f"[{item.code}] {item.message}" for item in report.rejected)
            or "no prologue was found"
        )
        return [f"not fused: {reasons}"]
    placement, target = report.fused[0].placement, report.fused[0].target
    if target != form.target:
        return [f"fused by target {target}, expected {form.target}: {report.fused[0].instead_of}"]
    if (placement == "in place") != form.in_place:
        return [f"fused {placement}, expected {'in place' if form.in_place else 'staged'}"]
    return []
