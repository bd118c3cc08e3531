"""The plan of one fusion: everything the rewrite does, decided before a node is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from mla_fusion.facts.cache_write import Slots
from mla_fusion.facts.rope import Table
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.match.candidate import Candidate
from mla_fusion.plan.outputs import Replacement


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """The kernel writes the model's own caches.

    kv_cache, kr_cache   inputs of the graph that hold the caches; no kr_cache where rows are packed
    kv_shape, kr_shape   [BlockNum, BlockSize, 1, width] of each; where an input has another shape, the
                         compiled callable views it so before the call
    mode                 "PA_BSND" or "PA_NZ"
    copies               caches that need a ``copy_`` of their own (the model's operator wrote them unseen)
    kv_scale, kr_scale   of int8 caches: both, per channel (kv_cache_quant_mode 2), or kv_scale, one value, where the
                         query is int8 too (mode 1)
    clip_alpha           of rows packed per tile (mode 3)
    trusted              inputs of the graph whose slots are assumed, not shown, to be non-negative
    """

    kv_cache: Node
    kr_cache: Node | None
    kv_shape: tuple[Any, ...]
    kr_shape: tuple[Any, ...]
    slots: Slots
    mode: str
    copies: bool = False
    kv_scale: CacheScale | None = None
    kr_scale: CacheScale | None = None
    clip_alpha: float | None = None
    trusted: tuple[Node, ...] = ()

    @property
    def quant_mode(self) -> int:
        """kv_cache_quant_mode."""
        if self.clip_alpha is not None:
            return 3
        return 0 if self.kv_scale is None else 1 if self.kr_scale is None else 2

    @property
    def held(self) -> tuple[tuple[str, Node, tuple[Any, ...]], ...]:
        """The caches there are: name, graph input, and the shape in which the kernel takes it."""
        kv = ("kv_cache", self.kv_cache, self.kv_shape)
        return (kv,) if self.kr_cache is None else (kv, ("kr_cache", self.kr_cache, self.kr_shape))


@dataclass(frozen=True)
class Staged:
    """The kernel writes small buffers of new rows; the model's own cache writes stay. ``reason`` says why.

    code   where the reason has a code of its own ("slots.unproven")
    """

    reason: str
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One call of ``npu_mla_prolog_v3_functional`` and what becomes of its results.

    token_x       [T, He] or [B, S, He]; its rank decides that of every other token axis
    kernel_heads  N of the call: the model's, or the next number that the kernel takes
    interleave    outputs whose rows go from the kernel's half layout back to interleaved pairs
    eps_cq ...    attributes of the call
    assumptions   what the fusion takes for granted, for the report
    borrowers     readers that want only the dtype and device of a value that goes away
    """

    candidate: Candidate
    token_x: Node
    kernel_heads: int
    cos: Table
    sin: Table
    caches: InPlace | Staged
    query_norm: bool
    eps_cq: float
    eps_ckv: float
    qc_qr_scale: float
    kc_scale: float
    replacements: tuple[Replacement, ...]
    interleave: frozenset[str]
    assumptions: tuple[str, ...] = ()
    borrowers: tuple[Node, ...] = ()

    @property
    def lead_rank(self) -> int:
        return len(self.token_x.meta["val"].shape) - 1

    @property
    def cache_mode(self) -> str:
        if isinstance(self.caches, InPlace):
            return self.caches.mode
        return "BSND" if self.lead_rank == 2 else "TND"

    @property
    def kv_cache_quant_mode(self) -> int:
        return self.caches.quant_mode if isinstance(self.caches, InPlace) else 0

    @property
    def heads(self) -> int:
        """Of the model."""
        return self.candidate.query.absorb.heads
