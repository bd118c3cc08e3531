"""The plan of one fusion: everything the rewrite does, decided before a node is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from mla_fusion.facts.cache_write import Slots
from mla_fusion.facts.obstacle import Obstacles
from mla_fusion.facts.rope import Table
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.facts.static_quant import StaticQuant
from mla_fusion.match.candidate import Candidate, KeyHalf
from mla_fusion.operators.known import shape_of
from mla_fusion.plan.outputs import Replacement
from mla_fusion.report.report import Shown


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """The kernel writes the model's own caches.

    kv_cache, kr_cache   inputs of the graph that hold the caches; no kr_cache where rows are packed
    kv_shape, kr_shape   [BlockNum, BlockSize, 1, width] of each; where an input has another shape,
                         the compiled callable views it so before the call
    mode                 "PA_BSND" or "PA_NZ"
    copies               caches that need a ``copy_`` of their own (the model's operator wrote them
                         unseen)
    kv_scale, kr_scale   of int8 caches: both, per channel (kv_cache_quant_mode 2), or kv_scale, one
                         value, where the query is int8 too (mode 1)
    clip_alpha           of rows packed per tile (mode 3)
    trusted              inputs of the graph whose slots are assumed, not shown, to be non-negative
    rows                 what each cache takes, [T, width] in some shape; empty where the model's
                         own cache operator makes it
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
    rows: tuple[Node, ...] = ()
    of_key: ClassVar[bool] = True

    @property
    def quant_mode(self) -> int:
        """kv_cache_quant_mode."""
        if self.clip_alpha is not None:
            return 3
        return 0 if self.kv_scale is None else 1 if self.kr_scale is None else 2

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(cache for _, cache, _ in self.held)

    @property
    def scales(self) -> tuple[CacheScale, ...]:
        return tuple(scale for scale in (self.kv_scale, self.kr_scale) if scale is not None)

    @property
    def held(self) -> tuple[tuple[str, Node, tuple[Any, ...]], ...]:
        """The caches there are: name, graph input, and the shape in which the kernel takes it."""
        kv = ("kv_cache", self.kv_cache, self.kv_shape)
        return (kv,) if self.kr_cache is None else (kv, ("kr_cache", self.kr_cache, self.kr_shape))


class Untouched:
    """The model's own cache writes stay, and the call has no part in them.

    of_key   does the call compute new rows?

    Of what is written in place there is nothing.
    """

    of_key: ClassVar[bool] = False
    held: ClassVar[tuple[tuple[str, Node, tuple[Any, ...]], ...]] = ()
    inputs: ClassVar[tuple[Node, ...]] = ()
    rows: ClassVar[tuple[Node, ...]] = ()
    scales: ClassVar[tuple[CacheScale, ...]] = ()
    slots: ClassVar[Slots] = Slots(None)
    copies: ClassVar[bool] = False
    quant_mode: ClassVar[int] = 0


@dataclass(frozen=True)
class Staged(Untouched):
    """The kernel writes small buffers of new rows, which the model's own cache writes read.

    obstacles   everything that stands between this and a write in place; at least one
    """

    obstacles: Obstacles
    of_key: ClassVar[bool] = True

    @property
    def reason(self) -> str:
        """The first of them."""
        return self.obstacles[0].message


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One call and what becomes of its results, whatever the operator.

    target        the rung of ``Config.targets`` that it is
    token_x       a node whose leading axes are the tokens', [T, ..] or [B, S, ..]
    cos, sin      tables of the rotation; empty where nothing rotates
    interleave    outputs whose rows go from the kernel's half layout back to interleaved pairs
    assumptions   what the fusion takes for granted, for the report
    warnings      those of them that change what a cache holds
    borrowers     readers that want only the dtype and device of a value that goes away
    """

    target: str
    candidate: KeyHalf
    token_x: Node
    cos: Table
    sin: Table
    caches: InPlace | Untouched
    replacements: tuple[Replacement, ...]
    interleave: frozenset[str] = frozenset()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    borrowers: tuple[Node, ...] = ()

    def gives(self, *outputs: str) -> bool:
        """Does the call compute one of these?"""
        return any(item.output in outputs for item in self.replacements)

    @property
    def projects_up(self) -> bool:
        """Does the call compute the query's up-projections?"""
        return self.gives("query", "q_nope", "query_rope")

    @property
    def device(self) -> torch.device:
        """Where x is, and so the call."""
        found: torch.device = self.token_x.meta["val"].device
        return found

    @property
    def lead(self) -> Sequence[Any]:
        """The sizes of the tokens' axes."""
        return shape_of(self.token_x)[:-1]

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of the axes, by the names of the operator's documents."""
        k, tokens = self.candidate.key, "*".join(map(str, self.lead))
        he = int(shape_of(self.token_x)[-1])
        return {"T": tokens, "He": he, "Hckv": len(k.columns), "Dr": k.rope_dim}

    @property
    def read_from(self) -> tuple[Node, ...]:
        """Where all that the call computes begins; empty where that is x, in whichever form lies
        highest.
        """
        return self.candidate.taken

    @property
    def parts(self) -> tuple[tuple[Node, str], ...]:
        """Nodes that a drawn value must suit, beside those of the facts, with the parts that they
        play.
        """
        return ()

    @property
    def writes_inputs(self) -> bool:
        """Does the call write the caches themselves, so that nothing need be copied into them?"""
        return False

    @property
    def heads(self) -> int:
        """Of the model; 1 where the query is none of its business."""
        return 1

    @property
    def heads_of_call(self) -> int:
        """Those of the model, or the next number that the kernel takes."""
        return self.heads

    @property
    def kv_cache_quant_mode(self) -> int:
        return self.caches.quant_mode


@dataclass(eq=False)
class Structure:
    """What is known of all plans that differ only in which layer they are; the first one tells.

    accepted  what the call assumes of the sizes, where the contract takes it; else None
    assumes   may its proof take something of its numbers for granted?
    proved    what was shown of it
    compared  the layer that the second witness compared; "" before it has compared one
    lines     why it is exact, for the report
    replaced  how many operators the call stands for; None before they are counted
    """

    accepted: tuple[str, ...] | None = None
    assumes: bool = True
    proved: Shown | None = None
    compared: str = ""
    lines: tuple[str, ...] = ()
    replaced: int | None = None


@dataclass(frozen=True, kw_only=True)
class QueryPlan(Plan):
    """One call that computes the query.

    token_x   [T, He] or [B, S, He], which the call reads; its rank decides that of every other
              token axis
    """

    candidate: Candidate

    @property
    def dims(self) -> dict[str, Any]:
        q, known = self.candidate.query, super().dims
        found = {
            "T": known["T"],
            "He": known["He"],
            "Hcq": len(q.norm.columns),
            "Hckv": known["Hckv"],
            "N": self.heads,
            "D": q.absorb.nope_dim,
            "Dr": known["Dr"],
        }
        padded = self.heads_of_call
        return found | ({"N_padded": padded} if padded > self.heads else {})

    @property
    def heads(self) -> int:
        return self.candidate.query.absorb.heads


@dataclass(frozen=True, kw_only=True)
class PrologPlan(QueryPlan):
    """One call of ``npu_mla_prolog_v3_functional``.

    kernel_heads  N of the call
    eps_cq ...    attributes of the call
    """

    kernel_heads: int
    query_norm: bool
    eps_cq: float
    eps_ckv: float
    qc_qr_scale: float
    kc_scale: float

    @property
    def cache_mode(self) -> str:
        if isinstance(self.caches, InPlace):
            return self.caches.mode
        return "BSND" if len(self.lead) == 2 else "TND"

    @property
    def heads_of_call(self) -> int:
        return self.kernel_heads


@dataclass(frozen=True, kw_only=True)
class PreprocessPlan(PrologPlan):
    """One call of ``npu_mla_preprocess``, which writes its results into tensors that it is given.

    token_x    the hidden state, before its norm
    gamma      of that norm
    begins     what the hidden state and its norm are computed from
    down, up   how the norms of x and of c_q are quantised
    """

    gamma: Node
    begins: tuple[Node, ...]
    down: StaticQuant
    up: StaticQuant

    @property
    def read_from(self) -> tuple[Node, ...]:
        return self.begins

    @property
    def parts(self) -> tuple[tuple[Node, str], ...]:
        ones = (
            one
            for how in (self.down, self.up)
            for one in (how.scale, how.offset)
            if one is not None
        )
        return (self.gamma, "gamma"), *((one.node, one.part) for one in ones if one.part)

    @property
    def writes_inputs(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class KeyPlan(Plan):
    """One call of ``npu_kv_rmsnorm_rope_cache_v2_functional``.

    gives_rows   the new rows are read beside the caches
    """

    gives_rows: bool
