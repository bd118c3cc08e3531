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

from mla_fusion.compat import OpOverload, schema_of, storage_id
from mla_fusion.fx.module_path import label
from mla_fusion.fx.program import nodes_between
from mla_fusion.meta.prolog import V3, V3_FUNCTIONAL
from mla_fusion.weights import cache
from mla_fusion.weights.current import Current, Use

# W_dq, W_uq_qr, W_uk, W_dkv_kr and the two gammas, by position in every form of the call
WEIGHTS = V3.places(
    "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv"
)
_CALLS = tuple(f"npu::{operator.name}" for operator in (V3, V3_FUNCTIONAL))


class Turns:
    """Of the weights of one graph, one looks at a share of its bytes at each step."""

    def __init__(self) -> None:
        self.count = 0
        self._next = 0
        self._is_open = False

    def has(self, number: int) -> bool:
        """Asked once a step by each weight, in the graph's order."""
        self._is_open = self._is_open or number == 0
        if not self._is_open or number != self._next:
            return False
        self._is_open, self._next = False, (number + 1) % self.count
        return True


class PackOnce(torch.nn.Module):
    """Runs a packing program, or gives what it gave for these very tensors.

    names    of the tensors in the user's model
    updates  as in Config
    """

    def __init__(self, program: GraphModule, names: Sequence[str], updates: str, turns: Turns) -> None:
        super().__init__()
        self.program = program
        self.packing = cache.Packing(program, cache.describe(program), updates=updates)
        self.names, self.turns, self.number = tuple(names), turns, turns.count
        turns.count += 1
        self._known: dict[object, Current] = {}  # by the memory of the first tensor

    def forward(self, *sources: Tensor) -> Tensor:
        looks = self.turns.has(self.number)
        if not cache.are_plain(sources):
            return self.packing.weight(sources)
        key = storage_id(sources[0]) if sources else None
        known = self._known.get(key)
        if known is None or not (known.is_current and known.holds(sources, looks)):
            self._known = {place: other for place, other in self._known.items() if other.is_current}
            use = Use(self.packing.of(sources), tuple(range(len(sources))), self.names)
            self.packing.sweep()
            known = self._known[key] = Current([use], sources, known)
        packed = known.entries[0].packed
        assert packed is not None
        return packed


def pack_once(gm: GraphModule, updates: str) -> int:
    """Replace, in place, the packing of every weight that is made of inputs alone; how many."""
    packed: dict[Node, Node] = {}
    turns = Turns()
    for call in _calls(gm.graph):
        for position in WEIGHTS:
            weight = call.args[position]
            if not isinstance(weight, Node) or weight.op != "call_function":
                continue
            if weight not in packed:
                packed[weight] = _remembered(gm, weight, f"mla_fusion_packed_{len(packed)}", updates, turns)
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


def _remembered(gm: GraphModule, weight: Node, name: str, updates: str, turns: Turns) -> Node:
    steps = nodes_between((), weight)
    sources = [node for node in gm.graph.nodes if node.op == "placeholder" and node in set(steps)]
    program = _program(gm, steps, sources, weight)
    gm.add_submodule(name, PackOnce(program, [label(source) for source in sources], updates, turns))
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
