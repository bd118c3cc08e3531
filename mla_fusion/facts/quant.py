"""Quantised projections: the scales of an int8 product, and the dynamic quantisation that its activation went through.

``y = (x_int8 @ w_int8) * weight_scale * token_scale`` with ``x_int8, token_scale = npu_dynamic_quant(x, smooth)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.graph.contraction import Scales
from mla_fusion.graph.kinds import argument, is_getitem, op_name
from mla_fusion.graph.view import View, peel


@dataclass(frozen=True)
class DynamicQuant:
    """``node`` quantises every row of ``source`` to int8, ``smooth`` (per column) multiplied onto it before."""

    node: Node
    source: Node
    smooth: Node | None


@dataclass(frozen=True)
class Quantised:
    """Of one projection. ``dynamic`` is None where the activation enters the graph as int8, or is not of the kind
    that the kernel does itself.
    """

    weight_scale: Node
    token_scale: Node | None
    offset: Node | None
    dynamic: DynamicQuant | None


def read(view: View, activation: Node, scales: Scales) -> Quantised:
    """The quantisation of a product with these scales."""
    dynamic = dynamic_quant(peel(activation))
    if dynamic is not None and scales.token is not None:
        of_scale = peel(scales.token)
        same = is_getitem(of_scale) and of_scale.args[1] == 1 and isinstance(of_scale.args[0], Node)
        if not same or not view.same(of_scale.args[0], dynamic.node):  # type: ignore[arg-type]
            dynamic = None  # scaled by something else than what it was divided by
    return Quantised(scales.weight, scales.token, scales.offset, dynamic)


def dynamic_quant(node: Node) -> DynamicQuant | None:
    """The per-token int8 quantisation of which ``node`` is the first result, or None."""
    operator = node.args[0] if is_getitem(node) and node.args[1] == 0 else None
    return dynamic_quant_by(operator) if isinstance(operator, Node) else None


def dynamic_quant_by(operator: Node) -> DynamicQuant | None:
    """What ``operator`` does, where it is a per-token quantisation to int8."""
    if op_name(operator) != "npu::npu_dynamic_quant" or operator.meta["val"][0].dtype != torch.int8:
        return None
    source, smooth = operator.args[0], argument(operator, "smooth_scales")
    plain = argument(operator, "group_index") is None and argument(operator, "quant_mode") == "pertoken"
    if not plain or argument(operator, "dst_type_max", 0.0):
        return None
    return DynamicQuant(operator, source, smooth) if isinstance(source, Node) else None
