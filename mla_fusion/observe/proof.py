"""Why a fusion is exact, as lines for the report: for each fact, what it was shown by."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact, Table
from mla_fusion.fx.kinds import Kind, is_cast, kind_of
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.view import View
from mla_fusion.plan.plan import InPlace, Plan, QueryPlan
from mla_fusion.prove.field import nearest


def lines(view: View, plan: Plan) -> tuple[str, ...]:
    """One line for each fact: its steps by class, the token axis, the tables."""
    return tuple(_lines(view, plan))


def _lines(view: View, plan: Plan) -> Iterator[str]:
    whole = plan.candidate if isinstance(plan, QueryPlan) else None
    k = plan.candidate.key if plan.caches.of_key else None
    if whole is not None:
        q = whole.query
        yield f"{_norm(q.norm)}: {_steps(q.down.node, q.norm.node)}"
    if k is not None and k.norm is not None:
        yield f"{_norm(k.norm)}: {_steps(k.down.node, k.norm.node)}"
    if whole is not None and plan.projects_up:
        of_heads = f"{q.rope.heads} heads, {q.rope.rope_dim} columns each"
        yield f"{_rotation(q.rope)} of {of_heads}: {_steps(q.up_rope.node, q.rope.node)}"
    if k is not None and k.rope is not None:
        steps = _steps(k.down_rope.node, k.rope.node)
        yield f"{_rotation(k.rope)} of one head, {k.rope_dim} columns: {steps}"
    if k is not None and k.operator is not None:
        yield f"latent, key and caches: {k.operator.node.target}, by its documentation"
    if whole is not None and plan.projects_up and isinstance(q.absorb, AbsorbFact):
        ends = [part.projection.activation for part in q.absorb.by_weight]
        times = ", times one number for each token" if q.absorb.times is not None else ""
        steps = _steps(q.up_nope.node, *ends)
        yield f"W_uk: {steps}, then a product of {q.absorb.heads} heads{times}"
    if plan.heads_of_call > plan.heads:
        added = plan.heads_of_call - plan.heads
        yield f"heads: {plan.heads}, and {added} of zeros, whose results are cut off"
    yield f"tokens: {plan.candidate.tokens.summary() or 'all of them are probed'}"
    rotates = k is not None or plan.projects_up
    if rotates and not plan.cos:
        yield "tables: cos is 1 and sin is 0"
    elif k is not None and whole is not None:
        yield f"tables: {_tables(view, (*q.rope.cos, *q.rope.sin), (*k.cos, *k.sin))}"


def _norm(fact: NormFact) -> str:
    """Its constants, each with the exact number that is proved."""
    epsilon = "given at run time" if fact.runtime_eps is not None else _constant(fact.eps)
    times = "" if fact.scale == 1.0 else f", times {_constant(fact.scale)}"
    return f"RMSNorm of {len(fact.columns)} columns{times}, epsilon {epsilon}"


def _constant(value: float) -> str:
    known = nearest(value)
    return f"{value:g} ({'root of ' if known.is_root else ''}{known.exact})"


def _rotation(fact: RopeFact) -> str:
    return "RoPE" if fact.rotates else "no rotation"


def _steps(start: Node, *ends: Node) -> str:
    """How many steps of each class lie between a product and what is made of it."""
    between = dict.fromkeys(node for end in ends for node in nodes_between((start,), end))
    analytic = sum(kind_of(node) is Kind.ANALYTIC for node in between)
    inert = sum(kind_of(node) is Kind.CHOICE for node in between)
    moved = sum(
        kind_of(node) in (Kind.MOVEMENT, Kind.GATHER, Kind.WRITER) and not is_cast(node)
        for node in between
    )
    casts = sum(map(is_cast, between))
    counts = {
        "analytic steps": analytic,
        "of movement": moved,
        "casts": casts,
        "choices that never act": inert,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no steps"


def _tables(view: View, of_query: Table, of_key: Table) -> str:
    pairs = [(run.base, other.base) for run, other in zip(of_query, of_key, strict=True)]
    if all(view.same(a, b) for a, b in pairs):
        return "one value for query and key"
    if all(view.terms.same(a, b) for a, b in pairs):
        return "equal terms"
    return "equal in exact arithmetic"


def slots(plan: Plan) -> str:
    """What non-negative slots rest on."""
    return f"slots: {_slots(plan)}"


def _slots(plan: Plan) -> str:
    caches = plan.caches
    if not isinstance(caches, InPlace):
        return "the model's own writes stay"
    if plan.candidate.key.operator is not None:
        return "as the model's operator is given them"
    trusted = ", ".join(node.name for node in caches.trusted)
    return f"input {trusted}, trusted" if trusted else "non-negative by their range"
