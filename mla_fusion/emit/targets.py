"""THE table of targets: of each operator that a plan may call, how it is planned, called and
checked. What each is offered stands beside its name in `mla_fusion.config`.

The stages behind the plan ask ``target_of(plan)``; none of them knows an operator by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.emit import key_half, preprocess, whole
from mla_fusion.fx.build import Builder
from mla_fusion.meta.prolog import Operator
from mla_fusion.plan.key_half import KeyPlanner
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.planner import Planner
from mla_fusion.plan.preprocess import PreprocessPlanner
from mla_fusion.plan.whole import PrologPlanner

P = TypeVar("P", bound=Plan)


def _nothing_more(plan: Any, config: Config) -> None:
    """The specification has said it all."""


@dataclass(frozen=True)
class Target(Generic[P]):
    """One operator.

    planner      makes plans of candidates
    inputs       nodes of the graph that the call reads
    call         emits it; its results by the names that ``Replacement.output`` uses
    attributes   its keyword attributes
    ask          raises ``Refuse`` for what the specification does not say of a call
    """

    operator: Operator
    planner: type[Planner[Any, P]]
    inputs: Callable[[P], list[Node]]
    call: Callable[[Builder, P], dict[str, Any]]
    attributes: Callable[[P], dict[str, Any]]
    ask: Callable[[P, Config], None] = _nothing_more


_WHOLE = Target(
    operator=whole.KERNEL,
    planner=PrologPlanner,
    inputs=whole.inputs,
    call=whole.call_kernel,
    attributes=whole.attributes,
    ask=whole.ask,
)
_KEY = Target(
    operator=key_half.KERNEL,
    planner=KeyPlanner,
    inputs=key_half.inputs,
    call=key_half.call_kernel,
    attributes=key_half.attributes,
)
_PREPROCESS: Target[Any] = Target(
    operator=preprocess.KERNEL,
    planner=PreprocessPlanner,
    inputs=preprocess.inputs,
    call=preprocess.call_kernel,
    attributes=preprocess.attributes,
)
TARGETS: dict[str, Target[Any]] = {
    "v3": _WHOLE,
    "identity": _WHOLE,
    "preprocess": _PREPROCESS,
    "key": _KEY,
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
