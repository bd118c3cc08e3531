"""Weights packed once, in a graph that runs as it is.

Without a wrapper around the graph the pass writes the packing of weights into it, where GE folds
it. A graph that is executed node by node would transpose and cast every weight at every step; here
one call stands for all packings and remembers their results for as long as the parameters are the
same and unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.compile.dynamo import differs_by_call, mark_arguments
from mla_fusion.config import Config
from mla_fusion.fx.module_path import label
from mla_fusion.fx.walk import nodes_between
from mla_fusion.meta.prolog import V3, V3_FUNCTIONAL
from mla_fusion.weights.cache import Packed
from mla_fusion.weights.current import Weights

# W_dq, W_uq_qr, W_uk, W_dkv_kr and the two gammas, by position in every form of the call
WEIGHTS = V3.places(
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
)
NAME = "mla_fusion_packed"
_CALLS = tuple(f"npu::{operator.name}" for operator in (V3, V3_FUNCTIONAL))


class PackOnce(torch.nn.Module):
    """Gives the packed weights of one graph; runs a packing program where it has not run for these
    very tensors.
    """

    def __init__(self, wanted: Sequence[Packed]) -> None:
        super().__init__()
        self.weights = Weights(wanted)

    def forward(self, *sources: Any) -> tuple[Tensor, ...]:
        return self.weights.of(sources)


def pack_once(gm: GraphModule, config: Config) -> int:
    """Replace, in place, the packing of every weight that is made of inputs alone, and is the same
    for each call; how many.

    One call of a module stands for all of them, so that one comparison a step does.
    """
    # the packing's last node: the calls that read it, and where
    made: dict[Node, list[tuple[Node, int]]] = {}
    for call in _calls(gm.graph):
        for position in WEIGHTS:
            weight = call.args[position]
            if isinstance(weight, Node) and weight.op == "call_function":
                made.setdefault(weight, []).append((call, position))
    inputs = gm.graph.find_nodes(op="placeholder")
    mark_arguments(inputs)
    above = {weight: set(nodes_between((), weight)) for weight in made}
    steps = {
        weight: each
        for weight, each in above.items()
        if not differs_by_call([node for node in inputs if node in each])
    }
    if not steps:
        return 0
    sources = [node for node in inputs if any(node in each for each in steps.values())]
    wanted = [_wanted(gm, weight, steps[weight], sources, config) for weight in steps]
    gm.add_submodule(NAME, PackOnce(wanted))
    with gm.graph.inserting_after(inputs[-1]):
        packed = gm.graph.call_module(NAME, tuple(sources))
    after = packed
    for number, weight in enumerate(steps):
        with gm.graph.inserting_after(after):
            after = gm.graph.call_function(getitem, (packed, number))
        after.meta.update(weight.meta)
        for call, position in made[weight]:
            call.update_arg(position, after)
    packed.meta["val"] = tuple(weight.meta["val"] for weight in steps)
    gm.graph.eliminate_dead_code()
    return len(steps)


def _calls(graph: Graph) -> list[Node]:
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and schema_of(node.target).name in _CALLS
    ]


def _wanted(
    gm: GraphModule, weight: Node, steps: set[Node], inputs: Sequence[Node], config: Config
) -> Packed:
    sources = [node for node in inputs if node in steps]
    graph, copies = Graph(), dict[Node, Node]()
    made = (node for node in gm.graph.nodes if node in steps and node.op != "placeholder")
    for node in [*sources, *made]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[weight])
    program = GraphModule(gm, graph, "PackWeight")
    positions = tuple(inputs.index(source) for source in sources)
    names = tuple(map(label, sources))
    return Packed(program, config.updates, positions=positions, names=names)
