"""What the field cannot see: the dtypes of a model. Rules over the nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from mla_fusion.fx.held import numbers
from mla_fusion.fx.kinds import dtype_of
from mla_fusion.fx.walk import upward, views_and_model_casts
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.read import Graph, values_of
from mla_fusion.plan.outputs import strip_reshapes
from mla_fusion.propose.prologue import Proposal

NARROW = (
    "the float32 norm weights hold bfloat16 numbers (looked at, and again whenever they are packed)"
)
_GAMMAS = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
_WIDE = (torch.bfloat16, torch.float32, torch.float64)


def judge(graph: Graph, proposal: Proposal, region: Iterable[Node]) -> None:
    """Raises Departure.

    region  the nodes that the call computes anew
    """
    region = list(region)
    labels = {node.meta.get("stream_label") for node in region}
    if len(labels) > 1:
        named = ", ".join(sorted(map(str, labels)))
        raise Departure("stream.mixed", f"the labels are {named}", proposal.products)
    products, mode = {*proposal.products}, proposal.arguments.get("weight_quant_mode")

    def is_product(node: Node) -> bool:
        values = values_of(graph.readings[node])
        return any(strip_reshapes(graph.form.split(value)[1]) in products for value in values)

    for node in region:
        held = node.meta.get("val")
        if not isinstance(held, torch.Tensor) or not held.is_floating_point():
            continue
        if held.dtype.itemsize > 1 and held.dtype not in _WIDE:
            raise Departure("dtype.region", f"{node.name} is {held.dtype}", _values(graph, node))
        if held.dtype == torch.bfloat16 and _is_statistic(graph.readings[node]):
            detail = f"{node.name}, in a norm, is bfloat16"
            raise Departure("norm.low_precision", detail, _values(graph, node))
        if not mode and is_product(node) and not any(map(is_product, node.all_input_nodes)):
            _judge_product(graph, node)
    if not mode:
        for name in ("token_x", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr"):
            value = proposal.arguments[name]
            if not value.active and not _holds_bfloat16(graph, value):
                raise Departure("dtype.region", f"{name} is {value.dtype}", [value])
    for name in _GAMMAS:
        value = proposal.arguments[name]
        is_one = strip_reshapes(value).op == "expand" or (value.op == "product" and not value.model)
        if is_one:
            raise Departure("norm.gamma_absent", f"{name} is no weight", [value])
        if not value.active and not _holds_bfloat16(graph, value):
            raise Departure("norm.gamma_dtype", f"{name} is {value.dtype}", [value])


def functional(graph: Graph, nodes: Iterable[Node]) -> None:
    """Raises Departure where a step changes what one of the nodes holds: what a reader sees depends
    on the order of steps then, and a call would change that.
    """
    for node in nodes if graph.early_writes else ():
        base = graph.base(node)
        if base in graph.early_writes:
            detail = f"a step changes {base.name} where it lies"
            raise Departure("graph.not_functional", detail, _values(graph, node))


def _judge_product(graph: Graph, node: Node) -> None:
    """The kernel rounds what it multiplies to bfloat16, and scales no product."""
    for read in node.all_input_nodes:
        value, held = graph.readings[read], read.meta["val"]
        is_wide = isinstance(held, torch.Tensor) and held.dtype in _WIDE[1:]
        if is_wide and isinstance(value, Value) and value.active and not is_rounded(read):
            detail = f"{read.name}, which {node.name} multiplies, is {held.dtype}"
            raise Departure("dtype.region", detail, [value])
    for name in ("alpha", "beta"):
        if node.kwargs.get(name, 1) != 1:
            detail = f"{node.name} has {name} {node.kwargs[name]}"
            raise Departure("linear.scaled", detail, _values(graph, node))


def is_rounded(node: Node) -> bool:
    """Are the numbers, though in a wider dtype, bfloat16's by a cast?"""
    dtypes = (dtype_of(above) for above in upward(node, views_and_model_casts))
    return next((dtype for dtype in dtypes if dtype not in _WIDE[1:]), None) == torch.bfloat16


def narrowed(graph: Graph, proposal: Proposal) -> list[str]:
    """What is assumed of norm weights that are wider than bfloat16."""
    gammas = [proposal.arguments[name] for name in _GAMMAS]
    wide = any(value.dtype != torch.bfloat16 and not value.active for value in gammas)
    return [NARROW] if wide else []


def _holds_bfloat16(graph: Graph, value: Value) -> bool:
    """Are its numbers those of bfloat16, in whatever dtype? Parameters have been looked at."""
    while value.dtype != torch.bfloat16 and value.op in ("reshape", "cast"):
        value = value.sources[0]
    if value.dtype == torch.bfloat16:
        return True
    known = [numbers(node) for node in graph.nodes.get(value, ()) if node.op == "placeholder"]
    return bool(known) and all(one is not None and one.bfloat16 for one in known)


def _is_statistic(reading: object) -> bool:
    """Is it a mean of squares, or a power of one?"""
    if not isinstance(reading, Value) or reading.shape[-1:] != (1,):
        return False
    inner = reading
    while inner.op in ("product", "sum", "reshape") and len(inner.sources) == 1:
        inner = inner.sources[0]
    return inner.op == "reduce"


def _values(graph: Graph, node: Node) -> list[Value]:
    reading = graph.readings[node]
    return [reading] if isinstance(reading, Value) else []
