"""A whole target in one file: an operator that is made up, and takes the query's side alone."""

from __future__ import annotations

from typing import Any

import torch
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.prolog import Operator
from torch import Tensor
from torch.fx import Node

from mla_fusion.emit import pack, rows
from mla_fusion.emit.results import result_of
from mla_fusion.emit.target import Target
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.fx.build import Builder
from mla_fusion.match.candidate import Candidate
from mla_fusion.plan import verdict
from mla_fusion.plan.plan import QueryPlan, Untouched
from mla_fusion.plan.planner import Planner
from mla_fusion.prove import field
from mla_fusion.prove.field import Num
from mla_fusion.prove.operators import Call, rms_norm, rotated
from mla_fusion.reference import numerics
from mla_fusion.report.rejection import Refuse

OPERATOR = Operator(
    "npu_mla_query_side(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, "
    "Tensor rmsnorm_gamma_cq, Tensor rope_sin, Tensor rope_cos, *, float epsilon=1e-05) "
    "-> (Tensor, Tensor)",
    "made up",
    results=("query", "query_rope"),
)


def kernel(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    epsilon: float = 1e-05,
) -> tuple[Tensor, Tensor]:
    """[T, He] -> [T, N, Hckv] and [T, N, Dr]; from wider weights (verification) wider results."""
    (heads, nope, _), activation = weight_uk.shape, rmsnorm_gamma_cq.dtype
    down = numerics.matmul(token_x, weight_dq)
    c_q = numerics.rms_norm(down, rmsnorm_gamma_cq, epsilon).to(activation)
    q = numerics.matmul(c_q, weight_uq_qr).unflatten(-1, (heads, -1))
    q_nope, q_pe = q.split((nope, q.shape[-1] - nope), -1)
    query = numerics.matmul(q_nope.transpose(0, 1), weight_uk).transpose(0, 1).contiguous()
    cos, sin = rope_cos.unsqueeze(1), rope_sin.unsqueeze(1)
    return query, numerics.interleave_rope(q_pe, cos, sin, activation)


def exact(call: Call) -> list[Num]:
    """The same in the field, where nothing is rounded."""
    heads, nope, _ = call.num("weight_uk").shape
    down = call.num("token_x") @ call.num("weight_dq")
    epsilon = field.literal(call["epsilon"]).num()
    c_q, _ = rms_norm(down, call.num("rmsnorm_gamma_cq"), epsilon, 1)
    q = (c_q @ call.num("weight_uq_qr")).unflatten(-1, (heads, -1))
    q_nope, q_pe = q.parts(lambda part: part.split((nope, part.shape[-1] - nope), -1))
    tables = (call.num(f"rope_{name}").unsqueeze(1) for name in ("cos", "sin"))
    query = (q_nope.transpose(0, 1) @ call.num("weight_uk")).transpose(0, 1)
    return [query, rotated(q_pe, *tables)]


def check(token_x: Tensor, **others: Any) -> None:
    if token_x.shape[-1] % 16:
        raise ContractError("dims.he", "token_x", "He, a multiple of 16", str(token_x.shape[-1]))


class QueryPlanner(Planner[Candidate, QueryPlan]):
    def judge(self) -> None:
        verdict.judge(self.view, self.candidate)
        if self.candidate.weight_quant_mode:
            down = self.candidate.down.node
            detail = f"{down.name} is of a prologue with quantised weights"
            raise Refuse("quant.mixed", detail, (down,))

    def plan_at(self, token_x: Node) -> QueryPlan:
        q, lead = self.candidate.query, self.lead_of(token_x)
        shapes = {
            "query": (*lead, q.absorb.heads, q.absorb.latent_dim),
            "query_rope": (*lead, q.rope.heads, q.rope.rope_dim),
        }
        read = (self.trees[name].replacements(name, shape) for name, shape in shapes.items())
        return QueryPlan(
            target="query",
            candidate=self.candidate,
            token_x=token_x,
            cos=q.rope.cos,
            sin=q.rope.sin,
            caches=Untouched(),
            replacements=tuple(item for items in read for item in items),
            interleave=frozenset({"query_rope"} if q.rope.layout == "interleaved" else ()),
        )


def inputs(plan: QueryPlan) -> list[Node]:
    q = plan.candidate.query
    assert isinstance(q.absorb, AbsorbFact) and q.norm.gamma is not None
    weights = [part.weight for item in (q.down, q.up_nope, q.up_rope) for part in item.by_weight]
    tables = [run.base for run in (*plan.cos, *plan.sin)]
    return list(dict.fromkeys([plan.token_x, *weights, *q.absorb.weights, q.norm.gamma, *tables]))


def attributes(plan: QueryPlan) -> dict[str, Any]:
    return {"epsilon": plan.candidate.query.norm.eps}


def call_kernel(b: Builder, plan: QueryPlan) -> dict[str, Any]:
    q = plan.candidate.query
    assert q.norm.gamma is not None
    x, lead = b.value(plan.token_x), plan.lead
    made = b.call(
        getattr(torch.ops.npu, OPERATOR.name).default,
        b.reshape(x, (-1, b.shape(x)[-1])),
        pack.weight(b, plan, "weight_dq", pack.dq, q.down),
        pack.weight(b, plan, "weight_uq_qr", pack.uq_qr, q.up_nope, q.up_rope),
        pack.weight_uk(b, plan),
        pack.vector(b, "rmsnorm_gamma_cq", q.norm.gamma),
        *(
            b.reshape(
                rows.table(b, table, (*lead, q.rope.rope_dim), without, x), (-1, q.rope.rope_dim)
            )
            for table, without in ((plan.sin, 0.0), (plan.cos, 1.0))
        ),
        **attributes(plan),
    )
    results = {}
    for place, name in enumerate(OPERATOR.results):
        value = result_of(b, made, place)
        results[name] = b.reshape(value, (*lead, *b.shape(value)[1:]))
    if plan.interleave:
        results["query_rope"] = rows.interleave(b, results["query_rope"])
    return results


TARGET = Target(
    operator=OPERATOR,
    planner=QueryPlanner,
    inputs=inputs,
    call=call_kernel,
    attributes=attributes,
    kernel=kernel,
    exact=exact,
    check=check,
)
