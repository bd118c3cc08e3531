"""Ask the operator's own specification whether the planned call would be taken."""

from __future__ import annotations

from mla_fusion.config import Config
from mla_fusion.emit.targets import target_of
from mla_fusion.fx.measured import measured
from mla_fusion.meta import ContractError, check
from mla_fusion.plan.plan import Plan
from mla_fusion.report.rejection import Refuse


@measured
def ask(plan: Plan, config: Config) -> None:
    """Raise ``Refuse("contract:<code>")`` with the specification's own message."""
    target = target_of(plan)
    arguments = target.arguments(plan) | target.attributes(plan)
    machine = config.machine
    try:
        check(target.operator.name, soc=machine.soc, cann=machine.cann, path="graph", **arguments)
    except ContractError as error:
        culprit = target.nodes(plan).get(error.argument, plan.candidate.down.node)
        detail = f"{error.argument}: expected {error.expected}, found {error.found}"
        raise Refuse(f"contract:{error.code}", detail, (culprit,)) from None
    target.ask(plan, config)
