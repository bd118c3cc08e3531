"""The pass on Values, from a graph to a new one: read, propose, prove, place, write."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from mla_fusion.exact.prove import Claim, Proofs
from mla_fusion.fx.build import describe_attributes
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.next import policy
from mla_fusion.next.caches import InPlace, Obstacle, Staged, placed
from mla_fusion.next.outputs import Given, Settled, settled
from mla_fusion.next.rewrite import Writer
from mla_fusion.propose.prologue import Proposal, proposals
from mla_fusion.propose.sites import Projections


@dataclass
class Fused:
    """One prologue that becomes a call."""

    proposal: Proposal
    caches: InPlace | Staged
    compared: int


@dataclass
class Outcome:
    """
    fused     prologues that become calls
    refused   why others do not
    rewritten the new graph, where there is one
    """

    fused: list[Fused] = field(default_factory=list)
    refused: list[Departure] = field(default_factory=list)
    rewritten: GraphModule | None = None


def fuse(gm: GraphModule) -> Outcome:
    """Changes nothing of ``gm``."""
    describe_attributes(gm)
    graph = Graph(gm)
    projections, proofs, found = Projections(graph), Proofs(), Outcome()
    given = Given(graph.form)
    plans: dict[Value, tuple[Proposal, InPlace | Staged]] = {}
    products, read = list[Value](), list[Value]()
    for proposal in proposals(projections):
        if isinstance(proposal, Departure):
            found.refused.append(proposal)
            continue
        try:
            fused, more = _planned(graph, projections, proofs, proposal)
        except Departure as departure:
            found.refused.append(departure)
            continue
        found.fused.append(fused)
        for claim in more:
            given.add(claim.graph, claim.kernel)
        leaves = [leaf for leaf in vars(proposal.results).values() if leaf is not None]
        if isinstance(fused.caches, InPlace):
            leaves += [fused.caches.kv.value, fused.caches.kr.value]
        plans |= dict.fromkeys(leaves, (proposal, fused.caches))
        products += proposal.products
        read += _read(proposal, fused.caches)
    if found.fused:
        whole = settled(graph, given, products, read)
        found.rewritten = Writer(graph, whole, plans).write()
    return found


def _planned(
    graph: Graph, projections: Projections, proofs: Proofs, proposal: Proposal
) -> tuple[Fused, list[Claim]]:
    form, tokens = graph.form, proposal.x.shape[0]
    claims = [proposal.as_defined(form, claim) for claim in proposal.claims]
    compared = proofs.prove(proposal.given, tokens, claims)
    held = list(proposal.claims)
    for claim in proposal.more:
        try:
            proofs.prove(proposal.given, tokens, [proposal.as_defined(form, claim)])
            held.append(claim)
        except Departure:
            continue
    caches = placed(graph, proposal, Given(form, held), projections.values)
    if isinstance(caches, InPlace):
        late = _reads_old_rows(graph, proposal, caches, held)
        caches = caches if late is None else Staged((late,))
    claims, whole = _settled(graph, proposal, caches, held)
    policy.judge(graph, proposal, _region(graph, proposal, whole))
    return Fused(proposal, caches, compared), claims


def _settled(
    graph: Graph, proposal: Proposal, caches: InPlace | Staged, claims: list[Claim]
) -> tuple[list[Claim], Settled]:
    if isinstance(caches, InPlace):
        claims = _read_back(graph, proposal, caches, claims)
    given = Given(graph.form, claims)
    return claims, settled(graph, given, proposal.products, _read(proposal, caches))


def _reads_old_rows(
    graph: Graph, proposal: Proposal, caches: InPlace, claims: list[Claim]
) -> Obstacle | None:
    """A node that reads a cache as it was before the call."""
    try:
        whole = _settled(graph, proposal, caches, claims)[1]
    except Departure as departure:
        if departure.code != "graph.not_functional":
            raise
        return Obstacle("cache.old_rows_read", departure.detail)
    for cache in (caches.kv.cache, caches.kr.cache):
        for user in cache.users:
            is_copy = str(user.target).startswith("aten.copy_.") and user.args[0] is cache
            if user in whole.kept and not is_copy and user.op != "output":
                message = f"{user.name} reads {cache.name} as it was before the write"
                return Obstacle("cache.old_rows_read", message)
    return None


def _read_back(
    graph: Graph, proposal: Proposal, caches: InPlace, claims: list[Claim]
) -> list[Claim]:
    """New rows that somebody reads beside the caches are taken from these."""
    form, results = graph.form, proposal.results
    rows = {
        leaf: form.gather(write.value, 0, caches.slots)
        for leaf, write in ((results.kv_rows, caches.kv), (results.kr_rows, caches.kr))
    }
    found = [Claim(one.part, one.graph, form.substituted(one.kernel, rows)) for one in claims]
    writes = (caches.kv, caches.kr)
    return [*found, *(Claim("cache", write.value, write.value) for write in writes)]


def _read(proposal: Proposal, caches: InPlace | Staged) -> list[Value]:
    """What the call reads."""
    found = [one for one in proposal.arguments.values() if isinstance(one, Value)]
    return [*found, caches.slots] if isinstance(caches, InPlace) else found


def _region(graph: Graph, proposal: Proposal, whole: Settled) -> list[Node]:
    """The nodes that go, from the products on."""
    products = set(proposal.products)
    made, found = set[Node](), list[Node]()
    for node in graph.gm.graph.nodes:
        is_product = not products.isdisjoint(values_of(graph.readings[node]))
        is_inside = is_product or any(read in made for read in node.all_input_nodes)
        if is_inside and node not in whole.kept:
            made.add(node)
            found.append(node)
    return found
