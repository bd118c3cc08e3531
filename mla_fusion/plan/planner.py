"""From a candidate to a plan: token axis, outputs, caches, attributes. Nothing is changed here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import projection
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.rope import TableRun
from mla_fusion.facts.unabsorbed import UnabsorbedFact
from mla_fusion.fx import strides
from mla_fusion.fx.kinds import borrows_only, has_effect, is_getitem
from mla_fusion.fx.sizes import is_symbolic, same, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import peel, rows_and_exact_casts, upward, views_and_model_casts
from mla_fusion.match.candidate import Candidate
from mla_fusion.match.finder import rotation_ratio
from mla_fusion.meta import limits
from mla_fusion.plan import verdict
from mla_fusion.plan.caches import CachePlanner
from mla_fusion.plan.outputs import Replacement, ValueTree, is_live, keeps_nothing, leads_only_to, quantised_rows
from mla_fusion.plan.plan import InPlace, Plan, Staged
from mla_fusion.report.rejection import Refuse

_SLOTS_ASSUMED = "slots are non-negative{whose} and distinct (the kernel skips negative slots, index_put wraps them)"

_UNCHECKED = "nothing checks the slots (Config.slots is 'checked'): no wrapper stands around the graph"
_ROWS_READ_BACK = "the new rows are read back from the caches: of a token without a slot nobody reads them"

_NARROW = "the float32 norm weights hold bfloat16 numbers (looked at, and again whenever they are packed)"
_IDENTITY = "q_nope, finite, is taken through weight_uk = [I | 0] (Config.unabsorbed is 'identity')"


class Planner:
    """Plans one candidate. Raises ``Refuse`` where no exact plan exists."""

    def __init__(self, view: View, config: Config, candidate: Candidate, boundary: bool = False) -> None:
        """``boundary``: a wrapper stands around the graph and can view a cache in the kernel's shape."""
        self.view, self.config, self.candidate, self.boundary = view, config, candidate, boundary
        self._stage_because = "Config.staging is 'always'" if config.staging == "always" else ""
        q, k, how = candidate.query, candidate.key, (candidate.shrink, candidate.tokens)
        self.trees = {
            "query": ValueTree(view, q.absorb.node, q.absorb.codes, _duplicates(q.absorb), *how),
            "query_rope": ValueTree(view, q.rope.node, q.rope.codes, q.rope.duplicates, *how),
            "query_norm": ValueTree(view, q.norm.node, q.norm.codes, (), *how),
        }
        self._normed: tuple[str, ...] = ("query_norm",)
        if k.norm is not None and k.rope is not None:
            self.trees["c_kv"] = ValueTree(view, k.norm.node, k.norm.codes, (), *how)
            self.trees["k_pe"] = ValueTree(view, k.rope.node, k.rope.codes, k.rope.duplicates, *how)
        self.caches = CachePlanner(view, config, candidate, self.trees, boundary)

    def plan(self, stage_because: str = "") -> Plan:
        """The cheapest exact plan; with ``stage_because``, one that leaves the caches to the model's own writes."""
        self._stage_because = stage_because or self._stage_because
        verdict.judge(self.view, self.candidate)
        if self.candidate.weight_quant_mode:
            self._follow_quantised_norm()
        origin = self.candidate.query.down.origin
        why: Refuse | None = None
        plans: list[Plan] = []
        for choices in (self._token_choices(), self._sources_of_rows()):
            for token_x in choices if not plans else ():
                try:
                    plans.append(self._plan(token_x))
                except Refuse as reason:
                    first = why is None or why.code == "rope.table_shape"  # of a form that the tables do not go with
                    why = reason if first else why
        if not plans:
            layout = f"{origin.name} has shape {list(origin.meta['val'].shape)}"
            raise why or Refuse("token_x.layout", layout, (origin,))
        best = min(plans, key=_cost)
        self._check_memory(best)
        return replace(best, borrowers=tuple(self._no_other_reader(best)))

    def _follow_quantised_norm(self) -> None:
        """The kernel gives c_q out as int8 and scales, so those are what its readers must read."""
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
            self.trees |= {name: tree for name, tree in zip(self._normed, trees, strict=False) if tree is not None}

    def _token_choices(self) -> list[Node]:
        """Forms of x that are rows of tokens, [T, He] or [B, S, He], innermost first, one of each shape."""
        down = self.candidate.query.down
        wanted = torch.bfloat16 if down.quantised is None else torch.int8
        found: dict[tuple[int, ...], Node] = {}
        if down.activation_labels[-1] != down.summed[0] or down.row_labels != down.token_labels:
            return []
        for node in upward(down.activation, rows_and_exact_casts):
            value = node.meta["val"]
            if value.dim() in (2, 3) and value.dtype == wanted:
                found.setdefault(self.view.binding.shape(value.shape), node)
        return list(found.values())

    def _sources_of_rows(self) -> Iterator[Node]:
        """Further up, x where the activation is its rows in token order by other views (permuted unit axes, x^T)."""
        down = self.candidate.query.down
        for node in upward(down.activation, views_and_model_casts):
            value = node.meta["val"]
            is_rows = value.dim() in (2, 3) and value.dtype == torch.bfloat16
            if is_rows and projection.reads_whole(self.view, replace(down, origin=node)):
                yield node

    def _plan(self, token_x: Node) -> Plan:
        q, k = self.candidate.query, self.candidate.key
        lead = self.view.binding.shape(token_x.meta["val"].shape[:-1])
        if self.candidate.shrink is not None:
            lead = self.candidate.shrink.lead(lead)
        for run in (*k.cos, *k.sin):
            if not self._has_rows(run, lead):
                detail = f"{run.base.name} has shape {list(run.base.meta['val'].shape)} for tokens {list(lead)}"
                raise Refuse("rope.table_shape", detail, (run.base,))
        shapes = {
            "query": (*lead, q.absorb.heads, q.absorb.latent_dim),
            "q_nope": (*lead, q.absorb.heads, q.absorb.nope_dim),
            "query_rope": (*lead, q.rope.heads, q.rope.rope_dim),
            "dequant_scale_q_nope": (math.prod(lead), q.absorb.heads, 1),
            "query_norm": (*lead, len(q.norm.columns)),
            "dequant_scale_q_norm": (math.prod(lead), 1),
            "c_kv": (*lead, len(k.columns)),
            "k_pe": (*lead, k.rope_dim),
        }
        ups = [part.node for item in (q.up_nope, q.up_rope) for part in item.by_weight]
        interleaved = q.rope.layout == "interleaved" and self.config.kr_layout == "exact"
        placement = self.caches.place(token_x, interleaved, self._stage_because)
        query = "query" if isinstance(q.absorb, AbsorbFact) else "q_nope"
        trees = {query: self.trees["query"], "query_rope": self.trees["query_rope"]}
        trees |= placement.query.trees if placement.query is not None else {}
        replacements = [r for name, tree in trees.items() for r in tree.replacements(name, shapes[name])]
        normed = [r for name in self._normed for r in self._of_normed(name, shapes[name], ups)]
        if normed and q.absorb.factor != 1.0:
            raise Refuse("reader.latent", f"{normed[0].node.name} reads c_q before it is scaled", (normed[0].node,))
        caches, of_caches = placement.caches, list(placement.found)
        if isinstance(caches, Staged):
            if self.config.staging == "never":
                raise Refuse(caches.code or "cache.staging_forbidden", caches.reason, self.candidate.nodes[-2:])
            of_caches = [r for name in ("c_kv", "k_pe") for r in self.trees[name].replacements(name, shapes[name])]
        slots_given = isinstance(caches, InPlace) and k.operator is None and caches.slots.span is None
        checked = self.boundary and self.config.slots == "checked"
        read_back = isinstance(caches, InPlace) and any(item.output in ("c_kv", "k_pe") for item in of_caches)
        ratio = rotation_ratio(self.view, q, k)
        assert ratio is not None  # judged
        return Plan(
            candidate=self.candidate,
            token_x=token_x,
            kernel_heads=_heads_of_call(q.absorb.heads, self.config),
            cos=k.cos,
            sin=k.sin,
            caches=caches,
            query_norm=bool(normed),
            eps_cq=q.norm.eps,
            eps_ckv=k.eps,
            qc_qr_scale=q.norm.scale * ratio,
            kc_scale=k.scale / placement.query.ratio if placement.query is not None else k.scale,
            replacements=(*replacements, *normed, *of_caches),
            interleave=frozenset({"query_rope", "k_pe"}) if interleaved else frozenset(),
            assumptions=tuple(
                text
                for text, taken in (
                    (_SLOTS_ASSUMED.format(whose=_trust(caches)), slots_given and not checked),
                    (_UNCHECKED, slots_given and not checked and self.config.slots == "checked"),
                    (_ROWS_READ_BACK, read_back),
                    (_IDENTITY, query == "q_nope"),
                    (_NARROW, any(_is_wide(gamma) for gamma in (q.norm.gamma, k.gamma))),
                )
                if taken
            ),
        )

    def _of_normed(self, name: str, shape: tuple[int, ...], ups: list[Node]) -> list[Replacement]:
        """What reads c_q beside the products ``ups`` (and the nodes inside them)."""
        tree = self.trees[name]
        readers = {user for users in tree.readers().values() for user in users}
        return tree.replacements(name, shape, {user for user in readers if leads_only_to([user], ups) is None})

    def _has_rows(self, run: TableRun, lead: tuple[int, ...]) -> bool:
        """Can the table, with a row a position or a row a sequence, be spread over tokens [B, S]?"""
        if run.rows not in ("position", "sequence"):
            return True
        shape = self.view.binding.shape(run.base.meta["val"].shape)
        if self.candidate.shrink is not None:
            shape = self.candidate.shrink.rows(shape)
        return len(lead) == 2 and math.prod(shape[:-1]) == lead[-1 if run.rows == "position" else 0]

    def _check_memory(self, plan: Plan) -> None:
        """Strides can be given to a copy of the kernel's result; memory around the replaced value cannot."""
        if not self.view.reads_by_strides:
            return
        parts = [item.node for item in plan.replacements if not _fills_its_memory(item.node.meta["val"])]
        by = strides.reader(parts)
        if by is not None:
            raise Refuse("reader.latent", f"{by.name} reads the memory in which {parts[0].name} lies", (parts[0], by))

    # -- what must be dead afterwards

    def _no_other_reader(self, plan: Plan) -> list[Node]:
        """After the replacements nothing may keep a product of the region alive; who only borrows is returned."""
        cut = {replacement.node for replacement in plan.replacements}
        q, key = self.candidate.query, self.candidate.key
        joined = {item.node for item in (q.down, q.up_nope, q.up_rope, key.down, key.down_rope)}
        region = joined | {item.node for item in verdict.projections(self.candidate)}
        stops = cut | region
        if self.candidate.weight_quant_mode:  # the quantisation of c_q: its results are the replaced ones
            stops |= {node for root in self.trees["query_norm"].roots for node in root.all_input_nodes}
        stops |= {base.args[0] for base in map(peel, cut) if is_getitem(base)}  # type: ignore[misc]  # of the int8 query
        if key.operator is not None:
            stops.add(key.operator.node)
        if isinstance(plan.caches, InPlace) and key.operator is None:
            stops |= {
                user for name in ("c_kv", "k_pe") for users in self.trees[name].readers().values() for user in users
            }
        borrowers: dict[Node, None] = {}
        for product in sorted(region - cut, key=self.view.position.__getitem__):
            seen, stack = {product}, [product]
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
                        path = next((n for n in user.all_input_nodes if n in seen), product)
                        detail = f"{user.name} reads {path.name}, made from {product.name}"
                        raise Refuse("reader.latent", detail, (product, path, user))
                    stack.append(user)
        return list(borrowers)


def _duplicates(absorb: AbsorbFact | UnabsorbedFact) -> tuple[tuple[Node, torch.Tensor], ...]:
    return absorb.roots[1:] if isinstance(absorb, UnabsorbedFact) else ()


def _heads_of_call(heads: int, config: Config) -> int:
    """The least number of heads, no fewer than the model's, that the kernel takes; the model's where there is none."""
    machine = config.machine
    taken = limits("npu_mla_prolog_v3", machine.soc, machine.cann).dims["N"]
    return next((count for count in range(heads, _MOST_HEADS + 1) if count in taken), heads)


_MOST_HEADS = 128


def _is_wide(gamma: Node | None) -> bool:
    return gamma is not None and gamma.meta["val"].dtype != torch.bfloat16


def _fills_its_memory(value: torch.Tensor) -> bool:
    return same(value.untyped_storage().nbytes(), value.numel() * value.element_size())


def _trust(caches: InPlace | Staged) -> str:
    inputs = caches.trusted if isinstance(caches, InPlace) else ()
    names = ", ".join(node.name for node in inputs)
    return f" (input {names}, trusted)" if names else ""


def _cost(plan: Plan) -> int:
    """Nodes that the choice of token axes adds to the graph."""
    return sum(not replacement.is_free for replacement in plan.replacements) + _reshaped(plan)


def _reshaped(plan: Plan) -> int:
    lead = plan.token_x.meta["val"].shape[:-1]
    tables = {run.base for run in (*plan.cos, *plan.sin)}
    return sum(not is_symbolic(b) and not same_shape(b.meta["val"].shape[:-1], lead) for b in tables)
