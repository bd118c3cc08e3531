"""One check: an operator on the device against its reference, or a fused prologue against the same
maths in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.compile.backend import backend
from mla_fusion.config import Config
from mla_fusion.examples.fuse_your_model import example
from mla_fusion.meta import spec
from mla_fusion.meta.prolog import CACHES
from mla_fusion.paging import layout
from mla_fusion.paging.tiles import unpack_rows
from mla_fusion.reference import kernels
from mla_fusion.report.store import reports
from mla_fusion.tools.accuracy import distance, error_ratio
from mla_fusion.tools.by_hand.memory import Tensors, same_bits
from mla_fusion.tools.selftest.compare import Comparison, compare
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.samples import DEEPSEEK_V3, Arguments, Call

_CHANGED = "cache rows that belong to no token have changed"
FUSED: dict[str, dict[str, Any]] = {  # prologues by name: options of Config
    "prologue in place": {},
    "prologue staged": {"staging": "always"},
}


@dataclass
class Result:
    """``through``: "eager" or "graph" (the operator called), or "fused"."""

    name: str
    through: str
    comparisons: list[Comparison] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check_others(self, after: Tensor, before: Tensor) -> None:
        """The rows of a cache that belong to no token keep their bits."""
        if not same_bits(after, before) and _CHANGED not in self.problems:
            self.problems.append(_CHANGED)

    @property
    def failures(self) -> list[str]:
        """One sentence for each thing that is wrong; empty where it passed."""
        wrong = [f"{one.output}: {one.problem}" for one in self.comparisons if one.problem]
        return self.problems + wrong

    def __str__(self) -> str:
        """One line, and one more for each failure."""
        worst = max(self.comparisons, key=lambda one: (one.off, one.largest), default=None)
        error = f": {worst.output} {worst.largest:.1g}, {worst.off:.2%} off" if worst else ""
        head = f"{'FAILED' if self.failures else 'ok':6} {self.name} ({self.through}){error}"
        return "\n".join([head, *(f"       {text}" for text in self.failures)])


def check_call(call: Call, device: Device, through: str) -> Result:
    """Calls operator and reference on equal arguments, and compares every output, both caches and
    the rows that belong to nobody.

    What the call raises becomes the result's problem: a refusal by the device is a finding.
    """
    result, arguments = Result(call.name, through), call.make()
    try:
        meta.check(
            call.op, soc=device.soc, cann=device.cann, path=through, values=True, **arguments
        )
        placed = {
            name: device.place(value, name in call.nz) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        results = _by_name(call.results, _operator(call, through)(placed))
        after = _by_name(call.caches, [placed[name] for name in call.caches])
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    reference = copy.deepcopy(arguments)
    wanted = _by_name(call.results, getattr(kernels, call.op)(**reference))
    for name in (name for name in wanted if name not in call.caches):
        # an absent result is ``[0]`` or ``[1]``, by release, and its value is nobody's
        if max(wanted[name].numel(), results[name].numel()) > 1:
            result.comparisons.append(compare(name, results[name], wanted[name]))
    for name in call.caches:
        if call.op.endswith("_functional"):
            if not same_bits(after[name], arguments[name]):
                result.problems.append(f"the functional operator has written its argument {name}")
            after[name] = results[name]
        expected: Tensor = wanted[name] if name in wanted else reference[name]
        if expected.numel():
            _compare_cache(result, name, arguments, after[name], expected)
    return result


def _operator(call: Call, through: str) -> Callable[[Arguments], Any]:
    """The operator as a function of its arguments by name; in a graph they are the graph's
    inputs.
    """

    def step(arguments: Arguments) -> Any:
        return getattr(torch.ops.npu, call.op)(**arguments)

    return step if through == "eager" else _compiled(step)


def _compiled(step: Callable[..., Any], config: Config | None = None) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(step, backend=backend(config), fullgraph=True, dynamic=False)


def _by_name(names: Iterable[str], values: Iterable[Tensor]) -> Tensors:
    """Copies on the CPU: a result may be a cache that is written again."""
    named = zip(names, values, strict=False)
    return {name: value.to("cpu", copy=True) for name, value in named}


def _compare_cache(
    result: Result, name: str, arguments: Arguments, after: Tensor, wanted: Tensor
) -> None:
    """The rows that the reference has written, and all others bit by bit. Caches hold noise before,
    so a row that is written changes.
    """
    caches = [arguments[name], after, wanted]
    if arguments.get("cache_mode", "").endswith("NZ"):
        caches = list(map(layout.nz_to_nd, caches))
    before, after, wanted = (cache.flatten(0, -2) for cache in caches)
    written = (before.view(torch.uint8) != wanted.view(torch.uint8)).any(-1)
    pairs = {name: (after[written], wanted[written])}
    if arguments.get("kv_cache_quant_mode") == 3:  # latent, rope part and scales in one row
        hckv, dr = (DEEPSEEK_V3[axis] for axis in ("Hckv", "Dr"))
        pieces = (unpack_rows(rows, hckv=hckv, dr=dr, tile=spec.TILE_SIZE) for rows in pairs[name])
        names = (f"{name}.{part}" for part in ("ckv", "kr", "scale"))
        pairs = dict(zip(names, zip(*pieces, strict=True), strict=True))
    result.comparisons += [compare(part, *pair) for part, pair in pairs.items()]
    result.check_others(after[~written], before[~written])


def check_prologue(name: str, device: Device) -> Result:
    """Fuses the example's prologue, and compares outputs and written cache rows with a float64 run.

    Passed where the errors are at most those of the unfused bfloat16 run, within chance, and the
    other rows keep their bits.
    """
    options, (model, inputs) = FUSED[name], example()
    config = Config(soc=device.soc, cann=device.cann, **options)
    result, placed = Result(name, "fused"), [device.place(tensor) for tensor in inputs]
    try:
        compiled = _compiled(copy.deepcopy(model).to(device.kind), config)
        fused = _outputs_and_caches(compiled, placed)
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    report, wanted = reports()[-1], "staged" if "staging" in options else "in place"
    placements = [item.placement.partition(":")[0] for item in report.fused]
    if placements != [wanted]:
        result.problems.append(f"not fused {wanted}: {report}")
    unfused = _outputs_and_caches(model, [tensor.clone() for tensor in inputs])
    wide = [one.double() if one.is_floating_point() else one for one in inputs]
    exact = _outputs_and_caches(copy.deepcopy(model).double(), wide)
    slots = inputs[3]
    for output in fused:
        runs = [run[output] for run in (unfused, fused, exact)]
        if output in CACHES:
            runs = [run.reshape(-1, run.shape[-1]) for run in runs]
            others = torch.ones(len(runs[0]), dtype=torch.bool).index_fill(0, slots, False)
            result.check_others(runs[0][others], runs[1][others])
            runs = [run[slots] for run in runs]
        _, problem = error_ratio(*runs)
        result.comparisons.append(Comparison(output, distance(*runs[1:]), 0.0, problem))
    return result


def _outputs_and_caches(step: Callable[..., Any], inputs: Sequence[Tensor]) -> Tensors:
    with torch.no_grad():
        outputs = step(*inputs)
    return _by_name(("query", "query_rope", *CACHES), (*outputs, *inputs[-2:]))
