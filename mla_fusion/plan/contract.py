"""Ask the operator's own specification whether the planned call would be taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import FakeTensorMode, OpOverload, guard, hint_of, schema_of
from mla_fusion.config import Config
from mla_fusion.fx.build import OfTensors, Recipe, fake_mode_of, faked
from mla_fusion.fx.held import Exact
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.lower import Lowering
from mla_fusion.meta import ContractError, limits
from mla_fusion.meta.binder import Undecided
from mla_fusion.meta.check import bound
from mla_fusion.meta.prolog import V3_FUNCTIONAL
from mla_fusion.plan.call import emit_call
from mla_fusion.plan.plan import Plan

OPERATOR = V3_FUNCTIONAL.name.removesuffix("_functional")  # as messages call it


def ask(plan: Plan, config: Config, source: Graph) -> tuple[str, ...]:
    """What the call assumes of sizes that the graph leaves open.

    Raises Departure ``contract:<code>`` with the specification's own message.
    """
    paper = _OnPaper(source)
    try:
        given = paper.arguments(lambda b: emit_call(b, Lowering(b, plan.graph), plan))
    except LookupError as error:
        raise _not_lowered(plan, error) from error
    machine = config.machine
    try:
        operator = V3_FUNCTIONAL.name, machine.soc, machine.cann
        open_sizes = bound(*operator, "graph", False, given).undecided
        lines = [line for one in open_sizes if (line := _assumed(one))]
    except ContractError as error:
        detail = f"{error.argument}: expected {error.expected}, found {error.found}"
        value = plan.values.get(error.argument, plan.proposal.x)
        raise Departure(f"contract:{error.code}", detail, [value]) from None
    allowed = limits(V3_FUNCTIONAL.name, machine.soc, machine.cann, "graph")
    if "query_norm_flag" in plan.attributes and not allowed.gives_query_norm:
        detail = (
            f"query_norm_flag: the operator takes it with CANN {machine.cann} and gives no "
            "query_norm, which is read here"
        )
        raise Departure("contract:query_norm_flag", detail, [plan.proposal.x])
    return tuple(lines)


def _not_lowered(plan: Plan, error: LookupError) -> Departure:
    """Why an argument is nothing that a graph computes in front of the call."""
    graph, values = plan.graph, [one for one in error.args if isinstance(one, Value)]
    nodes = [node for value in values for node in graph.nodes.get(value, ())]
    for node in nodes:
        if graph.base(node) in graph.early_writes:
            detail = f"a step changes {graph.base(node).name} where it lies"
            return Departure("graph.not_functional", detail, values)
    named = ", ".join(node.name for node in nodes[:1]) or str(error)
    detail = f"an argument of the call would be made of {named}"
    return Departure("step.unknown", detail, values or plan.proposal.products)


def _assumed(one: Undecided) -> str:
    """What is assumed of a size that the operator takes for some of its values only; "" where the
    compiler guards that, so that the graph is compiled anew for the others.

    Raises ContractError where the operator does not take the size that the graph was traced with.
    """
    condition = one.sizes.condition(one.size)
    guarded = guard(condition)
    if (hint_of(condition) if guarded is None else guarded) is False:
        expected = f"{one.axis} {one.sizes}"
        found = f"{one.axis} {hint_of(one.size)}, when the graph was traced"
        raise ContractError(f"dims.{one.axis.lower()}", one.argument, expected, found)
    if guarded:
        return ""
    return f"{one.axis} ({one.size}) is {one.sizes}: {OPERATOR} takes no other"


class _Called(Exception):
    """The kernel's call has been reached. ``given``: its arguments by name."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


class _OnPaper(OfTensors):
    """Makes a call, up to the operator itself, on the values that the nodes of a graph are said to
    have: nothing is computed.
    """

    def __init__(self, graph: Graph) -> None:
        self._mode = fake_mode_of(graph) or FakeTensorMode()

    def arguments(self, recipe: Recipe) -> dict[str, Any]:
        """What the operator is given, by name."""
        try:
            with torch.no_grad(), self._mode:
                recipe(self)
        except _Called as called:
            return emit_call.given
        raise AssertionError(f"no call of {OPERATOR}")

    def value(self, node: Node) -> torch.Tensor:
        made: torch.Tensor = faked(node.meta["val"], self._mode)
        return made

    def cache(self, node: Node, shape: Sequence[Any]) -> torch.Tensor:
        return self.value(node).new_empty(list(shape))  # torch would write its sizes as quotients

    def call(self, op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(op, OpOverload) and schema_of(op).name.endswith(f"::{V3_FUNCTIONAL.name}"):
            accepted = [one.name for one in schema_of(op).arguments if not one.is_out]
            given = dict(zip(accepted, args, strict=False)) | kwargs
            raise _Called({name: given[name] for name in accepted if name in given})
        made: torch.Tensor = op(*args, **kwargs)
        return made

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> torch.Tensor:
        made = recipe(self)  # and laid out as the kernel reads it
        return made.new_empty(made.shape)

    def sizes(self, shape: Sequence[Any], of: Any = None) -> list[Any]:
        return list(shape)

    def constant(self, numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((len(numbers),), dtype=torch.int64)
