"""``mla-fusion selftest``: the acceptance test to run on hardware.

For every scenario that the device supports, the operator against the reference, called by itself
and from a compiled graph; plain prologues compiled fused and unfused; what happens to the caches;
and times. On a machine without an NPU the CPU kernels stand in for the device, which tests
everything but the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from time import perf_counter

from mla_fusion.meta.preprocess import SOCS as PREPROCESS_SOCS
from mla_fusion.reference import chip
from mla_fusion.reference.sample import DEEPSEEK_V3
from mla_fusion.tools import installed
from mla_fusion.tools.selftest import fused, operator
from mla_fusion.tools.selftest.device import Device, NoDevice, choose
from mla_fusion.tools.selftest.result import Outcome, Result
from mla_fusion.tools.selftest.scenarios import (
    Scenario,
    key_scenarios,
    preprocess_scenarios,
    scenarios,
)
from mla_fusion.tools.selftest.unfused import FORMS

__all__ = ["NoDevice", "Options", "Outcome", "Result", "choose", "run"]


@dataclass(frozen=True)
class Options:
    """``only``: a pattern as of file names that a scenario's name must match. ``he``: the hidden
    size, by default DeepSeek-V3's on an NPU and the smallest legal one on the CPU. ``repeats``:
    calls timed per scenario.
    """

    only: str = "*"
    he: int | None = None
    heads: int | None = None
    repeats: int | None = None


def run(
    device: Device, options: Options | None = None, progress: Callable[[Result], None] | None = None
) -> Outcome:
    """Every check on ``device``, in order; nothing stops at a failure. ``progress`` sees each
    result.
    """
    started = perf_counter()
    results = []
    with chip(device.soc):
        for result in _results(device, options or Options()):
            results.append(result)
            if progress is not None:
                progress(result)
    return Outcome(device, installed.versions(), results, perf_counter() - started)


def _results(device: Device, options: Options) -> Iterator[Result]:
    on_npu = device.kind == "npu"
    he = options.he or (DEEPSEEK_V3["He"] if on_npu else None)
    heads = options.heads or (16 if on_npu else 4)
    repeats = options.repeats or (20 if on_npu else 1)
    planned = scenarios(device.soc, device.cann, he=he, heads=heads)
    others = *preprocess_scenarios(device.soc, heads), *key_scenarios(device.soc)
    eager, graph = [*planned, *others], _one_per_quantisation(planned)
    calls = [(call, "eager") for call in eager] + [(call, "graph") for call in graph]
    for call, through in calls:
        if fnmatch(call.name, f"*{options.only}*"):
            yield operator.run(call, device, through=through, repeats=repeats)
    dims, modes = planned[0].dims, {scenario.cache_mode for scenario in planned}
    formats = {scenario.weight_quant_mode for scenario in planned}
    for form in FORMS:
        # a whole is staged in these modes
        possible = form.in_place or modes & {"TND", "BSND"} or form.target == "key"
        if form.target == "preprocess":
            possible = device.soc in PREPROCESS_SOCS
        elif form.format is not None:
            possible = possible and form.format.full in formats
        if possible and fnmatch(form.name, f"*{options.only}*"):
            yield fused.run(form, device, dims, repeats=repeats)


def _one_per_quantisation(planned: Sequence[Scenario]) -> list[Scenario]:
    """In a graph the cache mode is one more string: the first scenario of every operator and pair
    of modes.
    """
    first: dict[object, Scenario] = {}
    for item in planned:
        first.setdefault((item.op, item.weight_quant_mode, item.kv_cache_quant_mode), item)
    return list(first.values())
