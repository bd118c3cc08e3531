"""From a proposal to a plan: proved, placed, judged, and taken by the operator's contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import prod

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.exact.prove import Claim, prove
from mla_fusion.fx.kinds import dtype_of, signature
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, order
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.meta import limits
from mla_fusion.plan import contract, policy
from mla_fusion.plan.caches import PAIRS, InPlace, Obstacle, Setting, Staged, Write, place_rows
from mla_fusion.plan.outputs import has_effect, is_size, strip_reshapes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.region import find_region, nodes_between
from mla_fusion.plan.structure import Structures
from mla_fusion.propose.given import Given
from mla_fusion.propose.kept import as_kept
from mla_fusion.propose.padded import padded
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.sites import Projections

aten = torch.ops.aten
_MOST_HEADS = 128
SLOTS_ASSUMED = (
    "slots are non-negative{whose} and distinct (the kernel skips negative slots, the model wraps "
    "them)"
)
UNCHECKED = (
    "nothing checks the slots (Config.slots is 'checked'): no wrapper stands around the graph"
)
ROWS_READ_BACK = (
    "the new rows are read back from the caches: of a token without a slot nobody reads them"
)
HALVES = (
    "{cache} and query_rope hold halves (a0 a1 .. b0 b1 ..), not the model's pairs (a0 b0 a1 b1 "
    "..), because Config.kr_layout is 'half': everything that reads or writes this cache must use "
    "halves, and rows that it holds already must be halves"
)
IDENTITY = "q_nope is finite: weight_uk = [I | 0] multiplies it (Config.targets names 'identity')"


class Planner:
    """Of one graph.

    boundary  a wrapper will stand around the graph, so that caches can be viewed before the call
    """

    def __init__(
        self, graph: Graph, projections: Projections, config: Config, boundary: bool
    ) -> None:
        self.graph, self.projections, self.config = graph, projections, config
        self.boundary = boundary
        self.taken = set[Value]()  # writes of the plans that are done
        self._structures = Structures(graph)
        self._taken: dict[object, tuple[str, ...]] = {}  # what is assumed of sizes, by structure
        self._proofs: dict[object, tuple[list[Value], tuple[list[int], int] | Departure]] = {}

    @cached_property
    def _holding(self) -> dict[Value, list[Node]]:
        """The nodes that hold a Value, or a number times it."""
        found: dict[Value, list[Node]] = {}
        for value, nodes in self.graph.nodes.items():
            found.setdefault(self.graph.form.split(value)[1], []).extend(nodes)
        return found

    def plan(self, proposal: Proposal) -> Plan:
        """Raises Departure."""
        target = _target(proposal)
        if target not in self.config.targets:
            detail = f"Config.targets is {self.config.targets}"
            raise Departure("target.unlisted", detail, proposal.products)
        for other in as_kept(self.projections, proposal):
            try:
                plan = self._planned(other)
            except Departure:
                continue
            if isinstance(plan.caches, InPlace):
                return plan
        try:
            return self._planned(proposal)
        except Departure as reason:
            heads = self._heads(proposal) if reason.code == "contract:dims.n" else 0
            more = padded(self.projections, proposal, heads) if heads else None
            if more is None:
                raise
            return self._planned(more)

    def _heads(self, proposal: Proposal) -> int:
        """The least number, above that of the model, that the kernel takes; 0 where there is
        none.
        """
        own, machine = proposal.arguments["weight_uk"].shape[0], self.config.machine
        taken = limits("npu_mla_prolog_v3", machine.soc, machine.cann).dims["N"]
        return next((count for count in range(own + 1, _MOST_HEADS + 1) if count in taken), 0)

    def _planned(self, proposal: Proposal) -> Plan:
        held, compared = self._proved(proposal)
        plan = self._placed(proposal, held, compared)
        policy.functional(self.graph, plan.inputs)
        plan.structure = self._structures.of(plan)
        key = plan.structure, proposal.arguments["token_x"].active
        sizes = self._taken.get(key)
        made_anew = nodes_between(plan.replaced, plan.inputs)
        if sizes is None:
            policy.judge(self.graph, proposal, sorted({*plan.region, *made_anew}))
            asked = plan
            plan, sizes = self._accepted(asked, held)
            if plan is asked:
                self._taken[key] = sizes
            else:
                plan.structure = self._structures.of(plan)
        more = [
            *plan.warnings,
            *_of_slots(plan, self.config, self.boundary),
            *([ROWS_READ_BACK] if _reads_rows_back(plan) else []),
            *([IDENTITY] if proposal.instead is not None else []),
            *policy.narrowed(self.graph, plan.proposal),
            *self._assumed(plan, {*plan.region, *made_anew, *_slots(plan)}),
        ]
        return replace(plan, assumptions=(*more, *sizes))

    def _assumed(self, plan: Plan, nodes: set[Node]) -> Iterator[str]:
        """What was taken for granted of the nodes, and of how x becomes bytes."""
        own = (one for node in sorted(nodes) for one in self.graph.registered.get(node, ()))
        for target in dict.fromkeys(own):
            yield f"{target} computes what was registered for it"
        graph, stack = self.graph, plan.inputs if self.graph.assumed else []
        while stack:
            node = stack.pop()
            reading = graph.readings[node]
            is_made = isinstance(reading, Value) and reading.active and node not in nodes
            if is_made and dtype_of(node) != torch.bfloat16:
                nodes.add(node)
                stack += node.all_input_nodes
        for node in sorted(nodes):
            for line in graph.assumed.get(node, ()):
                yield f"{line} at {node.name}"

    def _proved(self, proposal: Proposal) -> tuple[list[Claim], int]:
        """The claims that hold, and how many elements were compared. Proved once for each
        structure. Raises Departure.
        """
        key, values = proposal.numbered()
        if key not in self._proofs:
            self._proofs[key] = values, self._proof(proposal)
        before, proof = self._proofs[key]
        if isinstance(proof, Departure):
            here = dict(zip(before, values, strict=True))
            at = [here[value] for value in proof.values if value in here]
            raise Departure(proof.code, proof.detail, at or proposal.products)
        more, compared = proof
        return [*proposal.claims, *(proposal.more[place] for place in more)], compared

    def _proof(self, proposal: Proposal) -> tuple[list[int], int] | Departure:
        """Which of the further claims hold; how many elements of the others were compared."""
        form, tokens, given = self.graph.form, proposal.x.shape[0], proposal.given
        try:
            defined = [proposal.as_defined(form, claim) for claim in proposal.claims]
            compared = prove(given, tokens, defined)
        except Departure as departure:
            return departure
        more = list[int]()
        for place, claim in enumerate(proposal.more):
            with suppress(Departure):
                prove(given, tokens, [proposal.as_defined(form, claim)])
                more.append(place)
        return more, compared

    def _placed(self, proposal: Proposal, held: list[Claim], compared: int) -> Plan:
        graph, config = self.graph, self.config
        if config.staging == "always":
            caches: InPlace | Staged = Staged(
                (Obstacle("config.staging", "Config.staging is 'always'"),)
            )
            is_half = False
        else:
            whole = held
            held, is_half = self._in_halves(proposal, held)
            given = Given(graph.form, held)
            setting = Setting(self.boundary, config.machine)
            writes = self.projections.sites[proposal.x].writes
            caches = place_rows(graph, proposal, given, writes, setting)
            if isinstance(caches, InPlace):
                for write in caches.writes.values():
                    if _writer(graph, write) is None:
                        detail = f"a step writes into {write.cache.name} where it lies"
                        caches = Staged((Obstacle("cache.not_functional", detail),))
                        break
            if is_half and isinstance(caches, Staged):  # nothing is kept otherwise, then
                held, is_half = whole, False
        plan = self._with(proposal, held, caches, compared)
        if is_half:
            last = [cache.name for _, cache, _ in plan.written_caches][-1]
            plan = replace(plan, warnings=(HALVES.format(cache=last),))
        late = self._old_rows_read(plan)
        return self._staged(plan, held, late) if late is not None else self._allowed(plan)

    def _in_halves(self, proposal: Proposal, held: list[Claim]) -> tuple[list[Claim], bool]:
        """By Config.kr_layout the model's own rows are said to be halves, as the kernel's."""
        behind = proposal.rotation[1] if proposal.rotation is not None else ""
        if self.config.kr_layout != "half" or behind != "interleaved":
            return held, False
        form, results = self.graph.form, proposal.results
        rows = {"query_rope": results.query_rope, "kr_rows": results.kr_rows}
        found = []
        for claim in held:
            leaf, kernel = rows.get(claim.part), claim.kernel
            if leaf is not None and prod(leaf.shape) == prod(claim.graph.shape):
                kernel = form.reshape(leaf, claim.graph.shape)
            found.append(Claim(claim.part, claim.graph, kernel))
        return found, True

    def _with(
        self, proposal: Proposal, held: list[Claim], caches: InPlace | Staged, compared: int
    ) -> Plan:
        graph = self.graph
        claims = _read_back(graph, proposal, caches, held) if isinstance(caches, InPlace) else held
        starts = [
            node
            for value in proposal.products
            for node in self._holding.get(value) or graph.nodes_in_any_shape(value)
        ]
        if isinstance(caches, InPlace):
            writers = (_writer(graph, write) for write in caches.writes.values())
            starts += [node for node in writers if node is not None]
        try:
            region, replaced = find_region(graph, Given(graph.form, claims), starts)
        except Departure as reason:  # of a fused cache operator, which needs more than the rows
            found = caches.obstacles if isinstance(caches, Staged) else ()
            for first in [one for one in found if one is not PAIRS][:1]:
                detail = f"{reason.detail}; not in place: [{first.code}] {first.message}"
                raise Departure(reason.code, detail, reason.values) from None
            raise
        if not replaced:
            detail = f"{len(region)} nodes of the prologue"
            raise Departure("graph.unread", detail, proposal.products)
        return Plan(graph, _target(proposal), proposal, caches, claims, region, replaced, compared)

    def _staged(self, plan: Plan, held: list[Claim], because: Obstacle) -> Plan:
        made = self._with(plan.proposal, held, Staged((because,)), plan.compared)
        return self._allowed(made)

    def _allowed(self, plan: Plan) -> Plan:
        if isinstance(plan.caches, Staged) and self.config.staging == "never":
            first = plan.caches.obstacles[0]
            code = "slots.unproven" if first.code == "slots.unproven" else ""
            detail = f"[{first.code}] {first.message}"
            raise Departure(code or "cache.staging_forbidden", detail, plan.proposal.products)
        return plan

    def _accepted(self, plan: Plan, held: list[Claim]) -> tuple[Plan, tuple[str, ...]]:
        """By the operator's contract, with what that assumes of sizes; where it refuses the caches
        alone, staged.
        """
        source = self.graph.gm.graph
        try:
            sizes = contract.ask(plan, self.config, source)
        except Departure as reason:
            if not isinstance(plan.caches, InPlace) or self.config.staging == "never":
                raise
            code = reason.code.partition(":")[2]
            message = f"the kernel refuses the caches ({code}): {reason.detail}"
            try:
                plan = self._staged(plan, held, Obstacle("cache.refused", message))
                sizes = contract.ask(plan, self.config, source)
            except Departure:
                raise reason from None  # it was not the caches
        return plan, sizes

    def _old_rows_read(self, plan: Plan) -> Obstacle | None:
        """A node that reads a cache as it was before the call, and more comes of it than the new
        cache; or another call.
        """
        inside, graph = {*plan.region}, self.graph
        writes = plan.caches.writes if isinstance(plan.caches, InPlace) else {}
        for name, cache, _ in plan.written_caches:
            if writes[name].value in self.taken:
                message = f"another fusion writes the same rows of {name}"
                return Obstacle("cache.rows_read", message)
            path, seen = [(user, user) for user in cache.users], set[Node]()
            while path:
                node, reader = path.pop()
                is_end = node is reader and (node.op == "output" or _is_copy_into(node, cache))
                if node in inside or node in seen or is_end or is_size(node):
                    continue
                seen.add(node)
                if node.op == "output" or has_effect(graph, node):
                    message = f"{reader.name} reads {cache.name} as it was before the write"
                    return Obstacle("cache.old_rows_read", message)
                is_view = graph.base(node) is cache
                path += [(user, user if is_view else reader) for user in node.users]
        return None


def _target(proposal: Proposal) -> str:
    return "v3" if proposal.instead is None else "identity"


def _writer(graph: Graph, write: Write) -> Node | None:
    """The node that gives the cache with its new rows, behind which others hold the same; None of
    one that is written in place.
    """
    stack, before = [write.cache], strip_reshapes(write.value.sources[0])
    for node in stack:
        for user in node.users:
            if user.op == "output" or user.target is aten.copy_.default:
                continue
            if signature(user.target).is_in_place:
                return None
            held = [strip_reshapes(one) for one in values_of(graph.readings[user])]
            if graph.base(user) is write.cache or before in held:  # a copy of it, too
                stack.append(user)
            elif write.value in held:
                return user
    return None


def _is_copy_into(node: Node, cache: Node) -> bool:
    return str(node.target).startswith("aten.copy_.") and node.args[0] is cache


def _read_back(
    graph: Graph, proposal: Proposal, caches: InPlace, claims: list[Claim]
) -> list[Claim]:
    """New rows that somebody reads beside the caches are taken from these."""
    form, results = graph.form, proposal.results
    leaves = {"kv_cache": results.kv_rows, "kr_cache": results.kr_rows}
    rows = {
        leaves[name]: form.gather(write.value, 0, caches.slots)
        for name, write in caches.writes.items()
    }
    found = [Claim(one.part, one.graph, form.substituted(one.kernel, rows)) for one in claims]
    writes = caches.writes.values()
    return [*found, *(Claim("cache", write.value, write.value) for write in writes)]


def _reads_rows_back(plan: Plan) -> bool:
    """Does something read new rows that are in the caches alone?"""
    read = order(plan.replaced.values(), plan.results.values())
    return any(one.op == "gather" and one.sources[0].op == "write" for one in read)


def _slots(plan: Plan) -> list[Node]:
    """The nodes that make the slots of a call in place."""
    caches = plan.caches
    values = order([caches.slots]) if isinstance(caches, InPlace) else ()
    return [node for value in values for node in plan.graph.nodes.get(value, ())]


def _of_slots(plan: Plan, config: Config, boundary: bool) -> list[str]:
    """What is assumed of the slots."""
    caches, graph = plan.caches, plan.graph
    is_hidden = any(cache in graph.hidden for _, cache, _ in plan.written_caches)
    if not isinstance(caches, InPlace) or is_hidden or not caches.trusted_inputs:
        return []
    if boundary and config.slots == "checked":
        return []
    nodes = (graph.nodes[leaf][0] for leaf in caches.trusted_inputs if leaf in graph.nodes)
    names = ", ".join(dict.fromkeys(node.name for node in nodes))
    whose = f" (input {names}, trusted to hold numbers from 0 to 2**24 - 1)" if names else ""
    return [SLOTS_ASSUMED.format(whose=whose), *([UNCHECKED] if config.slots == "checked" else [])]
