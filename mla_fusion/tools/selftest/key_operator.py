"""Calls of ``npu_kv_rmsnorm_rope_cache_v2`` for the self-test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import key_operator as contract
from mla_fusion.tools.selftest.operator import Call

_C, _R, _TOKENS, _POOL = 512, 64, 8, (4, 32)


@dataclass(frozen=True)
class Scenario(Call):
    """One call: 8 tokens, as one sequence on scattered slots, or in mode "Norm" as two, on rows of
    their own caches.
    """

    cache_mode: str
    dtype: torch.dtype
    int8: bool = False
    op, caches, nz = contract.V2.name, ("k_cache", "ckv_cache"), ()

    @property
    def results(self) -> tuple[str, ...]:
        return ("k_embed", "y") if self.cache_mode != "Norm" else ()

    @property
    def name(self) -> str:
        """As ``npu_kv_rmsnorm_rope_cache_v2 PA_BNSD bfloat16 int8``."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {self.cache_mode} {kind}" + (" int8" if self.int8 else "")

    def call(self) -> dict[str, Any]:
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
        for name, width, scale in zip(self.caches, (_R, _C), contract.SCALES, strict=True):
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
