"""Plans of the whole prologue for ``npu_mla_preprocess``: W8A8 by fixed scales, the input's norm
inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import input_norm, static_quant
from mla_fusion.facts import projection as of_projection
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.cache_write import WriteFact
from mla_fusion.facts.dynamic_quant import quantised_behind
from mla_fusion.facts.input_norm import InputNorm
from mla_fusion.facts.obstacle import Obstacle
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.facts.static_quant import StaticQuant
from mla_fusion.fx.kinds import word
from mla_fusion.fx.sizes import has_symbols
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import peel, reshapes, upward
from mla_fusion.match.candidate import Candidate
from mla_fusion.match.finder import rotation_ratio
from mla_fusion.meta.preprocess import EPSILON, MAX_TOKENS
from mla_fusion.operators.known import shape_of
from mla_fusion.plan import verdict
from mla_fusion.plan.caches import Placement, WritePlanner
from mla_fusion.plan.int8_query import Int8Query
from mla_fusion.plan.plan import PreprocessPlan, PrologPlan, Staged
from mla_fusion.plan.whole import PrologPlanner
from mla_fusion.plan.whole_caches import CachesOfWhole
from mla_fusion.report.rejection import Refuse

_REPEATED = (
    "static scales and offsets repeat one number (looked at, and again whenever they are packed)"
)


class PreprocessPlanner(PrologPlanner):
    """Plans one candidate. Raises ``Refuse`` where no exact plan exists."""

    def __init__(
        self, view: View, config: Config, candidate: Candidate, boundary: bool = False
    ) -> None:
        super().__init__(view, config, candidate, boundary)
        self.caches = _Caches(view, config, candidate, self.trees, boundary)
        self._down: StaticQuant | None = None
        self._up: StaticQuant | None = None
        self._input: InputNorm | None = None

    def judge(self) -> None:
        verdict.judge_static(self.view, self.candidate)
        q, k = self.candidate.query, self.candidate.key
        if not isinstance(q.absorb, AbsorbFact):
            raise Refuse("absorb.absent", f"q_nope at {q.absorb.node.name}", (q.absorb.node,))
        self._down = self._quantised((q.down, k.down, k.down_rope))
        self._up = self._quantised((q.up_nope, q.up_rope))
        if peel(self._up.source) is not peel(q.norm.node):
            raise Refuse(
                "quant.not_static",
                f"{self._up.node.name} does not quantise {q.norm.node.name}",
                (self._up.node,),
            )
        for name, eps, node in (("c_q", q.norm.eps, q.norm.node), ("c_kv", k.eps, k.latent)):
            if not math.isclose(eps, EPSILON, rel_tol=1e-6):
                raise Refuse("norm.epsilon", f"epsilon of {name} is {eps:g}", (node,))
        factors = (q.norm.scale, k.scale, q.absorb.factor, rotation_ratio(self.view, q, k) or 0.0)
        if any(abs(factor - 1.0) > 1e-6 for factor in factors):
            text = ", ".join(f"{factor:g}" for factor in factors)
            raise Refuse(
                "scale.unequal",
                f"c_q, c_kv, q_nope and q_pe are multiplied by {text}; the operator takes 1 alone",
                (q.down.node,),
            )
        self._input = input_norm.find(self.view, peel(self._down.source))
        if self._input is None:
            quantised = self._down.node, self._down.source
            text = f"{quantised[0].name} quantises rows of {quantised[1].name}"
            if has_symbols(shape_of(quantised[1])):
                why = f"T 1..{MAX_TOKENS}; {text}, a number known only at run time: mark it static"
                raise Refuse("contract:dims.t", f"npu_mla_preprocess takes {why}", quantised)
            raise Refuse("norm.of_input", text, quantised)
        verdict.judge_gamma("x", self._input.normed, self._input.gamma, self.candidate.dtype)

    def _quantised(self, sides: tuple[Projection, ...]) -> StaticQuant:
        """How all of these are quantised: by one operator, whose rows they read in order."""
        found: dict[Node, StaticQuant] = {}
        for item in dict.fromkeys(sides):
            fact = item.quantised.static if item.quantised is not None else None
            form = item if fact is not None else of_projection.statically_quantised(item)
            if form is None or form.quantised is None or form.quantised.static is None:
                why = static_quant.why_not(quantised_behind(item.activation))
                detail = f"{item.node.name} multiplies {item.activation.name}" + (
                    f"; {why}" if why else ""
                )
                raise Refuse("quant.not_static", detail, (item.node,))
            if not of_projection.reads_whole(self.view, form):
                detail = f"{item.node.name} reads {form.origin.name} in another order"
                raise Refuse("token_x.layout", detail, (item.node,))
            found[form.quantised.static.node] = form.quantised.static
        first, *others = found.values()
        if others and not all(self.view.same(first.node, other.node) for other in others):
            names = ", ".join(node.name for node in found)
            raise Refuse("quant.tokens_differ", f"the int8 activations are {names}", tuple(found))
        return first

    def token_choices(self, wanted: torch.dtype | None = None) -> list[Node]:
        assert self._input is not None
        value = self._input.hidden.meta["val"]
        taken = (
            value.dim() in (2, 3) and value.dtype == torch.bfloat16 and not has_symbols(value.shape)
        )
        return [self._input.hidden] if taken else []

    def sources_of_rows(self) -> Iterator[Node]:
        return iter(())

    def plan_at(self, token_x: Node) -> PreprocessPlan:
        assert self._input is not None and self._down is not None and self._up is not None
        plan = super().plan_at(token_x)
        readers = [item.node for item in plan.replacements if item.output == "query_norm"]
        if readers:
            raise Refuse(
                "reader.latent",
                f"{readers[0].name} reads c_q, which the operator keeps",
                (readers[0],),
            )
        norm = self._input
        ones = (
            one
            for how in (self._down, self._up)
            for one in (how.scale, how.offset)
            if one is not None
        )
        repeated = [_REPEATED] if any(one.repeated for one in ones) else []
        assumptions = tuple(
            dict.fromkeys((*plan.assumptions, *self.narrowed(norm.gamma), *repeated))
        )
        found = vars(plan) | {
            "target": "preprocess",
            "kernel_heads": plan.heads,
            "assumptions": assumptions,
        }
        return PreprocessPlan(
            **found, gamma=norm.gamma, begins=norm.begins, down=self._down, up=self._up
        )

    def borrowers(self, plan: PrologPlan) -> list[Node]:
        """Whoever else reads a product, or the quantised x, goes on reading it."""
        return []


class _Caches(CachesOfWhole):
    """Two caches of bfloat16 rows."""

    writable = WritePlanner.writable

    def packed(self, token_x: Node) -> Placement | None:
        return None

    def as_quantised(self, kv: CacheScale | None, kr: CacheScale | None) -> Int8Query | str | None:
        return (
            None if kv is None and kr is None else "the operator's int8 caches are in the NZ layout"
        )

    def obstacles(self, token_x: Node, write: WriteFact, wanted: int) -> list[Obstacle]:
        """The operator writes to memory: it must be where the graph stores the new rows, too."""
        copies = [
            user
            for user in write.cache.users
            if word(user) == "copy_" and user.args[0] is write.cache
        ]
        stored = any(write.result in upward(user.args[1], reshapes) for user in copies)  # type: ignore[arg-type]
        message = (
            f"{write.cache.name} keeps its old rows; only {write.result.name} has the new ones"
        )
        kept = [] if stored else [Obstacle("cache.not_stored", message)]
        return [*super().obstacles(token_x, write, wanted), *kept]

    def place(self, token_x: Node, pairs: bool, stage_because: Obstacle | None) -> Placement:
        found = super().place(token_x, pairs, stage_because)
        if not isinstance(found.caches, Staged) and found.caches.mode != "PA_BSND":
            raise Refuse(
                "cache.operator_mode",
                f"{found.caches.kv_cache.name} is written in the mode {found.caches.mode}",
                (token_x,),
            )
        if not isinstance(found.caches, Staged) and found.caches.copies:
            return replace(found, caches=replace(found.caches, copies=False))
        return found
