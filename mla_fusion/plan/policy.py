"""Checks what the field cannot see: the dtypes of a model and steps in place.

These are rules over the nodes of a graph. ``planner.py`` asks them after the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import dtype_of, value_of
from mla_fusion.fx.vector_numbers import HOLDS_BFLOAT16
from mla_fusion.fx.walk import upward, views_and_model_casts
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value, strip_reshapes
from mla_fusion.graph.numbers import Number
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.plan.outputs import departure_at
from mla_fusion.propose.prologue import Proposal
from mla_fusion.propose.quantised import operand_format
from mla_fusion.targets.prolog import GAMMAS, WEIGHTS

NARROW = (
    "the float32 norm weights hold bfloat16 numbers (looked at, and again whenever they are packed)"
)
_HELD = (torch.bfloat16, torch.int8, torch.uint8)  # bfloat16 holds their numbers
_WIDE = (torch.bfloat16, torch.float32, torch.float64)
_EXACT = 2**-20  # roundings of float32


def check_region(graph: Graph, proposal: Proposal, region: Iterable[Node]) -> None:
    """Checks the dtypes, stream labels and norm weights of a plan. Raises Departure.

    region  the nodes that the call computes instead of the graph
    """
    region = list(region)
    labels = {node.meta.get("stream_label") for node in region}
    if len(labels) > 1:
        label_names = ", ".join(sorted(map(str, labels)))
        raise Departure("stream.mixed", f"the labels are {label_names}", proposal.products)
    mode = proposal.arguments.get("weight_quant_mode")
    dots = (value for value in proposal.products if value.op == "dot")
    products = {value for value in dots if operand_format(value.sources[0]) is None}

    def is_product(node: Node) -> bool:
        """Returns True if the node holds a product of floats that the kernel computes inside."""
        values = values_of(graph.readings[node])
        return any(strip_reshapes(graph.form.split(value)[1]) in products for value in values)

    for node in region:
        tensor = value_of(node)
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        if tensor.dtype.itemsize > 1 and tensor.dtype not in _WIDE:
            raise departure_at(graph, node, "dtype.region", f"{node.name} is {tensor.dtype}")
        if tensor.dtype == torch.bfloat16 and _is_statistic(graph.readings[node]):
            detail = f"{node.name}, in a norm, is bfloat16"
            raise departure_at(graph, node, "norm.low_precision", detail)
        if is_product(node) and not any(map(is_product, node.all_input_nodes)):
            _check_product(graph, node)
    for name in ("token_x", *WEIGHTS):
        value = proposal.arguments[name]
        is_float = not (value.active or (mode and value.dtype.itemsize == 1))
        if is_float and not _holds_bfloat16(graph, value):
            raise Departure("dtype.region", f"{name} is {value.dtype}", [value])
    for name in GAMMAS:
        value = proposal.arguments[name]
        number, weight = graph.form.split(value)
        is_absent = strip_reshapes(value).op == "expand" or (
            weight.op == "product" and not value.model
        )
        if is_absent:
            raise Departure("norm.gamma_absent", f"{name} is no weight", [value])
        if not value.active and not _holds_bfloat16(graph, value):
            raise Departure("norm.gamma_dtype", f"{name} is {value.dtype}", [value])
        # bytes are a row divided by its largest element: a number in front of it does not matter
        is_rounded_product = weight.op in ("sum", "product") or not _is_power_of_two(number)
        if is_rounded_product and not value.active and not (mode and name == GAMMAS[0]):
            detail = f"{name} is {value.dtype}, times a number that is no power of two"
            raise Departure("norm.gamma_dtype", detail, [value])


def check_functional(graph: Graph, nodes: Iterable[Node]) -> None:
    """Raises Departure if a step changes the memory of one of the nodes.

    What a reader sees then depends on the order of steps, and a call would change that order.
    """
    for node in nodes if graph.early_writes else ():
        base = graph.base(node)
        if base in graph.early_writes:
            detail = f"a step changes {base.name} where it lies"
            raise departure_at(graph, node, "graph.not_functional", detail)


def _check_product(graph: Graph, node: Node) -> None:
    """Raises Departure if a product has operands wider than bfloat16, or is scaled.

    The kernel rounds what it multiplies to bfloat16, and scales no product.
    """
    for operand in node.all_input_nodes:
        value, tensor = graph.readings[operand], value_of(operand)
        is_wide = isinstance(tensor, torch.Tensor) and tensor.dtype in _WIDE[1:]
        if is_wide and isinstance(value, Value) and value.active and not is_rounded(operand):
            detail = f"{operand.name}, which {node.name} multiplies, is {tensor.dtype}"
            raise Departure("dtype.region", detail, [value])
    for name in ("alpha", "beta"):
        if node.kwargs.get(name, 1) not in (0, 1):  # 0: nothing is added
            detail = f"{node.name} has {name} {node.kwargs[name]}"
            raise departure_at(graph, node, "linear.scaled", detail)


def is_rounded(node: Node) -> bool:
    """Returns True if a cast has rounded the numbers to bfloat16, whatever their dtype is."""
    dtypes = (dtype_of(producer) for producer in upward(node, views_and_model_casts))
    return next((dtype for dtype in dtypes if dtype not in _WIDE[1:]), None) == torch.bfloat16


def gamma_assumptions(proposal: Proposal) -> list[str]:
    """Returns what is assumed about norm weights that are wider than bfloat16."""
    gammas = [proposal.arguments[name] for name in GAMMAS]
    has_wide = any(value.dtype != torch.bfloat16 and not value.active for value in gammas)
    return [NARROW] if has_wide else []


def _holds_bfloat16(graph: Graph, value: Value) -> bool:
    """Returns True if the numbers are those of bfloat16, in any dtype. The numbers of parameters
    were read.
    """
    while value.dtype != torch.bfloat16 and value.op in ("reshape", "cast"):
        value = value.sources[0]
    if value.dtype in _HELD:
        return True
    inputs = [node for node in graph.nodes.get(value, ()) if node.op == "placeholder"]
    return bool(inputs) and all(node.meta.get(HOLDS_BFLOAT16) for node in inputs)


def _is_power_of_two(number: Number) -> bool:
    """Returns True for a power of two, as near as float32 is. Products of a weight with other
    numbers are exact arithmetic beside an activation, and packing would round them.
    """
    mantissa = 2 * math.frexp(abs(float(number)))[0]
    return min(mantissa - 1, 2 - mantissa) < _EXACT


def _is_statistic(reading: object) -> bool:
    """Returns True if the reading is squares, a mean of squares, or a power of one."""
    if not isinstance(reading, Value):
        return False
    inner = reading
    while inner.op in ("product", "sum", "reshape") and len(inner.sources) == 1:
        inner = inner.sources[0]
    is_square = reading.op == "product" and reading.literal[0] == (2,)
    return is_square or (inner.op == "reduce" and reading.shape[-1:] == (1,))
