"""Makes a plan of a proposal: proves its claims, places the rows, checks dtypes and the contract.

``pipeline.py`` calls ``Planner.plan`` for each proposal of ``propose/``. ``commit/`` verifies the
plan and lowers it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.exact.prove import Claim, outcomes, prove
from mla_fusion.fx.kinds import dtype_of, signature
from mla_fusion.fx.walk import is_copy_into, reached
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, order, strip_reshapes
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.meta import limits
from mla_fusion.plan import contract, policy
from mla_fusion.plan.caches import PAIRS, InPlace, Obstacle, Staged, Write, place_rows
from mla_fusion.plan.outputs import holders, is_size
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.region import find_region
from mla_fusion.plan.slots import input_name
from mla_fusion.plan.structure import structure_of
from mla_fusion.propose.cache_variants import cache_variants
from mla_fusion.propose.padded import pad_heads
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.rewrites import Rewrites, claims_over
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
    "{cache}, its new rows and query_rope hold halves (a0 a1 .. b0 b1 ..), not the model's pairs "
    "(a0 b0 a1 b1 ..), because Config.kr_layout is 'half': everything that reads or writes them "
    "must use halves, and rows that the cache holds already must be halves"
)
IDENTITY = "q_nope is finite: weight_uk = [I | 0] multiplies it (Config.targets names 'identity')"


class Planner:
    """Makes the plans of one graph.

    boundary      True if a wrapper will stand around the graph; it can view caches before the call
    taken_writes  writes of the plans in place that were made so far
    """

    def __init__(
        self, graph: Graph, projections: Projections, config: Config, boundary: bool
    ) -> None:
        self.graph, self.projections, self.config = graph, projections, config
        self.boundary = boundary
        self.taken_writes = set[Value]()
        self._structures: dict[object, int] = {}  # their numbers: a key is long to compare
        # what is assumed about sizes, by structure whose dtypes and limits were accepted
        self._accepted: dict[object, tuple[str, ...]] = {}
        self._proofs: dict[object, tuple[list[Value], tuple[list[int], int] | Departure]] = {}

    def plan(self, proposal: Proposal) -> Plan:
        """Returns the plan of a proposal.

        Variants with quantised caches are tried first, since they may be written in place. If the
        kernel takes no such number of heads, the heads are padded. Raises Departure.
        """
        if proposal.target not in self.config.targets:
            detail = f"Config.targets is {self.config.targets}"
            raise Departure("target.unlisted", detail, proposal.products)
        for variant in cache_variants(self.projections, proposal):
            try:
                plan = self._plan_proposal(variant)
            except Departure:
                continue
            if isinstance(plan.caches, InPlace):
                return plan
        try:
            return self._plan_proposal(proposal)
        except Departure as reason:
            heads = self._padded_head_count(proposal) if reason.code == "contract:dims.n" else 0
            padded_proposal = pad_heads(self.projections, proposal, heads) if heads else None
            if padded_proposal is None:
                raise
            return self._plan_proposal(padded_proposal)

    def _padded_head_count(self, proposal: Proposal) -> int:
        """Returns the least number of heads above the model's that the kernel takes, or 0 if there
        is none.
        """
        heads, machine = proposal.arguments["weight_uk"].shape[0], self.config.machine
        allowed_heads = limits("npu_mla_prolog_v3", machine.soc, machine.cann).dims["N"]
        return next(
            (count for count in range(heads + 1, _MOST_HEADS + 1) if count in allowed_heads), 0
        )

    def _plan_proposal(self, proposal: Proposal) -> Plan:
        """Returns the plan of exactly this proposal. Raises Departure."""
        claims, compared = self._proven_claims(proposal)
        plan = self._place(proposal, claims)
        outputs = (node for node in plan.replaced if self.graph.base(node).op == "call_function")
        policy.check_functional(self.graph, (*plan.inputs, *outputs))
        self._number(plan)
        key = plan.structure, proposal.arguments["token_x"].active
        sizes = self._accepted.get(key)
        if sizes is None:
            policy.check_region(self.graph, proposal, sorted({*plan.region, *plan.steps}))
            first_plan = plan
            plan, sizes = self._accept_contract(first_plan, claims)
            if plan is first_plan:
                self._accepted[key] = sizes
            else:
                self._number(plan)
        assumptions = [
            *plan.warnings,
            *_slot_assumptions(plan, self.config, self.boundary),
            *([ROWS_READ_BACK] if _reads_rows_back(plan) else []),
            *([IDENTITY] if proposal.identity_reason is not None else []),
            *policy.gamma_assumptions(plan.proposal),
            *self._node_assumptions(plan, {*plan.region, *plan.steps, *_slot_nodes(plan)}),
        ]
        plan.compared, plan.assumptions = compared, (*assumptions, *sizes)
        return plan

    def _number(self, plan: Plan) -> None:
        """Gives a plan the number of its structure."""
        plan.structure = self._structures.setdefault(structure_of(plan), len(self._structures))

    def _node_assumptions(self, plan: Plan, nodes: set[Node]) -> Iterator[str]:
        """Yields what is assumed about the nodes of a plan, and about how x becomes bytes and the
        other arguments are made.
        """
        graph, stack = self.graph, [*plan.inputs] if self.graph.assumed else []
        above = set[Node]()
        registered = sorted(  # steps that change no number, too
            node
            for node in graph.registered
            if node in nodes
            or node in plan.inputs
            or any(map(plan.rewrites.of, values_of(graph.readings[node])))
        )
        operators = (operator for node in registered for operator in graph.registered[node])
        for target in dict.fromkeys(operators):
            yield f"{target} computes what was registered for it"
        while stack:
            node = stack.pop()
            reading = graph.readings[node]
            is_rounded = isinstance(reading, Value) and reading.active
            if node not in above and not (is_rounded and dtype_of(node) == torch.bfloat16):
                above.add(node)
                stack += node.all_input_nodes
        for node in sorted((nodes | above).intersection(graph.assumed)):
            yield from (f"{line} at {node.name}" for line in graph.assumed[node])

    def _proven_claims(self, proposal: Proposal) -> tuple[list[Claim], int]:
        """Returns the claims that hold, and how many elements were compared.

        Each structure is proved once. Raises Departure if a required claim does not hold.
        """
        key, values = proposal.numbered
        if key not in self._proofs:
            self._proofs[key] = values, self._prove(proposal)
        proven_values, proof = self._proofs[key]
        if isinstance(proof, Departure):
            by_proven_value = dict(zip(proven_values, values, strict=True))
            values_at_fault = [
                by_proven_value[value] for value in proof.values if value in by_proven_value
            ]
            raise Departure(proof.code, proof.detail, values_at_fault or proposal.products)
        places, compared = proof
        return [*proposal.claims, *(proposal.optional_claims[place] for place in places)], compared

    def _prove(self, proposal: Proposal) -> tuple[list[int], int] | Departure:
        """Proves the claims of a proposal.

        Returns the places of the optional claims that hold, and how many elements of the others
        were compared.
        """
        form, tokens, activations = self.graph.form, proposal.x.shape[0], proposal.activations
        definitions = proposal.definitions(form)
        try:
            compared = prove(activations, tokens, claims_over(form, proposal.claims, definitions))
        except Departure as departure:
            return departure
        optional_claims = claims_over(form, proposal.optional_claims, definitions)
        found = outcomes(activations, tokens, optional_claims)
        places = [place for place, item in enumerate(found) if not isinstance(item, Departure)]
        return places, compared

    def _place(self, proposal: Proposal, claims: list[Claim]) -> Plan:
        """Returns the plan with the rows placed: in place if the kernel can write the caches, else
        staged.

        claims  the proven claims
        """
        in_place_claims = self._with_half_rows(proposal, claims)
        caches = self._place_rows(proposal, in_place_claims)
        if isinstance(caches, Staged):
            return self._stage(proposal, claims, caches)
        plan = self._make_plan(proposal, in_place_claims, caches)
        if in_place_claims is not claims:
            _, last_cache, _ = plan.written_caches[-1]
            plan.warnings = (HALVES.format(cache=last_cache.name),)
        obstacle = self._old_rows_obstacle(plan, caches)
        if obstacle is not None:
            return self._stage(proposal, claims, Staged((obstacle,)))
        return plan

    def _place_rows(self, proposal: Proposal, claims: list[Claim]) -> InPlace | Staged:
        """Returns who writes the new rows.

        claims  what holds if the kernel writes them
        """
        graph, config = self.graph, self.config
        if config.staging == "always":
            return Staged((Obstacle("config.staging", "Config.staging is 'always'"),))
        writes = self.projections.sites[proposal.x].writes
        rewrites = Rewrites(graph.form, claims)
        caches = place_rows(graph, proposal, rewrites, writes, config.machine, self.boundary)
        for write in caches.writes.values():
            if _writer(graph, write) is None:
                detail = f"a step writes into {write.cache.name} where it lies"
                return Staged((Obstacle("cache.not_functional", detail),))
        return caches

    def _with_half_rows(self, proposal: Proposal, claims: list[Claim]) -> list[Claim]:
        """Returns the claims; they say that rotated rows are halves, as the kernel's, if
        ``Config.kr_layout`` asks for that and the model's own rows are pairs.
        """
        if self.config.kr_layout != "half" or not proposal.has_pairs:
            return claims
        form, results = self.graph.form, proposal.results
        rows = {"query_rope": results.query_rope, "kr_rows": results.kr_rows}
        half_claims = []
        for claim in claims:
            leaf, kernel = rows.get(claim.part), claim.kernel
            if leaf is not None and leaf.numel == claim.graph.numel:
                kernel = form.reshape(leaf, claim.graph.shape)
            half_claims.append(Claim(claim.part, claim.graph, kernel))
        return half_claims

    def _make_plan(self, proposal: Proposal, claims: list[Claim], caches: InPlace | Staged) -> Plan:
        """Returns a plan with these caches: finds its region and what the results replace.

        Raises Departure if something reads what the kernel keeps inside, or if nothing reads the
        results.
        """
        graph = self.graph
        if isinstance(caches, InPlace):
            claims = self._read_back(proposal, caches, claims)
        rewrites = Rewrites(graph.form, claims)
        starts = [node for value in proposal.products for node in holders(graph, value)]
        starts += filter(None, (_writer(graph, write) for write in caches.writes.values()))
        try:
            region, replaced = find_region(graph, rewrites, starts)
        except Departure as reason:  # a fused cache operator needs more than the rows
            obstacles = caches.obstacles if isinstance(caches, Staged) else ()
            for obstacle in [cause for cause in obstacles if cause is not PAIRS][:1]:
                detail = f"{reason.detail}; not in place: {obstacle}"
                raise Departure(reason.code, detail, reason.values) from None
            raise
        if not replaced:
            detail = f"{len(region)} nodes of the prologue"
            raise Departure("graph.unread", detail, proposal.products)
        return Plan(graph, proposal, caches, rewrites, region, replaced)

    def _read_back(self, proposal: Proposal, caches: InPlace, claims: list[Claim]) -> list[Claim]:
        """Returns the claims with new rows read from the written caches, and claims for the caches.

        In place the kernel returns no separate rows.
        """
        form, results = self.graph.form, proposal.results
        leaves = {"kv_cache": results.kv_rows, "kr_cache": results.kr_rows}
        rows = {
            leaves[name]: form.gather(write.value, 0, caches.slots)
            for name, write in caches.writes.items()
        }
        written = [write.value.sources[1:] for write in caches.writes.values()]
        # a part of a cache, too, that is written on the way to the whole
        cache_claims = [
            Claim("cache", value, value)
            for value in self.projections.sites[proposal.x].writes
            if value.sources[1:] in written
        ]
        return [*claims_over(form, claims, rows), *cache_claims]

    def _stage(self, proposal: Proposal, claims: list[Claim], caches: Staged) -> Plan:
        """Returns a staged plan. Raises Departure if ``Config.staging`` forbids that."""
        plan = self._make_plan(proposal, claims, caches)
        if self.config.staging == "never":
            first = caches.obstacles[0]
            is_unproven = first.code == "slots.unproven"
            code = first.code if is_unproven else "cache.staging_forbidden"
            raise Departure(code, str(first), proposal.products)
        return plan

    def _accept_contract(self, plan: Plan, claims: list[Claim]) -> tuple[Plan, tuple[str, ...]]:
        """Returns a plan that the operator's contract accepts, and what that assumes about sizes.

        If the contract refuses only the caches, the plan is staged. Raises Departure.
        """
        try:
            sizes = contract.check_contract(plan, self.config)
        except Departure as reason:
            if not isinstance(plan.caches, InPlace) or self.config.staging == "never":
                raise
            code = reason.code.rpartition(":")[2]
            message = f"the kernel refuses the caches ({code}): {reason.detail}"
            try:
                caches = Staged((Obstacle("cache.refused", message),))
                plan = self._stage(plan.proposal, claims, caches)
                sizes = contract.check_contract(plan, self.config)
            except Departure:
                raise reason from None  # the caches were not the cause
        return plan, sizes

    def _old_rows_obstacle(self, plan: Plan, caches: InPlace) -> Obstacle | None:
        """Returns the obstacle if a node reads a cache as it was before the call, or another call
        writes it.

        A reader counts if more comes of it than the new cache.
        """
        region, graph = {*plan.region}, self.graph
        for name, write in caches.writes.items():
            cache = write.cache
            if write.value in self.taken_writes:
                message = f"another fusion writes the same rows of {name}"
                return Obstacle("cache.rows_read", message)
            path, seen = [(user, user) for user in cache.users], set[Node]()
            while path:
                node, reader = path.pop()
                is_end = node is reader and (node.op == "output" or is_copy_into(node, cache))
                reading = graph.changed.get(node, graph.readings[node])
                is_new = write.value in map(strip_reshapes, values_of(reading))
                if node in region or node in seen or is_end or is_new or is_size(node):
                    continue
                seen.add(node)
                if node.op == "output" or node in graph.effects:
                    message = f"{reader.name} reads {cache.name} as it was before the write"
                    return Obstacle("cache.old_rows_read", message)
                is_view = graph.base(node) is cache
                path += [(user, user if is_view else reader) for user in node.users]
        return None


def _writer(graph: Graph, write: Write) -> Node | None:
    """Returns the node that makes the cache with its new rows, or None if a step writes it in
    place.
    """
    stack, old_cache = [write.cache], strip_reshapes(write.value.sources[0])
    for node in stack:
        for user in node.users:
            if user.op == "output" or user.target is aten.copy_.default:
                continue
            if signature(user.target).is_in_place:
                return None
            values = [strip_reshapes(value) for value in values_of(graph.readings[user])]
            if graph.base(user) is write.cache or old_cache in values:  # or a copy of it
                stack.append(user)
            elif write.value in values:
                return user
    return None


def _reads_rows_back(plan: Plan) -> bool:
    """Returns True if something reads new rows that are only in the caches."""
    values = order(plan.replaced.values(), plan.results.values())
    return any(value.op == "gather" and value.sources[0].op == "write" for value in values)


def _slot_nodes(plan: Plan) -> list[Node]:
    """Returns the nodes that compute the slots of a call in place."""
    caches = plan.caches
    values = order([caches.slots]) if isinstance(caches, InPlace) else ()
    nodes = [node for value in values for node in plan.graph.nodes.get(value, ())]
    # also those whose Values were joined with others
    return list(reached(nodes, lambda node: node.all_input_nodes))


def _slot_assumptions(plan: Plan, config: Config, boundary: bool) -> list[str]:
    """Returns what is assumed about the slots.

    It is empty if the plan is staged, if nothing is trusted, or if a wrapper checks the slots.
    """
    caches, graph = plan.caches, plan.graph
    is_hidden = any(cache in graph.hidden for _, cache, _ in plan.written_caches)
    is_checked = boundary and config.slots == "checked"
    if is_hidden or is_checked or not caches.trusted_inputs:
        return []
    names = ", ".join(input_name(graph, leaf) for leaf in caches.trusted_inputs)
    origin = f" (input {names}, trusted to hold numbers from 0 to 2**24 - 1)"
    return [SLOTS_ASSUMED.format(whose=origin), *([UNCHECKED] if config.slots == "checked" else [])]
