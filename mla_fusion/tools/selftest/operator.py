"""One call: the operator on the device against the reference, by itself or inside a compiled
graph.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.compile.backend import backend
from mla_fusion.meta.prolog import CACHES
from mla_fusion.paging import layout
from mla_fusion.reference import kernels
from mla_fusion.tools.by_hand.memory import Tensors, same_bits
from mla_fusion.tools.selftest.compare import compare
from mla_fusion.tools.selftest.device import NZ_WEIGHTS, Device
from mla_fusion.tools.selftest.result import Result

Arguments = dict[str, Any]  # of an operator, by name


class Call(ABC):
    """One call of an operator that writes caches.

    op         its name, as in `mla_fusion.meta.check`
    caches     names of arguments
    nz         the weights that are in FRACTAL_NZ on an NPU
    """

    op: str
    cache_mode: str
    caches: ClassVar[Sequence[str]] = CACHES
    nz: ClassVar[Sequence[str]] = NZ_WEIGHTS

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique among the calls of the self-test."""

    @property
    @abstractmethod
    def results(self) -> Sequence[str]:
        """Names of what operator and reference return, in order."""

    @abstractmethod
    def call(self) -> Arguments:
        """Seeded arguments by name, on the CPU."""

    @property
    def operator(self) -> Callable[..., Any]:
        return getattr(torch.ops.npu, self.op)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(kernels, self.op)

    def outs(self, placed: Arguments) -> Arguments:
        """Arguments that take the results on the device."""
        return {}

    def parts(self, rows: Tensor) -> Tensors:
        """What rows of a cache hold, by name."""
        return {"": rows}


def run(item: Call, device: Device, *, through: str = "eager", repeats: int = 3) -> Result:
    """Call the operator (``through`` "eager" or "graph") and the reference on equal arguments, and
    compare every output, both caches, the cache rows that belong to nobody, and which memory was
    written.

    What the call raises becomes the result's problem: a refusal by the device is a finding.
    """
    call = item.call()
    result = Result(item.name, through)
    try:
        meta.check(item.op, soc=device.soc, cann=device.cann, path=through, values=True, **call)
        placed = {
            name: device.place(value, nz=name in item.nz) if isinstance(value, Tensor) else value
            for name, value in call.items()
        }
        placed |= item.outs(placed)
        before = {name: placed[name].data_ptr() for name in item.caches}
        operator = _operator(item, placed, through)
        found = _by_name(item, operator(placed))
        # timing writes them again
        after = {name: placed[name].to("cpu", copy=True) for name in item.caches}
        moved = [name for name in item.caches if placed[name].data_ptr() != before[name]]
        result.milliseconds = device.milliseconds(lambda: operator(placed), repeats)
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    given = copy.deepcopy(call)
    wanted = _by_name(item, item.reference(**given))
    result.problems += [f"{name} is another tensor after the call" for name in moved]
    for name, value in wanted.items():
        # an absent result is ``[0]`` or ``[1]``, by release, and its value is nobody's
        if name not in item.caches and max(value.numel(), found[name].numel()) > 1:
            result.comparisons.append(compare(name, found[name], value))
    for name in item.caches:
        if item.op.endswith("_functional"):
            if not same_bits(after[name], call[name]):
                said = f"the functional operator has written its argument {name}"
                result.problems.append(said)
            after[name] = found[name]
        expected: Any = wanted.get(name, given[name])
        if expected.numel():
            _compare_cache(result, item, name, call[name], after[name], expected)
    return result


def _operator(item: Call, placed: Arguments, through: str) -> Callable[[Arguments], Any]:
    """The operator as a function of its arguments by name; in a graph they are the graph's
    inputs.
    """
    if through == "eager":
        return lambda arguments: item.operator(**arguments)
    names = [name for name, value in placed.items() if isinstance(value, Tensor)]
    attributes = {name: value for name, value in placed.items() if name not in names}

    def step(*tensors: Tensor) -> Any:
        return item.operator(**dict(zip(names, tensors, strict=True)), **attributes)

    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend(), fullgraph=True, dynamic=False)
    return lambda arguments: compiled(*(arguments[name] for name in names))


def _by_name(item: Call, results: Sequence[Tensor]) -> Tensors:
    """Copies: a result may be a cache that is written again."""
    named = zip(item.results, results, strict=False)
    return {name: value.to("cpu", copy=True) for name, value in named}


def _compare_cache(
    result: Result, item: Call, name: str, before: Tensor, after: Tensor, wanted: Tensor
) -> None:
    """The rows that the reference has written, and all others bit by bit. Caches hold noise before,
    so a row that is written changes.
    """
    if item.cache_mode.endswith("NZ"):
        before, after, wanted = map(layout.nz_to_nd, (before, after, wanted))
    before, after, wanted = (cache.flatten(0, -2) for cache in (before, after, wanted))
    written = (before.view(torch.uint8) != wanted.view(torch.uint8)).any(-1)
    found = item.parts(after[written])
    for part, rows in item.parts(wanted[written]).items():
        result.comparisons.append(compare(name + part, found[part], rows))
    result.others_untouched &= same_bits(after[~written], before[~written])
