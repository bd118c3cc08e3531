"""From a candidate to a plan: token axis, outputs, caches, attributes. Nothing is changed here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.facts import cache_write, projection, row_quant
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.cache_write import Slots, WriteFact
from mla_fusion.facts.rope import TableRun
from mla_fusion.facts.row_quant import CacheScale
from mla_fusion.facts.unabsorbed import UnabsorbedFact
from mla_fusion.fusion import verdict
from mla_fusion.fusion.candidate import Candidate, same_table
from mla_fusion.fusion.outputs import Replacement, ValueTree, live_users, quantised_norm, whole_readers
from mla_fusion.fusion.plan import InPlace, Plan, Staged
from mla_fusion.fusion.rejection import Refuse
from mla_fusion.graph.kinds import borrows_only, has_effect, is_faithful_cast, is_getitem, is_reshape
from mla_fusion.graph.sizes import is_symbolic, same_shape
from mla_fusion.graph.view import View, ancestry

_SLOTS_ASSUMED = "slots are non-negative and distinct (the kernel skips negative slots, index_put wraps them)"

_IDENTITY = "q_nope is taken through weight_uk = [I | 0] (Config.unabsorbed is 'identity')"


class Planner:
    """Plans one candidate. Raises ``Refuse`` where no exact plan exists."""

    def __init__(self, view: View, config: Config, candidate: Candidate, boundary: bool = False) -> None:
        """``boundary``: a wrapper stands around the graph and can view a cache in the kernel's shape."""
        self.view, self.config, self.candidate, self.boundary = view, config, candidate, boundary
        self._stage_because = "Config.staging is 'always'" if config.staging == "always" else ""
        q, k, shrink = candidate.query, candidate.key, candidate.shrink
        self.trees = {
            "query": ValueTree(view, q.absorb.node, q.absorb.codes, _twins(q.absorb), shrink),
            "query_rope": ValueTree(view, q.rope.node, q.rope.codes, q.rope.twins, shrink),
            "query_norm": ValueTree(view, q.norm.node, q.norm.codes, shrink=shrink),
        }
        self._normed: tuple[str, ...] = ("query_norm",)
        if k.norm is not None and k.rope is not None:
            self.trees["c_kv"] = ValueTree(view, k.norm.node, k.norm.codes, shrink=shrink)
            self.trees["k_pe"] = ValueTree(view, k.rope.node, k.rope.codes, k.rope.twins, shrink)

    def plan(self, stage_because: str = "") -> Plan:
        """The cheapest exact plan; with ``stage_because``, one that leaves the caches to the model's own writes."""
        self._stage_because = stage_because or self._stage_because
        verdict.judge(self.view, self.candidate)
        if self.candidate.weight_quant_mode:
            self._follow_quantised_norm()
        origin = self.candidate.query.down.origin
        why = Refuse("token_x.layout", f"{origin.name} has shape {list(origin.meta['val'].shape)}", (origin,))
        plans: list[Plan] = []
        for choices in (self._token_choices(), self._sources_of_rows()):
            for token_x in choices if not plans else ():
                try:
                    plans.append(self._plan(token_x))
                except Refuse as reason:
                    why = reason
        if not plans:
            raise why
        best = min(plans, key=_cost)
        return replace(best, borrowers=tuple(self._no_other_reader(best)))

    def _follow_quantised_norm(self) -> None:
        """The kernel gives c_q out as int8 and scales, so those are what its readers must read."""
        candidate = self.candidate
        if self._normed == ("query_norm",):
            self._normed = ("query_norm", "dequant_scale_q_norm")
            trees = quantised_norm(self.view, candidate.query.up_nope, self.trees["query_norm"], candidate.shrink)
            self.trees |= dict(zip(self._normed, trees, strict=True))

    def _token_choices(self) -> list[Node]:
        """Forms of x that are rows of tokens, [T, He] or [B, S, He], innermost first, one of each shape."""
        down = self.candidate.query.down
        node = down.activation
        wanted = torch.bfloat16 if down.quantised is None else torch.int8
        found: dict[tuple[int, ...], Node] = {}
        if down.activation_labels[-1] != down.summed[0] or down.row_labels != down.token_labels:
            return []
        while True:
            value = node.meta["val"]
            if value.dim() in (2, 3) and value.dtype == wanted:
                found.setdefault(self.view.binding.shape(value.shape), node)
            if not (is_reshape(node) or is_faithful_cast(node)) or not isinstance(node.args[0], Node):
                return list(found.values())
            if node.args[0].meta["val"].shape[-1] != value.shape[-1]:
                return list(found.values())
            node = node.args[0]

    def _sources_of_rows(self) -> Iterator[Node]:
        """Further up, x where the activation is its rows in token order by other views (permuted unit axes, x^T)."""
        down = self.candidate.query.down
        for node in ancestry(down.activation):
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
            "query_norm": (*lead, len(q.norm.columns)),
            "dequant_scale_q_norm": (math.prod(lead), 1),
            "c_kv": (*lead, len(k.columns)),
            "k_pe": (*lead, k.rope_dim),
        }
        ups = [part.node for item in (q.up_nope, q.up_rope) for part in item.parts]
        query = "query" if isinstance(q.absorb, AbsorbFact) else "q_nope"
        replacements = self.trees["query"].replacements(query, shapes[query])
        replacements += self.trees["query_rope"].replacements("query_rope", shapes["query_rope"])
        normed = [r for name in self._normed for r in self.trees[name].replacements(name, shapes[name], ups)]
        if normed and q.absorb.factor != 1.0:
            raise Refuse("reader.latent", f"{normed[0].node.name} reads c_q before it is scaled", (normed[0].node,))
        interleaved = q.rope.layout == "interleaved" and self.config.kr_layout == "exact"
        caches, of_caches = self._caches(token_x, interleaved)
        if isinstance(caches, Staged):
            if self.config.staging == "never":
                raise Refuse("cache.staging_forbidden", caches.reason, self.candidate.nodes[-2:])
            of_caches = [r for name in ("c_kv", "k_pe") for r in self.trees[name].replacements(name, shapes[name])]
        if isinstance(caches, InPlace):
            caches = replace(caches, slots=_shaped(caches.slots, token_x.meta["val"].shape[:-1]))
        slots_given = isinstance(caches, InPlace) and k.operator is None
        ratio = same_table(self.view, q.rope.cos, k.cos)
        assert ratio is not None  # judged
        return Plan(
            self.candidate,
            token_x,
            k.cos,
            k.sin,
            caches,
            bool(normed),
            q.norm.eps,
            k.eps,
            q.norm.scale * ratio,
            k.scale,
            (*replacements, *normed, *of_caches),
            frozenset({"query_rope", "k_pe"}) if interleaved else frozenset(),
            ((_SLOTS_ASSUMED,) if slots_given else ()) + ((_IDENTITY,) if query == "q_nope" else ()),
        )

    def _has_rows(self, run: TableRun, lead: tuple[int, ...]) -> bool:
        """Can the table, with a row a position or a row a sequence, be spread over tokens [B, S]?"""
        if run.rows not in ("position", "sequence"):
            return True
        shape = self.view.binding.shape(run.base.meta["val"].shape)
        if self.candidate.shrink is not None:
            shape = self.candidate.shrink.rows(shape)
        return len(lead) == 2 and math.prod(shape[:-1]) == lead[-1 if run.rows == "position" else 0]

    # -- caches

    def _caches(self, token_x: Node, interleaved: bool) -> tuple[InPlace | Staged, list[Replacement]]:
        """Write the model's caches in the kernel where that is exact, else say why not."""
        if self.candidate.key.operator is not None:
            return self._operator_caches(token_x)
        if self._stage_because:
            return Staged(self._stage_because), []
        if interleaved:
            return Staged("RoPE leaves interleaved rows and the kernel writes half rows"), []
        writes, scales = [], []
        for name in ("c_kv", "k_pe"):
            write, scale = self._single_write(name)
            if isinstance(write, str):
                return Staged(write), []
            writes.append(write)
            scales.append(scale)
        kv, kr = writes
        reason = self._joint_reason(token_x, kv, kr) or self._scales_reason(scales)
        if reason:
            return Staged(reason), []
        kv_shape, kr_shape = (cache_write.paged_shape(write.cache) for write in writes)
        assert kv_shape is not None and kr_shape is not None
        found = [
            r
            for name, write, shape in (("kv_cache", kv, kv_shape), ("kr_cache", kr, kr_shape))
            for r in whole_readers(write.result, name, shape, same_shape)
        ]
        in_place = InPlace(kv.cache, kr.cache, kv_shape, kr_shape, _source_of_both(kv.slots, kr.slots), "PA_BSND")
        return replace(in_place, kv_scale=scales[0], kr_scale=scales[1]), found

    def _single_write(self, name: str) -> tuple[WriteFact | str, CacheScale | None]:
        """The one write that takes the new rows, whole and in token order, and what they are scaled by into int8."""
        tree = self.trees[name]
        readers = tree.readers()
        if len(readers) != 1:
            return f"the new {name} rows are read at {len(readers)} places", None
        ((value, users),) = readers.items()
        if len(users) != 1:
            return f"{value.name} is read by {', '.join(user.name for user in users)}", None
        codes = tree.codes[value]
        if not isinstance(codes, torch.Tensor) or not torch.equal(
            codes.reshape(-1).long(), torch.arange(codes.numel())
        ):
            return f"{value.name} does not hold the rows in token order", None
        quantised = row_quant.find(self.view, value)
        if quantised is None:
            return cache_write.find(self.view, users[0], value), None
        writers = live_users(quantised.node)
        if len(writers) != 1:
            return f"{quantised.node.name} is read by {', '.join(user.name for user in writers)}", None
        return cache_write.find(self.view, writers[0], quantised.node), quantised.scale

    def _scales_reason(self, scales: list[CacheScale | None]) -> str:
        """Why rows scaled so are in no kv_cache_quant_mode, or ""; mode 2 goes with int8 W_uq_qr alone."""
        mode = self.candidate.weight_quant_mode
        if not any(scales) or (all(scales) and mode == 1):
            return ""
        return f"int8 rows of {'both caches' if all(scales) else 'one cache'} do not go with weight_quant_mode {mode}"

    def _joint_reason(self, token_x: Node, kv: WriteFact, kr: WriteFact) -> str:
        """Why two writes are not the pair that the kernel does, or ""."""
        if kv.cache is kr.cache:
            return f"both writes go to {kv.cache.name}"
        shapes = [cache_write.paged_shape(write.cache) for write in (kv, kr)]
        if not same_shape((shapes[0] or ())[:3], (shapes[1] or ())[:3]):
            return f"{kv.cache.name} and {kr.cache.name} differ in blocks"
        for write, shape in zip((kv, kr), shapes, strict=True):
            if not self.boundary and not same_shape(write.cache.meta["val"].shape, shape or ()):
                found = list(write.cache.meta["val"].shape)
                return f"{write.cache.name} has shape {found}, and no wrapper can view it as {list(shape or ())}"
        if not self._same_slots(kv.slots, kr.slots):
            return f"{kv.cache.name} and {kr.cache.name} are written at different slots"
        slots = kv.slots.nodes[0].meta["val"].shape
        if not self._as_many(slots, token_x):
            tokens = list(token_x.meta["val"].shape[:-1])
            return f"{kv.slots.nodes[0].name} has {list(slots)} slots for tokens {tokens}"
        for write in (kv, kr):
            late = cache_write.readers(write.cache, write.node, write.result)
            if late:
                return f"{late[0].name} reads {write.cache.name} as it was before the write"
            width = self.view.binding.size(write.cache.meta["val"].shape[-1])
            if width not in (len(self.candidate.key.columns), self.candidate.key.rope_dim):
                return f"{write.cache.name} is {width} wide"
            if write.cache.meta["val"].dtype != write.value.meta["val"].dtype:
                return f"{write.cache.name} is {write.cache.meta['val'].dtype}"
        return ""

    def _as_many(self, slots: Sequence[Any], token_x: Node) -> bool:
        """Is there, whenever the graph runs, a slot for each token?"""
        return self.view.binding.same(math.prod(token_x.meta["val"].shape[:-1]), math.prod(slots))

    def _same_slots(self, a: Slots, b: Slots) -> bool:
        pairs = zip((a.index, a.block, a.offset), (b.index, b.block, b.offset), strict=True)
        return all(
            x is y or (x is not None and y is not None and self.view.same(_unshaped(x), _unshaped(y))) for x, y in pairs
        )

    def _operator_caches(self, token_x: Node) -> tuple[InPlace, list[Replacement]]:
        operator = self.candidate.key.operator
        assert operator is not None
        slots = operator.index.meta["val"].shape
        if not self._as_many(slots, token_x):
            tokens = list(token_x.meta["val"].shape[:-1])
            detail = f"{operator.index.name} has {list(slots)} slots for tokens {tokens}"
            raise Refuse("cache.slots", detail, (operator.node, operator.index))
        if operator.cache_mode is None or operator.other is not None:
            detail = f"{operator.node.name} has {operator.other or 'another cache_mode'}"
            raise Refuse("cache.operator_mode", detail, (operator.node,))
        scales = (operator.kv_scale, operator.kr_scale)
        if any(scales) and not (all(scales) and self.candidate.weight_quant_mode == 1):
            given = " and ".join(scale.name for scale in scales if scale is not None)
            detail = f"{operator.node.name} scales by {given}, weight_quant_mode {self.candidate.weight_quant_mode}"
            raise Refuse("quant.cache", detail, (operator.node,))
        inputs = [self._input_of_operator(operator.node, cache) for cache in (operator.kv_cache, operator.kr_cache)]
        parts = {node.args[1]: node for node in operator.node.users if is_getitem(node) and live_users(node)}
        k_pe, c_kv, kr, kv = operator.results
        for index, name in ((k_pe, "k_pe"), (c_kv, "c_kv")):
            if index in parts:
                raise Refuse("reader.latent", f"{parts[index].name} reads the new {name} rows", (parts[index],))
        found = []
        for index, name, cache in ((kv, "kv_cache", operator.kv_cache), (kr, "kr_cache", operator.kr_cache)):
            if index in parts:
                found += whole_readers(parts[index], name, cache.meta["val"].shape, same_shape)
        kv_shape, kr_shape = (tuple(cache.meta["val"].shape) for cache in (operator.kv_cache, operator.kr_cache))
        in_place = InPlace(
            inputs[0],
            inputs[1],
            kv_shape,
            kr_shape,
            Slots(operator.index),
            operator.cache_mode,
            operator.hidden_write,
            CacheScale(operator.kv_scale) if operator.kv_scale is not None else None,
            CacheScale(operator.kr_scale) if operator.kr_scale is not None else None,
        )
        return in_place, found

    def _input_of_operator(self, operator: Node, cache: Node) -> Node:
        """The graph input that the operator writes to: its operand itself, or what a wrapper can view so."""
        found = cache_write.input_behind(cache)
        if found is None or (found is not cache and not self.boundary):
            raise Refuse("cache.view_of_input", f"{cache.name} in {operator.name}", (operator, cache))
        others = cache_write.readers(found, operator)
        if others:
            raise Refuse("cache.view_of_input", f"{others[0].name} also reads {found.name}", (others[0], found))
        return found

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
        if key.operator is not None:
            stops.add(key.operator.node)
        if isinstance(plan.caches, InPlace) and key.operator is None:
            stops |= {
                user for name in ("c_kv", "k_pe") for users in self.trees[name].readers().values() for user in users
            }
        borrowers: dict[Node, None] = {}
        for product in region - cut:
            seen, stack = {product}, [product]
            while stack:
                for user in live_users(stack.pop()):
                    if user in seen or user in stops:
                        continue
                    seen.add(user)
                    if borrows_only(user):
                        borrowers[user] = None
                        continue
                    if user.op == "output" or has_effect(user) or user in self.view.sources(user):
                        path = next((n for n in user.all_input_nodes if n in seen), product)
                        detail = f"{user.name} reads {path.name}, made from {product.name}"
                        raise Refuse("reader.latent", detail, (product, path, user))
                    stack.append(user)
        return list(borrowers)


def _twins(absorb: AbsorbFact | UnabsorbedFact) -> tuple[tuple[Node, torch.Tensor], ...]:
    return absorb.roots[1:] if isinstance(absorb, UnabsorbedFact) else ()


def _shaped(slots: Slots, lead: Sequence[object]) -> Slots:
    """The slots as what they reshape, where that already has the wanted shape (saves a reshape)."""
    node = slots.index
    while node is not None and not same_shape(node.meta["val"].shape, lead):
        source = node.args[0] if is_reshape(node) else None
        node = source if isinstance(source, Node) else None
    return slots if node is None else Slots(node)


def _source_of_both(a: Slots, b: Slots) -> Slots:
    """Of slots that are equal, what both are made from."""
    return a if a == b or a.index is None else Slots(_unshaped(a.index))


def _unshaped(node: Node) -> Node:
    while (is_reshape(node) or is_faithful_cast(node)) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _cost(plan: Plan) -> int:
    """Nodes that the choice of token axes adds to the graph."""
    return sum(not replacement.is_free for replacement in plan.replacements) + _reshaped(plan)


def _reshaped(plan: Plan) -> int:
    lead = plan.token_x.meta["val"].shape[:-1]
    tables = {run.base for run in (*plan.cos, *plan.sin)}
    return sum(not is_symbolic(b) and not same_shape(b.meta["val"].shape[:-1], lead) for b in tables)
