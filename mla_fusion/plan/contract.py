"""Asks the operator's own specification (``meta/``) whether it takes the planned call.

``planner.py`` asks this after the rows are placed. The call is made on fake tensors, so nothing is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import FakeTensorMode, guard, hint_of, schema_of
from mla_fusion.config import Config
from mla_fusion.fx.build import Builder, Recipe, fake_mode_of, faked
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.lower import Lowering
from mla_fusion.meta import ContractError, limits
from mla_fusion.meta.binder import Undecided
from mla_fusion.meta.check import bound
from mla_fusion.meta.prolog import V3_FUNCTIONAL
from mla_fusion.plan.caches import Staged
from mla_fusion.plan.call import emit_call
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.policy import check_functional

OPERATOR = V3_FUNCTIONAL.name.removesuffix("_functional")  # the name in messages


def check_contract(plan: Plan, config: Config) -> tuple[str, ...]:
    """Returns what the call assumes about sizes that the graph leaves open.

    Raises Departure ``contract:<code>``, with the specification's own message, if the call is
    refused.
    """
    fake_call = _FakeCall(plan.graph.gm.graph)
    try:
        with torch.no_grad(), fake_call.mode:
            emit_call(fake_call, Lowering(fake_call, plan.graph), plan)
    except LookupError as error:
        raise lowering_departure(plan, error) from error
    machine = config.machine
    try:
        operator = V3_FUNCTIONAL.name, machine.soc, machine.cann
        open_sizes = bound(*operator, "graph", False, fake_call.operands).undecided
        assumptions = tuple(filter(None, map(_size_assumption, open_sizes)))
    except ContractError as error:
        detail = f"{error.argument}: expected {error.expected}, found {error.found}"
        if error.argument == "cache_mode" and isinstance(plan.caches, Staged):
            detail += f"; not in place: {plan.caches.obstacles[0]}"
        value = plan.values.get(error.argument, plan.proposal.x)
        raise Departure(f"contract:{error.code}", detail, [value]) from None
    release = limits(V3_FUNCTIONAL.name, machine.soc, machine.cann, "graph")
    if "query_norm_flag" in plan.attributes and not release.gives_query_norm:
        detail = (
            f"query_norm_flag: the operator takes it with CANN {machine.cann} and gives no "
            "query_norm, which is read here"
        )
        raise Departure("contract:query_norm_flag", detail, [plan.proposal.x])
    return assumptions


def lowering_departure(plan: Plan, error: LookupError) -> Departure:
    """Returns why an argument cannot be computed before the call.

    Raises Departure if a step has changed the memory that it is in.
    """
    graph, values = plan.graph, [argument for argument in error.args if isinstance(argument, Value)]
    nodes = [node for value in values for node in graph.nodes.get(value, ())]
    check_functional(graph, nodes)
    name = nodes[0].name if nodes else "what no operator computes" if values else str(error)
    detail = f"an argument of the call would be made of {name}"
    return Departure("step.unknown", detail, values or plan.proposal.products)


def _size_assumption(undecided: Undecided) -> str:
    """Returns what is assumed about a size that the operator takes for some of its values only.

    Returns "" if the compiler guards the size, since it compiles the graph anew for other values.

    Raises ContractError if the operator does not take the size that the graph was traced with.
    """
    is_guarded = guard(undecided.sizes.condition(undecided.size))
    if is_guarded is False:
        expected = f"{undecided.axis} {undecided.sizes}"
        actual = f"{undecided.axis} {hint_of(undecided.size)}, when the graph was traced"
        raise ContractError(f"dims.{undecided.axis.lower()}", undecided.argument, expected, actual)
    if is_guarded:
        return ""
    return f"{undecided.axis} ({undecided.size}) is {undecided.sizes}: {OPERATOR} takes no other"


class _FakeCall(Builder):
    """Makes the arguments of a call, on the fake values of the graph's nodes.

    operands  the arguments of the operator, by name
    """

    def __init__(self, graph: Graph) -> None:
        self.mode, self.operands = fake_mode_of(graph) or FakeTensorMode(), dict[str, Any]()

    def value(self, node: Node) -> torch.Tensor:
        tensor: torch.Tensor = faked(node.meta["val"], self.mode)
        return tensor

    def cache(self, node: Node, shape: Sequence[Any]) -> torch.Tensor:
        return self.value(node).new_empty(list(shape))  # torch writes sizes of views as quotients

    def call(self, op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = op(*args, **kwargs)
        return tensor

    def call_again(self, key: object, op: Any, *args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in schema_of(op).arguments if not argument.is_out]
        operands = dict(zip(names, args, strict=False)) | kwargs
        self.operands = {name: operands[name] for name in names if name in operands}
        return [None] * len(V3_FUNCTIONAL.results)  # the operator itself is not called

    def packed(
        self, name: str, recipe: Recipe, leaves: Sequence[Node], exact: Exact | None = None
    ) -> torch.Tensor:
        packed_tensor = recipe(self)  # as if laid out for the kernel
        return packed_tensor.new_empty(packed_tensor.shape)

    def sizes(self, shape: Sequence[Any], of: Any = None) -> list[Any]:
        return list(shape)

    def constant(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(tensor.shape, dtype=tensor.dtype)
