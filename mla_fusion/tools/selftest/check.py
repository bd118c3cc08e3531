"""Compares an operator on the device with its reference, or a fused prologue with the same maths in
float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta, reference
from mla_fusion.compile.backend import backend
from mla_fusion.config import Config
from mla_fusion.examples.fuse_your_model import example
from mla_fusion.meta import spec
from mla_fusion.meta.prolog import CACHES
from mla_fusion.paging import layout
from mla_fusion.paging.tiles import unpack_rows
from mla_fusion.report.store import reports
from mla_fusion.tools.accuracy import distance, excess_error
from mla_fusion.tools.by_hand.memory import Tensors, has_same_bits
from mla_fusion.tools.selftest.compare import Comparison, compare
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.samples import DEEPSEEK_V3, Arguments, Call

_NZ = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")  # the weights in FRACTAL_NZ on an NPU
# the fused prologues by name, with options of Config
FUSED: dict[str, dict[str, Any]] = {
    "prologue in place": {},
    "prologue staged": {"staging": "always"},
}


@dataclass
class Result:
    """The result of one check. ``through`` is "eager" or "graph" for a call, or "fused"."""

    name: str
    through: str
    comparisons: list[Comparison] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check_other_rows(self, after: Tensor, before: Tensor) -> None:
        """Checks that the rows of a cache that belong to no token keep their bits."""
        problem = "cache rows that belong to no token have changed"
        if not has_same_bits(after, before) and problem not in self.problems:
            self.problems.append(problem)

    @property
    def failures(self) -> list[str]:
        """Returns a sentence for each failure."""
        different = [item for item in self.comparisons if item.problem]
        return self.problems + [f"{item.output}: {item.problem}" for item in different]

    def __str__(self) -> str:
        """Returns a line for the check, and a line for each failure."""
        worst = max(self.comparisons, key=attrgetter("off", "largest"), default=None)
        error = f": {worst.output} {worst.largest:.1g}, {worst.off:.2%} off" if worst else ""
        head = f"{'FAILED' if self.failures else 'ok':6} {self.name} ({self.through}){error}"
        return "\n       ".join([head, *self.failures])


def check_call(call: Call, device: Device, through: str) -> Result:
    """Calls operator and reference on equal arguments, and compares every output and both caches.

    An exception of the call becomes the result's problem: a refusal by the device is a finding.
    """
    result, arguments = Result(call.name, through), call.make()
    try:
        meta.check(
            call.op, soc=device.soc, cann=device.cann, path=through, values=True, **arguments
        )
        on_device = {
            name: device.place(value, name in _NZ) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        results = _by_name(call.results, _operator(call, through)(on_device))
        after = _by_name(call.caches, [on_device[name] for name in call.caches])
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    expected = copy.deepcopy(arguments)
    expected |= _by_name(call.results, getattr(reference, call.op)(**expected))
    for name, value in results.items():
        # an absent result has no element, or one without a meaning, by release
        if name not in call.caches and max(value.numel(), expected[name].numel()) > 1:
            result.comparisons.append(compare(name, value, expected[name]))
    for name in call.caches:
        if call.op.endswith("_functional"):
            if not has_same_bits(after[name], arguments[name]):
                result.problems.append(f"the functional operator has written its argument {name}")
            after[name] = results[name]
        if expected[name].numel():
            _compare_cache(result, name, arguments, after[name], expected[name])
    return result


def _operator(call: Call, through: str) -> Callable[[Arguments], Any]:
    """Returns the operator as a function of its arguments by name: the inputs of a graph, if the
    call goes through one.
    """

    def step(arguments: Arguments) -> Any:
        """Calls the operator."""
        return getattr(torch.ops.npu, call.op)(**arguments)

    return step if through == "eager" else _compiled(step)


def _compiled(step: Callable[..., Any], config: Config | None = None) -> Callable[..., Any]:
    """Returns a function compiled by the backend of mla_fusion."""
    torch.compiler.reset()
    return torch.compile(step, backend=backend(config), fullgraph=True, dynamic=False)


def _by_name(names: Iterable[str], values: Iterable[Tensor]) -> Tensors:
    """Returns copies on the CPU: a result may be a cache that is written again."""
    pairs = zip(names, values, strict=False)
    return {name: value.to("cpu", copy=True) for name, value in pairs}


def _compare_cache(
    result: Result, name: str, arguments: Arguments, after: Tensor, expected: Tensor
) -> None:
    """Compares the rows that the reference has written, and all other rows bit by bit.

    The caches are filled with noise before the call, so a row that is written changes.
    """
    caches = [arguments[name], after, expected]
    if arguments.get("cache_mode", "").endswith("NZ"):
        caches = list(map(layout.nz_to_nd, caches))
    before, after, expected = (cache.flatten(0, -2) for cache in caches)
    written = (before.view(torch.uint8) != expected.view(torch.uint8)).any(-1)
    pairs = {name: (after[written], expected[written])}
    if arguments.get("kv_cache_quant_mode") == 3:  # a row is latent, rope part and scales
        hckv, dr = (DEEPSEEK_V3[axis] for axis in ("Hckv", "Dr"))
        pieces = (unpack_rows(rows, hckv=hckv, dr=dr, tile=spec.TILE_SIZE) for rows in pairs[name])
        names = (f"{name}.{part}" for part in ("ckv", "kr", "scale"))
        pairs = dict(zip(names, zip(*pieces, strict=True), strict=True))
    result.comparisons += [compare(part, *pair) for part, pair in pairs.items()]
    result.check_other_rows(after[~written], before[~written])


def check_prologue(name: str, device: Device) -> Result:
    """Fuses the example's prologue, and compares outputs and written cache rows with a float64 run.

    The check passes if the errors are at most those of the unfused bfloat16 run, within chance, and
    the other rows keep their bits.
    """
    model, inputs = example()
    config = Config(soc=device.soc, cann=device.cann, **FUSED[name])
    result, on_device = Result(name, "fused"), [device.place(tensor) for tensor in inputs]
    try:
        compiled = _compiled(copy.deepcopy(model).to(device.kind), config)
        fused = _outputs_and_caches(compiled, on_device)
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    report, placement = reports()[-1], name.removeprefix("prologue ")
    if [fusion.placement.partition(":")[0] for fusion in report.fused] != [placement]:
        result.problems.append(f"not fused {placement}: {report}")
    unfused = _outputs_and_caches(model, [tensor.clone() for tensor in inputs])
    wide = [value.double() if value.is_floating_point() else value for value in inputs]
    exact = _outputs_and_caches(copy.deepcopy(model).double(), wide)
    slots = inputs[3]
    for output in fused:
        runs = [run[output] for run in (unfused, fused, exact)]
        if output in CACHES:
            runs = [run.reshape(-1, run.shape[-1]) for run in runs]
            is_other = torch.ones(len(runs[0]), dtype=torch.bool).index_fill(0, slots, False)
            result.check_other_rows(runs[0][is_other], runs[1][is_other])
            runs = [run[slots] for run in runs]
        result.comparisons.append(Comparison(output, distance(*runs[1:]), 0.0, excess_error(*runs)))
    return result


def _outputs_and_caches(step: Callable[..., Any], inputs: Sequence[Tensor]) -> Tensors:
    """Runs a step; returns its outputs and the caches, its last inputs, by name."""
    with torch.no_grad():
        outputs = step(*inputs)
    return _by_name(("query", "query_rope", *CACHES), (*outputs, *inputs[-2:]))
