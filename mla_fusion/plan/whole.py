"""Plans of the whole prologue: one call of ``npu_mla_prolog_v3``, its outputs and attributes."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.fx.kinds import borrows_only, has_effect, is_getitem
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import peel
from mla_fusion.match.candidate import Candidate
from mla_fusion.match.finder import rotation_ratio
from mla_fusion.meta import limits
from mla_fusion.plan import verdict
from mla_fusion.plan.outputs import (
    Replacement,
    is_live,
    keeps_nothing,
    leads_only_to,
    quantised_rows,
)
from mla_fusion.plan.padded import wanted_heads
from mla_fusion.plan.plan import InPlace, PrologPlan, Staged
from mla_fusion.plan.planner import Planner
from mla_fusion.plan.weight_modes import scales_of_row
from mla_fusion.plan.whole_caches import CachesOfWhole
from mla_fusion.report.rejection import Refuse

ROWS_READ_BACK = (
    "the new rows are read back from the caches: of a token without a slot nobody reads them"
)

HALVES = (
    "{cache} and query_rope hold halves (a0 a1 .. b0 b1 ..), not the model's pairs (a0 b0 a1 b1 "
    "..), because Config.kr_layout is 'half': everything that reads or writes this cache must use "
    "halves, and rows that it holds already must be halves"
)
IDENTITY = "q_nope is finite: weight_uk = [I | 0] multiplies it (Config.targets names 'identity')"


class PrologPlanner(Planner[Candidate, PrologPlan]):
    """Plans one candidate. Raises ``Refuse`` where no exact plan exists."""

    def __init__(
        self, view: View, config: Config, candidate: Candidate, boundary: bool = False
    ) -> None:
        super().__init__(view, config, candidate, boundary)
        self._normed: tuple[str, ...] = ("query_norm",)
        self.caches = CachesOfWhole(view, config, candidate, self.trees, boundary)

    def judge(self) -> None:
        verdict.judge(self.view, self.candidate)
        if self.candidate.weight_quant_mode:
            self._follow_quantised_norm()

    def _follow_quantised_norm(self) -> None:
        """The kernel gives c_q out quantised, with its scales, so those are what its readers must
        read.
        """
        candidate = self.candidate
        if self._normed == ("query_norm",):
            self._normed = ("query_norm", "dequant_scale_q_norm")
            quantised = candidate.query.up_nope.quantised
            assert quantised is not None and quantised.dynamic is not None
            dynamic, c_q = quantised.dynamic, self.trees["query_norm"]
            width, how = len(candidate.query.norm.columns), (candidate.shrink, candidate.tokens)
            trees = quantised_rows(self.view, c_q, width, dynamic, *how)
            if trees is None:
                detail = f"{dynamic.node.name} does not quantise c_q token by token"
                raise Refuse("quant.tokens_differ", detail, (dynamic.node,))
            self._normed = self._normed if trees[1] is not None else ("query_norm",)
            self.trees |= {
                name: tree
                for name, tree in zip(self._normed, trees, strict=False)
                if tree is not None
            }

    def token_choices(self, wanted: torch.dtype | None = None) -> list[Node]:
        form = self.candidate.format if self.candidate.query.down.quantised is not None else None
        return super().token_choices(wanted if form is None else form.element)

    def plan_at(self, token_x: Node) -> PrologPlan:
        q, k = self.candidate.query, self.candidate.key
        lead = self.lead_of(token_x)
        shapes = {
            "query": (*lead, q.absorb.heads, q.absorb.latent_dim),
            "q_nope": (*lead, q.absorb.heads, q.absorb.nope_dim),
            "query_rope": (*lead, q.rope.heads, q.rope.rope_dim),
            "dequant_scale_q_nope": (math.prod(lead), q.absorb.heads, 1),
            "query_norm": (*lead, len(q.norm.columns)),
            "dequant_scale_q_norm": (
                math.prod(lead),
                scales_of_row(self.candidate.format, len(q.norm.columns)),
            ),
        }
        ups = [part.node for item in (q.up_nope, q.up_rope) for part in item.by_weight]
        pairs = q.rope.layout == "interleaved"
        exact = self.config.kr_layout == "exact"
        placement = self.caches.place(token_x, pairs and exact, self.stage_because)
        query = "query" if isinstance(q.absorb, AbsorbFact) else "q_nope"
        trees = {query: self.trees["query"], "query_rope": self.trees["query_rope"]}
        trees |= placement.query.trees if placement.query is not None else {}
        replacements = [
            r for name, tree in trees.items() for r in tree.replacements(name, shapes[name])
        ]
        normed = [r for name in self._normed for r in self._of_normed(name, shapes[name], ups)]
        if normed and q.absorb.factor != 1.0:
            raise Refuse(
                "reader.latent",
                f"{normed[0].node.name} reads c_q before it is scaled",
                (normed[0].node,),
            )
        caches, of_caches = placement.caches, list(placement.found)
        if isinstance(caches, Staged):
            of_caches = self.staged(
                caches, {"c_kv": (*lead, len(k.columns)), "k_pe": (*lead, k.rope_dim)}
            )
        read_back = isinstance(caches, InPlace) and any(
            item.output in ("c_kv", "k_pe") for item in of_caches
        )
        warnings = []
        if pairs and not exact and isinstance(caches, InPlace):
            warnings.append(HALVES.format(cache=caches.kr_cache or caches.kv_cache))
        ratio = rotation_ratio(self.view, q, k)
        assert ratio is not None  # judged
        return PrologPlan(
            target="v3" if query == "query" else "identity",
            candidate=self.candidate,
            token_x=token_x,
            kernel_heads=_heads_of_call(
                wanted_heads(replacements, q.absorb.heads), q.absorb.heads, self.config
            ),
            cos=k.cos,
            sin=k.sin,
            caches=caches,
            query_norm=bool(normed),
            eps_cq=q.norm.eps,
            eps_ckv=k.eps,
            qc_qr_scale=q.norm.scale * ratio,
            kc_scale=k.scale / placement.query.ratio if placement.query is not None else k.scale,
            replacements=(*replacements, *normed, *of_caches),
            interleave=frozenset({"query_rope", "k_pe"}) if pairs and not warnings else frozenset(),
            warnings=tuple(warnings),
            assumptions=(
                *warnings,
                *self.assumed(caches),
                *([ROWS_READ_BACK] if read_back else []),
                *([IDENTITY] if query == "q_nope" else []),
                *self.narrowed(q.norm.gamma, k.gamma),
            ),
        )

    def _of_normed(self, name: str, shape: tuple[int, ...], ups: list[Node]) -> list[Replacement]:
        """What reads c_q beside the products ``ups`` (and the nodes inside them)."""
        tree = self.trees[name]
        readers = {user for users in tree.readers().values() for user in users}
        return tree.replacements(
            name, shape, {user for user in readers if leads_only_to([user], ups) is None}
        )

    # -- what must be dead afterwards

    def borrowers(self, plan: PrologPlan) -> list[Node]:
        """After the replacements nothing may keep a product of the region alive."""
        cut = {replacement.node for replacement in plan.replacements}
        q, key = self.candidate.query, self.candidate.key
        joined = {item.node for item in (q.down, q.up_nope, q.up_rope, key.down, key.down_rope)}
        region = joined | {item.node for item in self.candidate.projections}
        stops = cut | region
        # the quantisation of c_q: its results are the replaced ones
        if self.candidate.weight_quant_mode:
            stops |= {
                node for root in self.trees["query_norm"].roots for node in root.all_input_nodes
            }
        stops |= {base.args[0] for base in map(peel, cut) if is_getitem(base)}  # type: ignore[misc]  # of the int8 query
        if key.operator is not None:
            stops.add(key.operator.node)
        if isinstance(plan.caches, InPlace) and key.operator is None:
            stops |= {
                user
                for name in ("c_kv", "k_pe")
                for users in self.trees[name].readers().values()
                for user in users
            }
        borrowers: dict[Node, None] = {}
        seen: set[Node] = set()
        for product in sorted(region - cut, key=self.view.position.__getitem__):
            stack = [product]
            while stack:
                node = stack.pop()
                for user in node.users:
                    if user in seen or user in stops:
                        continue
                    nothing = keeps_nothing(user)
                    if not nothing and not is_live(user):
                        continue
                    seen.add(user)
                    if nothing or borrows_only(user):
                        borrowers[user] = None
                        continue
                    if user.op == "output" or has_effect(user) or self.view.ends_walk(user):
                        detail = f"{user.name} reads {node.name}, made from {product.name}"
                        raise Refuse("reader.latent", detail, (product, node, user))
                    stack.append(user)
        return list(borrowers)


def _heads_of_call(wanted: int, heads: int, config: Config) -> int:
    """What readers want, if the kernel takes it; else the least number, not below the model's, that
    it takes.
    """
    machine = config.machine
    taken = limits("npu_mla_prolog_v3", machine.soc, machine.cann).dims["N"]
    if wanted <= _MOST_HEADS and wanted in taken:
        return wanted
    return next((count for count in range(heads, _MOST_HEADS + 1) if count in taken), heads)


_MOST_HEADS = 128
