"""Ask the operator's own specification whether the planned call would be taken."""

from __future__ import annotations

from torch.fx import Graph, Node

from mla_fusion.config import Config
from mla_fusion.emit.contract import OnPaper, assumed
from mla_fusion.emit.whole import TARGET
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.lower import Lowering
from mla_fusion.meta import ContractError, limits
from mla_fusion.next.call import called
from mla_fusion.next.outputs import holders
from mla_fusion.next.plan import Plan


def ask(plan: Plan, config: Config, source: Graph) -> tuple[str, ...]:
    """What the call assumes of sizes that the graph leaves open.

    Raises Departure ``contract:<code>`` with the specification's own message.
    """
    paper = OnPaper(source, TARGET)
    given = paper.arguments(lambda b: called(b, Lowering(b, plan.graph), plan))
    machine = config.machine
    try:
        open_sizes = TARGET.examine(machine, given)
        lines = [line for one in open_sizes if (line := assumed(one, TARGET.called))]
    except ContractError as error:
        detail = f"{error.argument}: expected {error.expected}, found {error.found}"
        value = plan.values.get(error.argument, plan.proposal.x)
        raise Departure(f"contract:{error.code}", detail, [value]) from None
    allowed = limits(TARGET.operator.name, machine.soc, machine.cann, "graph")
    if "query_norm_flag" in plan.attributes and not allowed.gives_query_norm:
        detail = (
            f"query_norm_flag: the operator takes it with CANN {machine.cann} and gives no "
            "query_norm, which is read here"
        )
        raise Departure("contract:query_norm_flag", detail, [plan.proposal.x])
    return tuple(lines)


def inputs(plan: Plan) -> list[Node]:
    """Nodes of the graph that the call reads."""
    caches = [cache for _, cache, _ in plan.held]
    return [*dict.fromkeys((*holders(plan.graph, plan.values.values()), *caches))]
