"""Describes the structure of plans, so that the layers of a model share their verdicts.

``planner.py`` numbers structures. It asks the contract, and ``commit/verify.py`` the witness, once
for each number. What these verdicts depend on is equal for plans of one number.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node
from torch.fx.node import map_arg

from mla_fusion.fx.sizes import describe
from mla_fusion.fx.vector_numbers import HOLDS_BFLOAT16
from mla_fusion.fx.walk import INPUTS, reached
from mla_fusion.graph.form import Value, numbered
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.plan.outputs import source_nodes
from mla_fusion.plan.plan import Plan
from mla_fusion.plan.region import activation_nodes


def structure_of(plan: Plan) -> object:
    """Returns a key that is equal for plans that differ only in the names of nodes and inputs.

    It stands for the nodes from x to what is replaced, with the dtypes and strides from which they
    start and what is known of parameters. It also stands for the Values and for the call.
    """
    graph, arguments, ends = plan.graph, plan.proposal.arguments, activation_nodes(plan)
    argument_nodes = source_nodes(graph, plan.values.values())
    caches = [cache for _, cache, _ in plan.written_caches]
    nodes = reached(
        (*plan.region, *argument_nodes, *caches),
        lambda node: () if node in ends else node.all_input_nodes,
    )
    numbers = {node: number for number, node in enumerate(nodes)}
    steps = [
        (ends.get(node), _kind_of(graph, node))
        if node in ends or node.op in INPUTS
        else _describe_call(node, numbers)  # dtypes and strides follow
        for node in numbers
    ]
    token_x = arguments["token_x"]
    sides = [*plan.replaced.values(), *plan.proposal.products]
    for node in plan.replaced:
        sides += values_of(graph.readings[node])
    key, _ = numbered(
        [plan.proposal.x, *plan.values.values(), *sides],
        [token_x, *plan.results.values()],
        token_x.serial,
    )
    return (
        tuple(steps),
        tuple(numbers[node] for node in (*argument_nodes, *plan.replaced)),
        tuple(
            (name, numbers[cache], cache in graph.hidden, tuple(map(str, shape)))
            for name, cache, shape in plan.written_caches
        ),
        frozenset(_kind_of(graph, node) for node in plan.inputs),
        key,
        tuple(
            (name, None if isinstance(argument, Value) else argument)
            for name, argument in arguments.items()
        ),
        tuple(plan.attributes.items()),
        type(plan.caches),
    )


def _kind_of(graph: Graph, node: Node) -> object:
    """Returns the dtype, shape and strides that a node holds, and for an input whose it is."""
    is_parameter, note = node in graph.parameters, node.meta.get(HOLDS_BFLOAT16)
    origin = (node.op, is_parameter, note) if node.op in INPUTS else None
    return origin, describe(node.meta.get("val"))


def _describe_call(node: Node, numbers: Mapping[Node, int]) -> object:
    """Returns what a node calls, with numbers in place of nodes."""
    arguments = map_arg((node.args, node.kwargs), lambda read: f"%{numbers[read]}")
    return node.target, repr(arguments), node.meta.get("stream_label")
