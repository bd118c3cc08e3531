"""Is a candidate what the kernel computes? Each rule raises ``Refuse`` with its code."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fusion.facts.projection import Projection
from mla_fusion.fusion.candidate import Candidate, same_table
from mla_fusion.fusion.rejection import Refuse
from mla_fusion.graph.program import Program, nodes_between
from mla_fusion.graph.view import View, ancestry

_REGION_DTYPES = (torch.bfloat16, torch.float32, torch.complex64)


def judge(view: View, candidate: Candidate) -> None:
    """Apply every rule that the facts alone decide."""
    _norms(candidate)
    _projections(view, candidate)
    _rotation(view, candidate)
    _dtypes(view, candidate)
    _streams(candidate)


def projections(candidate: Candidate) -> list[Projection]:
    """The distinct projections of the region, absorbed product included."""
    q, k = candidate.query, candidate.key
    every = [q.down, q.up_nope, q.up_rope, q.absorb.projection, k.down, k.down_rope]
    return list({item.node: item for item in every}.values())


def _norms(candidate: Candidate) -> None:
    q, k = candidate.query.norm, candidate.key
    sides = [("c_q", q.node, q.gamma, q.runtime_eps, q.low_precision)]
    if k.norm is not None:
        sides.append(("c_kv", k.norm.node, k.gamma, k.norm.runtime_eps, k.norm.low_precision))
    elif k.operator is not None:
        sides.append(("c_kv", k.operator.node, k.gamma, None, None))
    for name, node, gamma, runtime_eps, low_precision in sides:
        if runtime_eps is not None:
            raise Refuse("norm.runtime_eps", f"epsilon of {name} is {runtime_eps.name}", (node, runtime_eps))
        if low_precision is not None:
            dtype = str(low_precision.meta["val"].dtype).removeprefix("torch.")
            raise Refuse("norm.low_precision", f"{low_precision.name} of {name} is {dtype}", (node, low_precision))
        if gamma is None:
            raise Refuse("norm.gamma_absent", f"{name} = {node.name}", (node,))
        if gamma.meta["val"].dtype != torch.bfloat16:
            dtype = str(gamma.meta["val"].dtype).removeprefix("torch.")
            raise Refuse("norm.gamma_dtype", f"{gamma.name} of {name} is {dtype}", (node, gamma))


def _projections(view: View, candidate: Candidate) -> None:
    for item in projections(candidate):
        bias = item.product.bias
        if bias is not None and not _is_zero(view, bias):
            raise Refuse("linear.bias", f"{item.node.name} adds {bias.name}", (item.node, bias))
        if item.product.factors[0] != 1.0:
            raise Refuse("linear.scaled", f"{item.node.name} has alpha {item.product.factors[0]}", (item.node,))


def _is_zero(view: View, bias: Node) -> bool:
    if not view.is_constant(bias):
        return False
    program = Program([], nodes_between((), bias), view.binding)
    value = program.run([])[program.slot(bias)]
    return isinstance(value, torch.Tensor) and not bool(value.any())


def _rotation(view: View, candidate: Candidate) -> None:
    q, k = candidate.query, candidate.key
    nodes = tuple(node for node in (q.rope.node, k.rope.node if k.rope else None) if node is not None)
    if q.rope.rope_dim != k.rope_dim:
        raise Refuse("rope.tables_differ", f"Dr is {q.rope.rope_dim} on q and {k.rope_dim} on k", nodes)
    if q.rope.layout != k.layout:
        raise Refuse("rope.layouts_differ", f"q leaves RoPE {q.rope.layout}, k {k.layout}", nodes)
    ratios = {same_table(view, q.rope.cos, k.cos), same_table(view, q.rope.sin, k.sin)}
    ratio = ratios.pop() if len(ratios) == 1 else None
    if ratio is None:
        bases = ", ".join(sorted({run.base.name for run in (*q.rope.cos, *q.rope.sin, *k.cos, *k.sin)}))
        raise Refuse("rope.tables_differ", f"tables are taken from {bases}", nodes)
    if abs(ratio - q.absorb.factor) > 1e-6 * abs(ratio):
        factors = f"q_nope by {q.absorb.factor:g}, q_pe by {ratio:g} (relative to k_pe)"
        raise Refuse("scale.unequal", factors, (q.absorb.node, *nodes))


def _dtypes(view: View, candidate: Candidate) -> None:
    for item in projections(candidate):
        for role, node in (("activation", item.activation), ("weight", item.weight), ("product", item.node)):
            dtype = node.meta["val"].dtype
            if dtype != torch.bfloat16:
                found = str(dtype).removeprefix("torch.")
                raise Refuse("dtype.region", f"{role} {node.name} is {found}, the kernel takes bfloat16", (node,))
    for node in _region(candidate):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype not in _REGION_DTYPES:
            if value.dtype == torch.float64:
                continue  # wider than the kernel's float32
            found = str(value.dtype).removeprefix("torch.")
            raise Refuse("dtype.region", f"{node.name} is {found}", (node,))


def _region(candidate: Candidate) -> Iterator[Node]:
    """Plain nodes between the projections and the norms and rotations."""
    q, k = candidate.query, candidate.key
    for item in projections(candidate):
        yield from ancestry(item.activation)
    yield from nodes_between((q.down.node,), q.norm.node)
    yield from nodes_between((q.up_rope.node,), q.rope.node)
    yield from nodes_between((q.up_nope.node,), q.absorb.projection.activation)
    if k.norm is not None:
        yield from nodes_between((k.down.node,), k.norm.node)
    if k.rope is not None:
        yield from nodes_between((k.down_rope.node,), k.rope.node)


def _streams(candidate: Candidate) -> None:
    labels = {node.meta.get("stream_label") for node in candidate.nodes}
    if len(labels) > 1:
        found = ", ".join(sorted(str(label) for label in labels))
        raise Refuse("stream.mixed", f"labels {found}", candidate.nodes)
