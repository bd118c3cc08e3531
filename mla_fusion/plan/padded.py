"""Heads that a graph pads with zeros for the attention operator, which takes powers of two.

Where the pass pads the heads of a prologue to that number, the results have these zeros already:
columns of zeros in W_uq_qr and W_uk give zeros. Neither the cut nor the pad is needed then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Node

from mla_fusion.fx.kinds import argument, is_reshape, word
from mla_fusion.fx.sizes import same_shape
from mla_fusion.operators.known import shape_of
from mla_fusion.plan.outputs import Replacement

OF_HEADS = ("query", "query_rope")


def zero_heads(node: Node) -> int:
    """How many zeros the node puts behind the heads, its last axis but one; 0 where it is no such
    pad.
    """
    if word(node) != "constant_pad_nd" or argument(node, "value"):
        return 0
    before_and_behind = argument(node, "pad")
    is_plain = isinstance(before_and_behind, list | tuple) and all(
        type(size) is int for size in before_and_behind
    )
    if not is_plain or len(before_and_behind) < 4 or before_and_behind[3] < 1:
        return 0
    others = [*before_and_behind[:3], *before_and_behind[4:]]
    return int(before_and_behind[3]) if not any(others) else 0


def keeps_heads(node: Node, source: Node) -> bool:
    """Whether a node gives the rows and heads of ``source``, its argument, in this order."""
    if not is_reshape(node):
        return False
    shape, before = shape_of(node), shape_of(source)
    return len(shape) > 2 and len(before) > 2 and same_shape(shape[-2:], before[-2:])


def wanted_heads(replacements: Iterable[Replacement], heads: int) -> int:
    """The number to which all readers of query and query_rope pad the heads; ``heads`` where they
    do not.
    """
    found = {
        number for item in replacements if item.output in OF_HEADS for number in _read(item.node)
    }
    outputs = {item.output for item in replacements}
    if len(found) != 1 or not outputs.issuperset(OF_HEADS):
        return heads
    return heads + found.pop()


def _read(node: Node) -> Iterator[int]:
    for user in node.users:
        if user.op == "call_function" and keeps_heads(user, node):
            yield from _read(user)
        else:
            yield zero_heads(user) if user.op == "call_function" else 0
