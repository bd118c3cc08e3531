"""One check: an operator on the device against its reference, or a fused prologue against the same
maths in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.compile.backend import backend
from mla_fusion.config import Config
from mla_fusion.examples.fuse_your_model import example
from mla_fusion.meta import spec
from mla_fusion.paging import layout
from mla_fusion.paging.tiles import unpack_rows
from mla_fusion.report.store import reports
from mla_fusion.tools.accuracy import distance, error_ratio
from mla_fusion.tools.by_hand.memory import Tensors, same_bits
from mla_fusion.tools.selftest.calls import Arguments, Call
from mla_fusion.tools.selftest.compare import Comparison, compare
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.samples import DEEPSEEK_V3

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

    @property
    def failures(self) -> list[str]:
        """One sentence for each thing that is wrong; empty where it passed."""
        wrong = [f"{one.output}: {one.problem}" for one in self.comparisons if one.problem]
        return self.problems + wrong

    def __str__(self) -> str:
        """One line, and one more for each failure."""
        worst = max(self.comparisons, key=lambda one: (one.off, one.largest), default=None)
        said = f": {worst.output} {worst.largest:.1g}, {worst.off:.2%} off" if worst else ""
        head = f"{'FAILED' if self.failures else 'ok':6} {self.name} ({self.through}){said}"
        return "\n".join([head, *(f"       {text}" for text in self.failures)])


def check_call(call: Call, device: Device, through: str) -> Result:
    """Calls operator and reference on equal arguments, and compares every output, both caches and
    the rows that belong to nobody.

    What the call raises becomes the result's problem: a refusal by the device is a finding.
    """
    result, given = Result(call.name, through), call.make()
    try:
        meta.check(call.op, soc=device.soc, cann=device.cann, path=through, values=True, **given)
        placed = {
            name: device.place(value, name in call.nz) if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
        found = _by_name(call, _operator(call, through)(placed))
        after = {name: placed[name].to("cpu", copy=True) for name in call.caches}
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    reference = copy.deepcopy(given)
    wanted = _by_name(call, call.reference(**reference))
    for name in (name for name in wanted if name not in call.caches):
        # an absent result is ``[0]`` or ``[1]``, by release, and its value is nobody's
        if max(wanted[name].numel(), found[name].numel()) > 1:
            result.comparisons.append(compare(name, found[name], wanted[name]))
    for name in call.caches:
        if call.op.endswith("_functional"):
            if not same_bits(after[name], given[name]):
                result.problems.append(f"the functional operator has written its argument {name}")
            after[name] = found[name]
        expected: Tensor = wanted[name] if name in wanted else reference[name]
        if expected.numel():
            _compare_cache(result, name, given, after[name], expected)
    return result


def _operator(call: Call, through: str) -> Callable[[Arguments], Any]:
    """The operator as a function of its arguments by name; in a graph they are the graph's
    inputs.
    """

    def step(given: Arguments) -> Any:
        return call.operator(**given)

    if through == "eager":
        return step
    torch.compiler.reset()
    return torch.compile(step, backend=backend(), fullgraph=True, dynamic=False)


def _by_name(call: Call, results: Sequence[Tensor]) -> Tensors:
    """Copies: a result may be a cache that is written again."""
    named = zip(call.results, results, strict=False)
    return {name: value.to("cpu", copy=True) for name, value in named}


def _compare_cache(
    result: Result, name: str, given: Arguments, after: Tensor, wanted: Tensor
) -> None:
    """The rows that the reference has written, and all others bit by bit. Caches hold noise before,
    so a row that is written changes.
    """
    every = [given[name], after, wanted]
    if given.get("cache_mode", "").endswith("NZ"):
        every = list(map(layout.nz_to_nd, every))
    before, after, wanted = (cache.flatten(0, -2) for cache in every)
    written = (before.view(torch.uint8) != wanted.view(torch.uint8)).any(-1)
    pairs = {name: (after[written], wanted[written])}
    if given.get("kv_cache_quant_mode") == 3:  # latent, rope part and scales in one row
        hckv, dr = (DEEPSEEK_V3[axis] for axis in ("Hckv", "Dr"))
        pieces = (unpack_rows(rows, hckv=hckv, dr=dr, tile=spec.TILE_SIZE) for rows in pairs[name])
        names = (f"{name}.{part}" for part in ("ckv", "kr", "scale"))
        pairs = dict(zip(names, zip(*pieces, strict=True), strict=True))
    result.comparisons += [compare(part, *pair) for part, pair in pairs.items()]
    if not same_bits(after[~written], before[~written]) and _CHANGED not in result.problems:
        result.problems.append(_CHANGED)


def check_prologue(name: str, device: Device) -> Result:
    """Fuses the example's prologue, and compares outputs and written cache rows with a float64 run.

    Passed where the errors are at most those of the unfused bfloat16 run, within chance, and the
    other rows keep their bits.
    """
    options, (model, given) = FUSED[name], example()
    config = Config(soc=device.soc, cann=device.cann, **options)
    result, placed = Result(name, "fused"), [device.place(tensor) for tensor in given]
    try:
        torch.compiler.reset()
        compiled = torch.compile(
            copy.deepcopy(model).to(device.kind),
            backend=backend(config),
            fullgraph=True,
            dynamic=False,
        )
        with torch.no_grad():
            outputs = [output.cpu() for output in compiled(*placed)]
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    report, wanted = reports()[-1], "staged" if "staging" in options else "in place"
    placements = [item.placement.partition(":")[0] for item in report.fused]
    if placements != [wanted]:
        result.problems.append(f"not fused {wanted}: {report}")
    runs = []
    for module, inputs in (
        (model, [tensor.clone() for tensor in given]),
        (
            copy.deepcopy(model).double(),
            [one.double() if one.is_floating_point() else one for one in given],
        ),
    ):
        with torch.no_grad():
            runs.append((module(*inputs), inputs[-2:]))
    runs.append((outputs, [cache.cpu() for cache in placed[-2:]]))
    for at, output in enumerate(("query", "query_rope")):
        unfused, exact, fused = (run[0][at] for run in runs)
        result.comparisons.append(_compare_errors(output, unfused, fused, exact))
    for at, cache in enumerate(("kv_cache", "kr_cache")):
        split = [_split_rows(run[1][at], given[3]) for run in runs]
        unfused, exact, fused = (rows for rows, _ in split)
        result.comparisons.append(_compare_errors(cache, unfused, fused, exact))
        if not same_bits(split[0][1], split[2][1]) and _CHANGED not in result.problems:
            result.problems.append(_CHANGED)
    return result


def _compare_errors(output: str, unfused: Tensor, fused: Tensor, exact: Tensor) -> Comparison:
    _, problem = error_ratio(unfused, fused, exact)
    return Comparison(output, distance(fused, exact), 0.0, problem)


def _split_rows(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are written, in the order of the slots, and all others."""
    rows = cache.reshape(-1, cache.shape[-1])
    others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, slots, False)
    return rows[slots], rows[others]
