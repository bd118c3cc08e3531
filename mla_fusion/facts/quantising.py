"""The choices that a quantisation to one byte is made of, and no others.

Values read off probes prove what movement and analytic steps compute. Rounding, saturating and
taking the largest of a row are choices, but known ones: probes on both sides of their bounds show
all that they do. Any other choice, or one with other bounds, may do something that no probe shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.analytic import quantises
from mla_fusion.fx.kinds import argument, is_cast, op_name
from mla_fusion.fx.view import View
from mla_fusion.meta.number_formats import FP8, INT8

# Ends of the range: of int8 symmetric or not, and one above for a clamp before rounding
_ENDS = {INT8.element: ((-128, -127), (127, 128)), FP8.element: ((-448,), (448,))}
_FLOOR = 1e-4  # under the largest of a row, so that a row of zeros is not divided by zero
_QUOTIENTS = frozenset(("aten::div", "aten::reciprocal"))


def only_quantises(view: View, nodes: Iterable[Node], to: torch.dtype = INT8.element) -> bool:
    """Is every step movement, analytic, or a choice of a quantisation to ``to``?"""
    return all(not view.step_ends_proof(node) or _is_known(view, node, to) for node in nodes)


def _is_known(view: View, node: Node, to: torch.dtype) -> bool:
    name = op_name(node)
    if name in _QUOTIENTS:
        return True  # by the scale of a row; a row of zeros gives what the kernel gives, or NaN
    if is_cast(node):
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.dtype in (to, torch.int32, torch.int64)
    if not quantises(node):
        return False
    if name.startswith("aten::cl"):
        return _saturates(argument(node, "min"), argument(node, "max"), *_ENDS[to])
    if name == "aten::maximum":
        literal = [
            view.ranges.of(side)
            for side in node.args[:2]
            if isinstance(side, Node) and view.is_constant(side)
        ]
        return all(low > 0 and high <= _FLOOR for low, high in literal)
    return name != "aten::round" or not argument(node, "decimals", 0)


def _saturates(least: Any, most: Any, lowest: Collection[int], highest: Collection[int]) -> bool:
    """The full range, or a floor under a scale."""
    if most is None:
        return isinstance(least, (int, float)) and (0 < least <= _FLOOR or least in lowest)
    return most in highest and (least is None or least in lowest)
