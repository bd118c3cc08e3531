"""Packs weights once, in a graph that runs as it is.

Without a wrapper around the graph the pass writes the packing of weights into it, and GE folds it.
A graph that is executed node by node would transpose and cast every weight at every step. Here one
call replaces all packings, and remembers their results as long as the parameters are the same and
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.compile.dynamo import differs_by_call, mark_arguments
from mla_fusion.config import Config
from mla_fusion.fx.kinds import op_name
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
    """Returns the packed weights of one graph. Runs a packing program only for tensors for which
    it has not run.
    """

    def __init__(self, wanted: Sequence[Packed]) -> None:
        super().__init__()
        self.weights = Weights(wanted)

    def forward(self, *sources: Any) -> tuple[Tensor, ...]:
        return self.weights.of(sources)


def pack_once(gm: GraphModule, config: Config) -> int:
    """Replaces, in place, each packing that reads only inputs and is the same for each call.
    Returns the number of packings.

    One call of a module replaces all of them, so that a step makes one comparison.
    """
    # by the last node of a packing: the calls that read it, and their argument
    readers: dict[Node, list[tuple[Node, int]]] = {}
    for call in gm.graph.nodes:
        for position in WEIGHTS if op_name(call) in _CALLS else ():
            weight = call.args[position]
            if isinstance(weight, Node) and weight.op == "call_function":
                readers.setdefault(weight, []).append((call, position))
    inputs = gm.graph.find_nodes(op="placeholder")
    mark_arguments(inputs)
    steps = {weight: sorted(nodes_between((), [weight])) for weight in readers}
    weights = [weight for weight in readers if not differs_by_call(_inputs_of(steps[weight]))]
    if not weights:
        return 0
    read = {node for weight in weights for node in steps[weight]}
    sources = [node for node in inputs if node in read]
    gm.add_submodule(
        NAME, PackOnce([_packed(gm, steps[weight], sources, config) for weight in weights])
    )
    with gm.graph.inserting_after(inputs[-1]):
        packed = gm.graph.call_module(NAME, tuple(sources))
    last = packed
    for number, weight in enumerate(weights):
        with gm.graph.inserting_after(last):
            last = gm.graph.call_function(getitem, (packed, number))
        last.meta.update(weight.meta)
        for call, position in readers[weight]:
            call.update_arg(position, last)
    packed.meta["val"] = tuple(weight.meta["val"] for weight in weights)
    gm.graph.eliminate_dead_code()
    return len(weights)


def _inputs_of(steps: Sequence[Node]) -> list[Node]:
    return [node for node in steps if node.op == "placeholder"]


def _packed(
    gm: GraphModule, steps: Sequence[Node], sources: Sequence[Node], config: Config
) -> Packed:
    """Returns the packing of these steps, over arguments that stand for ``sources``."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in steps:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[steps[-1]])
    inputs = _inputs_of(steps)
    return Packed(
        GraphModule(gm, graph, "PackWeight"),
        config.updates,
        positions=tuple(map(sources.index, inputs)),
        names=tuple(map(label, inputs)),
    )
