"""The choices that a quantisation to int8 is made of, and no others.

Values read off probes prove what movement and analytic steps compute. Rounding, saturating and taking the largest of a
row are choices, but known ones: probes on both sides of their bounds show all that they do. Any other choice, or one
with other bounds, may do something that no probe shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.analytic import quantises
from mla_fusion.fx.kinds import argument, is_cast, op_name
from mla_fusion.fx.view import View

_LOWEST, _HIGHEST = (-128, -127), (127, 128)  # of int8: symmetric or not, and one above for a clamp before rounding
_FLOOR = 1e-4  # under the largest of a row, so that a row of zeros is not divided by zero
_QUOTIENTS = frozenset(("aten::div", "aten::reciprocal"))


def only_quantises(view: View, nodes: Iterable[Node]) -> bool:
    """Is every step movement, analytic, or a choice of a quantisation to int8?"""
    return all(not view.step_ends_proof(node) or _is_known(view, node) for node in nodes)


def _is_known(view: View, node: Node) -> bool:
    name = op_name(node)
    if name in _QUOTIENTS:
        return True  # by the scale of a row; a row of zeros gives what the kernel gives, or NaN
    if is_cast(node):
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.dtype in (torch.int8, torch.int32, torch.int64)
    if not quantises(node):
        return False
    if name.startswith("aten::cl"):
        return _saturates(argument(node, "min"), argument(node, "max"))
    if name == "aten::maximum":
        literal = [view.ranges.of(side) for side in node.args[:2] if isinstance(side, Node) and view.is_constant(side)]
        return all(low > 0 and high <= _FLOOR for low, high in literal)
    return name != "aten::round" or not argument(node, "decimals", 0)


def _saturates(least: Any, most: Any) -> bool:
    """The full range of int8, or a floor under a scale."""
    if most is None:
        return isinstance(least, (int, float)) and (0 < least <= _FLOOR or least in _LOWEST)
    return most in _HIGHEST and (least is None or least in _LOWEST)
