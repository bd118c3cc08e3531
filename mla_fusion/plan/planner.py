"""From a candidate to a plan: what every target's planner does. Nothing is changed here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import projection
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.obstacle import Obstacle
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact, TableRun
from mla_fusion.facts.unabsorbed import UnabsorbedFact
from mla_fusion.fx import strides
from mla_fusion.fx.sizes import is_symbolic, same, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import rows_and_exact_casts, upward, views_and_model_casts
from mla_fusion.match.candidate import Candidate, KeyHalf
from mla_fusion.operators.known import dtype_of, shape_of
from mla_fusion.plan.outputs import Replacement, ValueTree
from mla_fusion.plan.plan import InPlace, Plan, Staged, Untouched
from mla_fusion.report.rejection import Refuse

SLOTS_ASSUMED = (
    "slots are non-negative{whose} and distinct (the kernel skips negative slots, the model wraps "
    "them)"
)
NARROW = (
    "the float32 norm weights hold bfloat16 numbers (looked at, and again whenever they are packed)"
)
UNCHECKED = (
    "nothing checks the slots (Config.slots is 'checked'): no wrapper stands around the graph"
)

C = TypeVar("C", bound=KeyHalf)
_Fact = NormFact | RopeFact | AbsorbFact | UnabsorbedFact
_Duplicates = Sequence[tuple[Node, torch.Tensor]]
P = TypeVar("P", bound=Plan)


class Planner(ABC, Generic[C, P]):
    """Plans one candidate for one target. Raises ``Refuse`` where no exact plan exists."""

    def __init__(self, view: View, config: Config, candidate: C, boundary: bool = False) -> None:
        """``boundary``: a wrapper stands around the graph and can view a cache in the kernel's
        shape.
        """
        self.view, self.config, self.candidate, self.boundary = view, config, candidate, boundary
        always = Obstacle("config.staging", "Config.staging is 'always'")
        self.stage_because = always if config.staging == "always" else None
        self.trees: dict[str, ValueTree] = {}
        k = candidate.key
        if k.norm is not None and k.rope is not None:
            self._follow("c_kv", k.norm)
            self._follow("k_pe", k.rope, k.rope.duplicates)
        if isinstance(candidate, Candidate):
            q = candidate.query
            of_heads = q.absorb.roots[1:] if isinstance(q.absorb, UnabsorbedFact) else ()
            self._follow("query", q.absorb, of_heads)
            self._follow("query_rope", q.rope, q.rope.duplicates)
            self._follow("query_norm", q.norm)

    def _follow(self, name: str, fact: _Fact, duplicates: _Duplicates = ()) -> None:
        how = self.candidate.shrink, self.candidate.tokens
        self.trees[name] = ValueTree(self.view, fact.node, fact.codes, duplicates, *how)

    @abstractmethod
    def judge(self) -> None:
        """Raise ``Refuse`` where the facts alone say that the operator does not compute this."""

    @abstractmethod
    def plan_at(self, token_x: Node) -> P:
        """The plan in which the leading axes of ``token_x`` are the tokens'."""

    def borrowers(self, plan: P) -> Iterable[Node]:
        """Readers that want only the dtype and device of what goes away. Raises ``Refuse`` for any
        that want more.
        """
        return ()

    def plan(self, stage_because: Obstacle | None = None) -> P:
        """The cheapest exact plan; with ``stage_because``, one that leaves the caches to the
        model's own writes.
        """
        self.stage_because = stage_because or self.stage_because
        self.judge()
        origin = self.candidate.down.origin
        why: Refuse | None = None
        plans: list[P] = []
        for choices in (self.token_choices(), self.sources_of_rows()):
            for token_x in choices if not plans else ():
                try:
                    plans.append(self.plan_at(token_x))
                except Refuse as reason:
                    # of a form that the tables do not go with
                    first = why is None or why.code == "rope.table_shape"
                    why = reason if first else why
        if not plans:
            layout = f"{origin.name} has shape {list(origin.meta['val'].shape)}"
            raise why or Refuse("token_x.layout", layout, (origin,))
        best = min(plans, key=_cost)
        self._check_memory(best)
        return replace(best, borrowers=tuple(self.borrowers(best)))

    # -- tokens

    def token_choices(self, wanted: torch.dtype | None = None) -> list[Node]:
        """Forms of x that are rows of tokens, [T, He] or [B, S, He], innermost first, one of each
        shape; ``wanted``: their dtype, where the call reads x that of its numbers.
        """
        down = self.candidate.down
        if wanted is None and isinstance(self.candidate, Candidate):
            wanted = self.candidate.dtype
        found: dict[tuple[int, ...], Node] = {}
        if down.activation_labels[-1] != down.summed[0] or down.row_labels != down.token_labels:
            return []
        for node in upward(down.activation, rows_and_exact_casts):
            value = node.meta["val"]
            if value.dim() in (2, 3) and wanted in (None, value.dtype):
                found.setdefault(self.view.binding.shape(value.shape), node)
        return list(found.values())

    def sources_of_rows(self) -> Iterator[Node]:
        """Further up, x where the activation is its rows in token order by other views (permuted
        unit axes, x^T).
        """
        down = self.candidate.down
        for node in upward(down.activation, views_and_model_casts):
            value = node.meta["val"]
            is_rows = value.dim() in (2, 3) and value.dtype == self.candidate.dtype
            if is_rows and projection.reads_whole(self.view, replace(down, origin=node)):
                yield node

    def lead_of(self, token_x: Node) -> tuple[int, ...]:
        """The sizes of the tokens' axes as numbers. Raises ``Refuse`` where a table has no row for
        each token.
        """
        sizes = shape_of(token_x)[:-1]
        lead = self.view.binding.shape(sizes)
        if self.candidate.shrink is not None:
            lead = self.candidate.shrink.lead(lead)
        for run in (*self.candidate.key.cos, *self.candidate.key.sin):
            if not self._has_rows(run, lead):
                detail = (
                    f"{run.base.name} has shape {list(run.base.meta['val'].shape)} for tokens "
                    f"{list(sizes)}"
                )
                raise Refuse("rope.table_shape", detail, (run.base,))
        return lead

    def _has_rows(self, run: TableRun, lead: tuple[int, ...]) -> bool:
        """Can the table, with a row a position or a row a sequence, be spread over tokens [B,
        S]?
        """
        if run.rows not in ("position", "sequence"):
            return True
        shape = self.view.binding.shape_of(run.base)
        if self.candidate.shrink is not None:
            shape = self.candidate.shrink.rows(shape)
        return len(lead) == 2 and math.prod(shape[:-1]) == lead[-1 if run.rows == "position" else 0]

    # -- caches

    def staged(self, caches: Staged, rows: dict[str, tuple[int, ...]]) -> list[Replacement]:
        """The new rows, of these shapes, for the model's own writes; ``Refuse`` where
        ``Config.staging`` is "never".
        """
        if self.config.staging == "never":
            first, why = (
                caches.obstacles[0].code,
                "; ".join(one.message for one in caches.obstacles),
            )
            code = first if first == "slots.unproven" else "cache.staging_forbidden"
            raise Refuse(code, why, self.candidate.nodes[-2:])
        return [
            item
            for name, shape in rows.items()
            for item in self.trees[name].replacements(name, shape)
        ]

    def assumed(self, caches: InPlace | Untouched) -> list[str]:
        """What is taken for granted of the slots, as text."""
        if (
            not isinstance(caches, InPlace)
            or self.candidate.key.operator is not None
            or caches.slots.span is not None
        ):
            return []
        if self.boundary and self.config.slots == "checked":
            return []
        names = ", ".join(node.name for node in caches.trusted)
        whose = f" (input {names}, trusted to hold numbers from 0 to 2**24 - 1)" if names else ""
        return [
            SLOTS_ASSUMED.format(whose=whose),
            *([UNCHECKED] if self.config.slots == "checked" else []),
        ]

    def narrowed(self, *gammas: Node | None) -> list[str]:
        """What is taken for granted of the norms' weights, as text."""
        wide = any(
            gamma is not None and dtype_of(gamma) != self.candidate.dtype for gamma in gammas
        )
        return [NARROW] if wide else []

    def _check_memory(self, plan: Plan) -> None:
        """Strides can be given to a copy of the kernel's result; memory around the replaced value
        cannot.
        """
        if not self.view.reads_by_strides:
            return
        parts = [
            item.node for item in plan.replacements if not _fills_its_memory(item.node.meta["val"])
        ]
        by = strides.reader(parts)
        if by is not None:
            raise Refuse(
                "reader.latent",
                f"{by.name} reads the memory in which {parts[0].name} lies",
                (parts[0], by),
            )


def _fills_its_memory(value: torch.Tensor) -> bool:
    return same(value.untyped_storage().nbytes(), value.numel() * value.element_size())


def _cost(plan: Plan) -> int:
    """Nodes that the choice of token axes adds to the graph."""
    return sum(not replacement.is_free for replacement in plan.replacements) + _reshaped(plan)


def _reshaped(plan: Plan) -> int:
    tables = {run.base for run in (*plan.cos, *plan.sin)}
    return sum(not is_symbolic(b) and not same_shape(_lead(b), plan.lead) for b in tables)


def _lead(base: Node) -> Sequence[object]:
    shape: Sequence[object] = shape_of(base)
    return shape[:-1]
