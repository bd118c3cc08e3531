"""What there is to know of a target: one record, which the stages behind the plan ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.fx import Node

from mla_fusion import ops
from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.config import Config
from mla_fusion.fx.build import Builder
from mla_fusion.machine import Machine
from mla_fusion.meta.binder import Undecided
from mla_fusion.meta.check import bound
from mla_fusion.meta.prolog import Operator
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.planner import Planner
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
    exact        its definition in the field, as those of `mla_fusion.prove.kernels`; the second
                 checker has none, so that its fusions have no certificate
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

    def examine(self, machine: Machine, given: dict[str, Any]) -> Sequence[Undecided]:
        """The sizes on which it depends whether the operator takes these arguments in a graph.

        Raises ``ContractError`` where it never does.
        """
        if self.check is not None:
            self.check(**given)
            return ()
        name, soc, cann = self.operator.name, machine.soc, machine.cann
        return bound(name, soc, cann, "graph", False, given).undecided

    def compute(self, call: Call) -> list[Num]:
        """Its results in the field. Raises Undecided."""
        found: list[Num] = operators.run(call) if self.exact is None else self.exact(call)
        return found
