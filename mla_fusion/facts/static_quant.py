"""Quantisation to int8 by one scale fixed ahead of time: ``int8(sat(round(x / scale + offset)))``, by npu_quantize."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import argument, op_name
from mla_fusion.fx.measured import measured
from mla_fusion.fx.sizes import same
from mla_fusion.fx.walk import origin, repeats, upward, views_and_exact_casts


@dataclass(frozen=True, kw_only=True)
class StaticQuant:
    """``node`` quantises ``source``.

    scale    one bfloat16 value
    offset   one int8 value; None: 0
    """

    node: Node
    source: Node
    scale: Node
    offset: Node | None


@measured
def by_operator(operator: Node | None) -> StaticQuant | None:
    """What ``operator`` does, where it is npu_quantize with one scale, and one offset, for all that it is given."""
    if operator is None or op_name(operator) != "npu::npu_quantize" or operator.meta["val"].dtype != torch.int8:
        return None
    source, scales, zero = operator.args[0], argument(operator, "scales"), argument(operator, "zero_points")
    if not isinstance(source, Node) or not isinstance(scales, Node):
        return None
    divides = bool(argument(operator, "div_mode", True))
    scale = _scale(scales) if divides else _inverse(scales)
    offset = _one(zero) if isinstance(zero, Node) else None
    if scale is None or (zero is not None and (offset is None or _narrow(offset) is None)):
        return None
    return StaticQuant(node=operator, source=source, scale=scale, offset=_narrow(offset) if offset else None)


def _one(node: Node) -> Node | None:
    """The one value that a vector repeats; None where that is not seen."""
    for above in (node, *upward(origin(node, views_and_exact_casts), repeats)):
        shape = above.meta["val"].shape
        if all(isinstance(size, int) for size in shape) and same(prod(shape), 1):
            return above
    return None


def _scale(node: Node) -> Node | None:
    """As a bfloat16 value: another dtype's would be rounded."""
    one = _one(node)
    return next((above for above in _exact(one) if above.meta["val"].dtype == torch.bfloat16), None) if one else None


def _inverse(node: Node) -> Node | None:
    """The scale of which the vector repeats the reciprocal."""
    one = _one(node)
    base = origin(one, views_and_exact_casts) if one is not None else None
    if base is None or op_name(base) != "aten::reciprocal" or not isinstance(base.args[0], Node):
        return None
    return _scale(base.args[0])


def _narrow(offset: Node) -> Node | None:
    """The int8 value behind an offset in a wider dtype."""
    return next((above for above in _exact(offset) if above.meta["val"].dtype == torch.int8), None)


def _exact(node: Node) -> list[Node]:
    found = [node]
    for above in upward(node, _widened):
        found.append(above)
    return found


def _widened(node: Node) -> Node | None:
    """Up through views and through casts to a wider dtype, integers' among them."""
    above = views_and_exact_casts(node)
    if above is not None:
        return above
    source = node.args[0] if node.args else None
    is_cast = op_name(node) in ("aten::_to_copy", "prims::convert_element_type")
    return source if is_cast and isinstance(source, Node) and source.meta["val"].dtype == torch.int8 else None
