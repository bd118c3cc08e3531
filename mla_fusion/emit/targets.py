"""THE table of targets: of each operator that a plan may call, how it is planned, called and
checked. What each is offered stands beside its name in `mla_fusion.config`.

The stages behind the plan ask ``target_of(plan)``; none of them knows an operator by name.
"""

from __future__ import annotations

from typing import Any

from mla_fusion.emit import key_half, preprocess, whole
from mla_fusion.emit.target import Target
from mla_fusion.fx.build import Builder
from mla_fusion.plan.plan import Plan

TARGETS: dict[str, Target[Any]] = {
    "v3": whole.TARGET,
    "identity": whole.TARGET,
    "preprocess": preprocess.TARGET,
    "key": key_half.TARGET,
}


def call_kernel(b: Builder, plan: Plan) -> dict[str, Any]:
    """Emit the call of a plan; its results by name.

    Written against :class:`~mla_fusion.fx.build.Builder`, so the same lines rewrite the graph and
    run on tensors when the fusion is verified.
    """
    return target_of(plan).call(b, plan)


def target_of(plan: Plan) -> Target[Any]:
    """The target that a plan is for."""
    return TARGETS[plan.target]
