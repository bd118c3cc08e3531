"""A made-up operator for the query's latent: the model projects it up, and does the rest."""

from __future__ import annotations

from typing import Any

import torch
from mla_fusion.meta.prolog import Operator
from torch import Tensor
from torch.fx import Node

from mla_fusion.emit import pack
from mla_fusion.emit.target import Target
from mla_fusion.fx.build import Builder
from mla_fusion.match.candidate import Candidate
from mla_fusion.plan import verdict
from mla_fusion.plan.plan import QueryPlan, Untouched
from mla_fusion.plan.planner import Planner
from mla_fusion.prove import field
from mla_fusion.prove.field import Num
from mla_fusion.prove.operators import Call, rms_norm
from mla_fusion.reference import numerics

OPERATOR = Operator(
    "npu_mla_query_latent(Tensor token_x, Tensor weight_dq, Tensor rmsnorm_gamma_cq, *, "
    "float epsilon) -> Tensor",
    "made up",
    results=("query_norm",),
)


def kernel(token_x: Tensor, weight_dq: Tensor, rmsnorm_gamma_cq: Tensor, epsilon: float) -> Tensor:
    """[.., He] -> [.., Hcq]"""
    down = numerics.matmul(token_x, weight_dq)
    return numerics.rms_norm(down, rmsnorm_gamma_cq, epsilon).to(rmsnorm_gamma_cq.dtype)


def exact(call: Call) -> list[Num]:
    down, epsilon = call.num("token_x") @ call.num("weight_dq"), field.literal(call["epsilon"])
    return [rms_norm(down, call.num("rmsnorm_gamma_cq"), epsilon.num(), 1)[0]]


class LatentPlanner(Planner[Candidate, QueryPlan]):
    def judge(self) -> None:
        verdict.judge(self.view, self.candidate)

    def plan_at(self, token_x: Node) -> QueryPlan:
        shape = (*self.lead_of(token_x), len(self.candidate.query.norm.columns))
        return QueryPlan(
            target="latent",
            candidate=self.candidate,
            token_x=token_x,
            cos=(),
            sin=(),
            caches=Untouched(),
            replacements=tuple(self.trees["query_norm"].replacements("query_norm", shape)),
        )


def inputs(plan: QueryPlan) -> list[Node]:
    q = plan.candidate.query
    assert q.norm.gamma is not None
    return [plan.token_x, *(part.weight for part in q.down.by_weight), q.norm.gamma]


def attributes(plan: QueryPlan) -> dict[str, Any]:
    return {"epsilon": plan.candidate.query.norm.eps}


def call_kernel(b: Builder, plan: QueryPlan) -> dict[str, Any]:
    q = plan.candidate.query
    assert q.norm.gamma is not None
    made = b.call(
        getattr(torch.ops.npu, OPERATOR.name).default,
        b.value(plan.token_x),
        pack.weight(b, plan, "weight_dq", pack.dq, q.down),
        pack.vector(b, "rmsnorm_gamma_cq", q.norm.gamma),
        **attributes(plan),
    )
    return {"query_norm": made}


def check(**given: Any) -> None:
    """It takes every call."""


TARGET = Target(
    operator=OPERATOR,
    planner=LatentPlanner,
    inputs=inputs,
    call=call_kernel,
    attributes=attributes,
    kernel=kernel,
    exact=exact,
    check=check,
)
