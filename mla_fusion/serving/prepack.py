"""Weights packed once, in a graph that runs as it is.

Without a wrapper around the graph the pass writes the packing of weights into it, where GE folds it. A graph that
is executed node by node would transpose and cast every weight at every step; here each packing becomes one call that
remembers its result for as long as the parameters are the same and unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx.program import nodes_between
from mla_fusion.meta.prolog import V3, V3_FUNCTIONAL
from mla_fusion.weights import cache

# W_dq, W_uq_qr, W_uk, W_dkv_kr and the two gammas, by position in every form of the call
WEIGHTS = V3.places(
    "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv"
)
_CALLS = tuple(f"npu::{operator.name}" for operator in (V3, V3_FUNCTIONAL))


class PackOnce(torch.nn.Module):
    """Runs a packing program, or gives what it gave for these very tensors."""

    def __init__(self, program: GraphModule) -> None:
        super().__init__()
        self.program = program
        self.packing = cache.Packing(program, cache.describe(program))

    def forward(self, *sources: Tensor) -> Tensor:
        packed = self.packing.of(sources).packed
        assert packed is not None
        return packed


def pack_once(gm: GraphModule) -> int:
    """Replace, in place, the packing of every weight that is made of inputs alone; how many."""
    packed: dict[Node, Node] = {}
    for call in _calls(gm.graph):
        for position in WEIGHTS:
            weight = call.args[position]
            if not isinstance(weight, Node) or weight.op != "call_function":
                continue
            if weight not in packed:
                packed[weight] = _remembered(gm, weight, f"mla_fusion_packed_{len(packed)}")
            call.replace_input_with(weight, packed[weight])
    if packed:
        gm.graph.eliminate_dead_code()
    return len(packed)


def _calls(graph: Graph) -> list[Node]:
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and schema_of(node.target).name in _CALLS
    ]


def _remembered(gm: GraphModule, weight: Node, name: str) -> Node:
    steps = nodes_between((), weight)
    sources = [node for node in gm.graph.nodes if node.op == "placeholder" and node in set(steps)]
    gm.add_submodule(name, PackOnce(_program(gm, steps, sources, weight)))
    with gm.graph.inserting_after(weight):
        node = gm.graph.call_module(name, tuple(sources))
    node.meta.update(weight.meta)
    return node


def _program(gm: GraphModule, steps: Sequence[Node], sources: Sequence[Node], weight: Node) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in [*sources, *(step for step in steps if step.op != "placeholder")]:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    graph.output(copies[weight])
    return GraphModule(gm, graph, "PackWeight")
