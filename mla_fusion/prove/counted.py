"""Numbers that tokens are counted by: positions, slots, lengths, and what is linear in them.

Over the real numbers a cast from float32 to bfloat16 changes nothing, and for activations that is
how fusions are meant. Counts grow with the tokens: bfloat16 has no 257, int32 ends, and what is
divided by a count has a token at which it is no number. So such steps on counts are uninterpreted
functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import Kind, argument, is_cast, op_name, operator_of
from mla_fusion.prove import field, operators
from mla_fusion.prove.field import Num

NARROW = (torch.bfloat16, torch.float16)
_ARITHMETIC = frozenset(
    f"aten::{name}"
    for name in """
    add sub rsub mul neg multiply subtract negative addcmul outer mm bmm matmul einsum dot cumsum
    sum square pow div divide true_divide sqrt rsqrt reciprocal bitwise_left_shift __lshift__
    """.split()
)
_SUMS = frozenset(f"aten::{name}" for name in "add sub rsub subtract addcmul lerp".split())
_POWERS = (2, 3)
# literals that a count may be multiplied by: 2 ** 19 tokens of so many bytes fit in each dtype
_LARGEST = {torch.int32: 1 << 12, torch.int64: 1 << 40}


class Counted:
    """Which nodes of a region hold counts; asked in the order in which nodes are run."""

    def __init__(self, leaves: Mapping[Node, str], constant: frozenset[str]) -> None:
        self._leaves, self._constant = leaves, constant
        self._kinds: dict[Node, str] = {}

    def __contains__(self, node: object) -> bool:
        return isinstance(node, Node) and self._kind(node) == "counts"

    def _kind(self, node: Node) -> str:
        """ "counts"; "constant", the same for all tokens; or "", anything else."""
        found = self._kinds.get(node)
        if found is None:
            found = self._kinds[node] = self._found(node)
        return found

    def _found(self, node: Node) -> str:
        held = node.meta.get("val")
        if not isinstance(held, torch.Tensor) or held.dtype == torch.bool:
            return ""
        role, is_whole = self._leaves.get(node), not (held.is_floating_point() or held.is_complex())
        if role is not None or node.op != "call_function":
            if node.op == "get_attr" or role in self._constant:
                return "constant"
            return "counts" if is_whole and held.dtype.itemsize > 1 else ""
        if op_name(node) in ("aten::arange", "aten::linspace"):
            return "counts"
        kinds = {self._kind(read) for read in node.all_input_nodes if _is_tensor(read)}
        if kinds <= {"constant"}:
            return "constant"
        keeps = operator_of(node).kind == Kind.MOVEMENT or is_cast(node)
        if "" in kinds or not (keeps or is_whole or op_name(node) in _ARITHMETIC):
            return ""
        return (
            "" if isinstance(node.args[0], (int, float)) else "counts"
        )  # a base, whose exponents are counted

    def leaves_the_field(self, node: Node) -> bool:
        """Is it a function of counts that is another one for some tokens: not a number, or
        another by what a dtype holds?
        """
        name, held = op_name(node), node.meta["val"]
        if not isinstance(held, torch.Tensor):
            return False
        if name in ("aten::sqrt", "aten::rsqrt", "aten::reciprocal"):
            return node.args[0] in self
        if name in ("aten::div", "aten::divide", "aten::true_divide"):
            return argument(node, "other") in self
        if name in ("aten::pow", "aten::square") and node.args[0] in self:
            power = 2 if name == "aten::square" else argument(node, "exponent")
            return held.dtype in _LARGEST or power not in _POWERS
        largest = _LARGEST.get(held.dtype)
        if largest is None or not any(read in self for read in node.all_input_nodes):
            return False
        by = [abs(item) for item in node.args if isinstance(item, (int, float))]
        if "shift" in name:
            return not by or 2 ** by[0] >= largest
        return name in ("aten::mul", "aten::multiply") and max(by, default=0) >= largest

    def as_held(self, node: Node, call: operators.Call, found: Any) -> Any:
        """The value of a step, as its dtype holds it."""
        if not isinstance(found, Num):
            return found
        if node in self and node.meta["val"].dtype in NARROW and not _only_moves(node, call):
            return field.function(f"as {node.meta['val'].dtype} holds it", found)
        return found


def past_rounding(call: operators.Call, found: Any) -> Any:
    """What is left of numbers that are rounded: a difference of two that are equal over the real
    numbers is what rounding has left of them, and not 0.
    """
    given = [item for item in call.given.values() if isinstance(item, Num)]
    if call.name not in _SUMS or not isinstance(found, Num) or not field.has_zeros(found):
        return found
    return found if any(map(field.has_zeros, given)) else operators.opaque(call)


def _only_moves(node: Node, call: operators.Call) -> bool:
    return (
        operator_of(node).kind == Kind.MOVEMENT
        and op_name(node)
        not in (
            "aten::arange",
            "aten::linspace",
        )
        and (not is_cast(node) or call.source in NARROW)
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
