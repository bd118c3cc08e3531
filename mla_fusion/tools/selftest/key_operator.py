"""``npu_kv_rmsnorm_rope_cache_v2`` on the device against the reference: rows, caches, and what
nobody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta import key_operator as contract
from mla_fusion.reference import kernels
from mla_fusion.tools.selftest.compare import compare, same_bits
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.result import Result

_ROWS, _CACHES = ("k_embed", "y"), ("k_cache", "ckv_cache")
_C, _R, _TOKENS, _POOL = 512, 64, 8, (4, 32)


@dataclass(frozen=True)
class Scenario:
    """One call: 8 tokens, as one sequence on scattered slots, or in mode "Norm" as two, on rows of
    their own caches.
    """

    cache_mode: str
    dtype: torch.dtype
    int8: bool = False
    op: str = field(default=contract.V2.name, init=False)

    @property
    def name(self) -> str:
        """As ``npu_kv_rmsnorm_rope_cache_v2 PA_BNSD bfloat16 int8``."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {self.cache_mode} {kind}" + (" int8" if self.int8 else "")

    def call(self) -> dict[str, Any]:
        """Seeded arguments by name, on the CPU."""
        make = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make, dtype=torch.float32).to(self.dtype)

        paged = self.cache_mode != "Norm"
        lead = (1, 1, _TOKENS) if paged else (2, 1, _TOKENS // 2)
        pool = (*_POOL, 1) if paged else (2, 1, 16)
        slots = torch.randperm(_POOL[0] * _POOL[1], generator=make)[:_TOKENS]
        index = (
            slots
            if paged
            else torch.stack([torch.randperm(16, generator=make)[: lead[2]] for _ in range(2)])
        )
        given: dict[str, Any] = {
            "kv": noise(*lead, _C + _R),
            "gamma": 1 + noise(_C) / 8,
            "cos": noise(*lead, _R),
            "sin": noise(*lead, _R),
            "index": index,
        }
        for name, width, scale in zip(_CACHES, (_R, _C), contract.SCALES, strict=True):
            given[name] = noise(*pool, width)
            if self.int8:
                given[name] = (20 * given[name]).to(torch.int8)
                given[scale] = 20 + 10 * torch.rand(width, generator=make, dtype=torch.float32)
        return given | {"cache_mode": self.cache_mode, "is_output_kv": paged, "epsilon": 1e-6}


def scenarios(soc: str) -> Iterator[Scenario]:
    """The modes that the pass emits, and the NZ layout, in both dtypes, and as int8 where the SoC
    has it.
    """
    for mode in ("PA_BNSD", "PA_NZ", "Norm"):
        for dtype in (torch.bfloat16, torch.float16):
            yield Scenario(mode, dtype)
        if mode != "Norm" or soc == "A5":
            yield Scenario(mode, torch.bfloat16, int8=True)


def run(scenario: Scenario, device: Device, *, repeats: int = 3) -> Result:
    """Call the operator and the reference on equal arguments, and compare rows, caches and
    untouched elements.
    """
    call = scenario.call()
    result = Result(scenario.name, "eager")
    try:
        meta.check(scenario.op, soc=device.soc, cann=device.cann, values=True, **call)
        placed = device.place_all(call, ())
        found = _step(placed)
        after = {name: value.to("cpu", copy=True) for name, value in found.items()}
        result.milliseconds = device.milliseconds(lambda: _step(placed), repeats)
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
        return result
    wanted = _by_reference(call)
    result.comparisons = [compare(name, after[name], value) for name, value in wanted.items()]
    # which elements the call writes: those that come out alike from two caches that differ
    # everywhere
    other = _by_reference(
        call | {name: ~call[name] if scenario.int8 else call[name] + 1 for name in _CACHES}
    )
    for name in _CACHES:
        untouched = wanted[name] != other[name]
        result.others_untouched &= same_bits(after[name][untouched], call[name][untouched])
    return result


def _step(placed: dict[str, Any]) -> dict[str, Tensor]:
    rows = getattr(torch.ops.npu, contract.V2.name)(**placed)
    given = dict(zip(_ROWS, rows, strict=True)) if placed["is_output_kv"] else {}
    return given | {name: placed[name] for name in _CACHES}


def _by_reference(call: dict[str, Any]) -> dict[str, Tensor]:
    results = kernels.npu_kv_rmsnorm_rope_cache_v2_functional(**call)
    named = dict(zip((*_ROWS, *_CACHES), results, strict=True))
    return named if call["is_output_kv"] else {name: named[name] for name in _CACHES}
