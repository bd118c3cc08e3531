"""Which inputs of a graph are the model's parameters and buffers, equal at every call.

``graph/read.py`` marks the leaves of these inputs as ``model``.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import OpOverload
from mla_fusion.fx.module_path import ARGUMENT
from mla_fusion.graph.call import name_of

_OPERANDS = {  # by product: the places of the weight and of its scales among the arguments
    **dict.fromkeys(
        "mm bmm matmul linear _int_mm _scaled_mm npu::npu_transpose_batchmatmul".split(), (1,)
    ),
    "addmm": (2,),
    "baddbmm": (2,),
    "npu::npu_quant_matmul": (1, 2),
}
_MOVED = frozenset(
    "clone _to cat stack reshape _unsafe_view contiguous mul t transpose permute view".split()
)


def parameters(graph: Graph) -> set[Node]:
    """The inputs that belong to the model.

    An input is one if the tracer says so. If the tracer says nothing about an input, it is one if
    it is used as a weight.
    """
    inputs = graph.find_nodes(op="placeholder")
    declared = {node for node in inputs if _is_declared_parameter(node)}
    undeclared = {node for node in inputs if node.meta.get(ARGUMENT) is None}
    return declared | used_as_weights(graph) & undeclared if undeclared else declared


def used_as_weights(graph: Graph) -> set[Node]:
    """The inputs that products read as weights, except inputs that are written.

    A weight stands on the right, or on the left of what another product has made.
    """
    weights, computed = set[Node](), set[Node]()
    for node in graph.nodes:
        name = name_of(node.target) if isinstance(node.target, OpOverload) else ""
        operands = node.args[1] if name == "einsum" else node.args
        places = _OPERANDS.get(name, (1,) if name == "einsum" and len(operands) == 2 else ())
        for place in places:
            weights |= _source_inputs(operands[place])
        if places and operands[places[0]] in computed:
            weights |= _source_inputs(operands[places[0] - 1])
        if places or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    copy = torch.ops.aten.copy_.default
    return weights - {node.args[0] for node in graph.nodes if node.target is copy}


def _is_declared_parameter(node: Node) -> bool:
    """True if the tracer says that the input is a parameter or a buffer."""
    is_argument = node.meta.get(ARGUMENT)
    if is_argument is not None:
        return not is_argument
    description = type(node.meta.get("desc")).__name__
    return "Param" in description or "Buffer" in description


def _source_inputs(operand: object) -> set[Node]:
    """The inputs that an operand is moved, cast or scaled from. Empty if it is computed
    otherwise.
    """
    stack, inputs = [operand], set[Node]()
    while stack:
        node = stack.pop()
        if not isinstance(node, Node):
            continue
        if node.op == "placeholder":
            inputs.add(node)
        elif node.op == "call_function":
            target = node.target
            if isinstance(target, OpOverload) and not (
                target.is_view or name_of(target).removesuffix("_copy") in _MOVED
            ):
                return set()
            stack += node.all_input_nodes
    return inputs
