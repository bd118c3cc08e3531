"""What stands between a value and the product that reads it quantised, where no prologue is
found.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mla_fusion.facts.dynamic_quant import DynamicQuantReader, of_values, quantised_behind
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.static_quant import why_not
from mla_fusion.fx.kinds import MODEL_FLOATS, is_cast, is_view, word
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, peel
from mla_fusion.operators.known import dtype_of, value_of


def between_norm_and(view: View, up: Projection, static: bool) -> tuple[str, str]:
    """The code of what stands between a norm and the projection of it, and more about it;
    ``static``: one scale fixed ahead of time would do.
    """
    if up.quantised is not None and up.quantised.dynamic is not None:  # before it was quantised
        return "q_lora.interrupted", ""
    held, is_float = quantised_behind(up.activation), dtype_of(up.activation) in MODEL_FLOATS
    if is_float and (held is None or not is_scaled(held)):  # brought to scale before the product
        return "q_lora.interrupted", ""
    if up.quantised is None:
        return "quant.dynamic", why_otherwise(view, up)
    if up.quantised.token_scale is None:
        why = why_not(held) if static else ""
        return ("quant.not_static", why) if why else ("quant.static", "")
    known = of_values(up.activation)
    is_format = known is not None and known.format is up.quantised.format
    return ("quant.scale", "") if is_format else ("quant.dynamic", why_otherwise(view, up))


def why_otherwise(view: View, item: Projection) -> str:
    """What the kernel's quantisation has, and that of a projection's rows has not; "" where that
    cannot be said.
    """
    read, held = item.quantised, quantised_behind(item.activation)
    if held is not None and dtype_of(held) != torch.int8:
        return "of quantisation by plain operators int8 alone is read"
    if read is None:
        return "no scale of each column, and of each row, is found behind the product"
    if read.token_scale is None or read.dynamic is not None:
        return ""
    given = read.token_scale, read.token_factor, read.token_inverse
    return DynamicQuantReader(view).why_not(item.activation, *given)


_QUANTISING = frozenset("div mul round clamp".split())


def before_quantisation(node: Node) -> Node:
    """What is scaled and cast to a narrow type, or the node itself; through views and casts."""
    if dtype_of(node) in MODEL_FLOATS:
        return peel(node)

    def quantisation(step: Node) -> Node | None:
        passed = is_view(step) or is_cast(step) or (step is not node and word(step) in _QUANTISING)
        return first_rows(step) if passed else None

    return peel(origin(node, quantisation))


def is_scaled(held: Node) -> bool:
    """Are bytes more than a cast of what they were made of?"""
    rows = first_rows(held)
    is_cast_alone = rows is not None and peel(rows) is before_quantisation(held)
    return held.op == "call_function" and not is_cast_alone


def first_rows(node: Node) -> Node | None:
    return next((arg for arg in node.all_input_nodes if is_rows(arg)), None)


def is_rows(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
