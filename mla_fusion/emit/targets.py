"""THE table of targets: of each operator that a plan may call, how it is planned, called and
checked. What each is offered stands beside its name in `mla_fusion.config`.

The stages behind the plan ask ``target_of(plan)``; none of them knows an operator by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.fx import Node

from mla_fusion import ops
from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.config import Config
from mla_fusion.emit import key_half, preprocess, whole
from mla_fusion.fx.build import Builder
from mla_fusion.machine import Machine
from mla_fusion.meta import check
from mla_fusion.meta.prolog import Operator
from mla_fusion.plan.key_half import KeyPlanner
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.planner import Planner
from mla_fusion.plan.preprocess import PreprocessPlanner
from mla_fusion.plan.whole import PrologPlanner
from mla_fusion.prove import operators
from mla_fusion.prove.field import Num
from mla_fusion.prove.operators import Call

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

    Of an operator that neither torch_npu nor `mla_fusion.meta` and `mla_fusion.reference` know:

    kernel       computes it, of torch's operators, on a CPU and on fake tensors; whoever makes the
                 target defines the operator by that
    exact        its definition in the field, as those of `mla_fusion.prove.kernels`
    check        of (its arguments by name): raises ``ContractError`` for a call that it does not
                 take
    """

    operator: Operator
    planner: type[Planner[Any, P]]
    inputs: Callable[[P], list[Node]]
    call: Callable[[Builder, P], dict[str, Any]]
    attributes: Callable[[P], dict[str, Any]]
    ask: Callable[[P, Config], None] = _nothing_more
    kernel: Callable[..., Any] | None = None
    exact: Callable[[Call], list[Num]] | None = None
    check: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        if self.kernel is not None:
            ops.add(self.operator.schema, self.kernel)

    @property
    def called(self) -> str:
        """The operator, by the name of the form that writes its caches."""
        return self.operator.name.removesuffix("_functional")

    def is_called_by(self, op: OpOverload) -> bool:
        """Whatever the namespace and the overload."""
        return schema_of(op).name.endswith(f"::{self.operator.name}")

    def examine(self, machine: Machine, given: dict[str, Any]) -> None:
        """Raises ``ContractError`` unless the operator takes these arguments in a graph."""
        if self.check is not None:
            self.check(**given)
        else:
            check(self.operator.name, soc=machine.soc, cann=machine.cann, path="graph", **given)

    def compute(self, call: Call) -> list[Num]:
        """Its results in the field. Raises Undecided."""
        found: list[Num] = operators.run(call) if self.exact is None else self.exact(call)
        return found


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
