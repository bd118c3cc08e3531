"""Which inputs of a graph are the model's own, the same at every call."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import OpOverload
from mla_fusion.fx.module_path import ARGUMENT
from mla_fusion.graph.call import name_of

_OPERANDS = {  # places of the weight, and of its scales, among a product's arguments
    "mm": (1,),
    "bmm": (1,),
    "matmul": (1,),
    "linear": (1,),
    "addmm": (2,),
    "baddbmm": (2,),
    "_int_mm": (1,),
    "_scaled_mm": (1,),
    "npu::npu_quant_matmul": (1, 2),
    "npu::npu_transpose_batchmatmul": (1,),
}
_MOVED = frozenset(
    "clone _to cat stack reshape _unsafe_view contiguous mul t transpose permute view".split()
)


def parameters(graph: Graph) -> set[Node]:
    """By what a tracer says of them; of those of which none says anything, by what is done with
    them.
    """
    inputs = graph.find_nodes(op="placeholder")
    said = {node for node in inputs if _is_said_to_be_one(node)}
    unknown = {node for node in inputs if node.meta.get(ARGUMENT) is None}
    return said | used_as_weights(graph) & unknown if unknown else said


def used_as_weights(graph: Graph) -> set[Node]:
    """The inputs that products have for weights, and that nobody writes."""
    found = set[Node]()
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and name_of(node.target) in _OPERANDS:
            for place in _OPERANDS[name_of(node.target)]:
                found |= _behind(node.args[place])
        elif isinstance(node.target, OpOverload) and name_of(node.target) == "einsum":
            found |= _behind(node.args[1][1])
    written = torch.ops.aten.copy_.default
    return found - {node.args[0] for node in graph.nodes if node.target is written}


def _is_said_to_be_one(node: Node) -> bool:
    is_argument = node.meta.get(ARGUMENT)
    if is_argument is not None:
        return not is_argument
    description = type(node.meta.get("desc")).__name__
    return "Param" in description or "Buffer" in description


def _behind(operand: object) -> set[Node]:
    """The inputs that an operand is moved from; none, where it is made of anything else."""
    stack, found = [operand], set[Node]()
    while stack:
        node = stack.pop()
        if not isinstance(node, Node):
            continue
        if node.op == "placeholder":
            found.add(node)
        elif node.op == "call_function":
            target = node.target
            is_move = isinstance(target, OpOverload) and (
                target.is_view or name_of(target).removesuffix("_copy") in _MOVED
            )
            if isinstance(target, OpOverload) and not is_move:
                return set()
            stack += node.all_input_nodes
    return found
