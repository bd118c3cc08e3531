"""Can slots be negative? The writers of a model wrap a negative slot to the end of the cache; the
kernel skips it.

That they are not is shown by ranges (a remainder by 16 is 0 to 15), or assumed of one input of the
graph, which the report lists. Nothing is assumed of slots made of several inputs: one of them may
be a buffer of -1 that pads a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.distinct import repeats
from mla_fusion.fx.kinds import is_cast, is_getitem, is_view, word
from mla_fusion.fx.ranges import Ranges
from mla_fusion.fx.sizes import is_size
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import INPUTS
from mla_fusion.operators.known import GATHER, rule_named, value_of

# Positions, blocks and slots that come in: what is computed of them, 128 rows to a block, fits an
# int32. How many rows the cache has says nothing of them.
_TRUSTED = (0.0, 2.0**24 - 1)
_LARGEST_SIZE = 2.0**31 - 1  # of the sizes that they are computed with: no cache has as many rows


@dataclass(frozen=True)
class Trust:
    """``inputs`` of the graph are assumed to hold non-negative slots alone."""

    inputs: tuple[Node, ...]


class Unproven(str):
    """Why slots may be negative, or the same for two tokens."""


def judge(view: View, slots: Iterable[Node]) -> Trust | Unproven:
    """What non-negative and distinct ``slots`` rest on, or why they may be neither."""
    trusting = Ranges(view, _TRUSTED, _LARGEST_SIZE)
    ranges = Ranges(view, largest_size=_LARGEST_SIZE)
    trusted: list[Node] = []
    for node in slots:
        if ranges.of(node)[0] >= 0:
            continue
        low, _ = trusting.of(node)
        if low < 0:
            return Unproven(f"{node.name} may be negative")
        inputs = _inputs(ranges, node)
        if inputs is None:
            return Unproven(f"{node.name} is computed by operators whose range is not known")
        if len(inputs) > 1:
            names = ", ".join(sorted(found.name for found in inputs))
            why = (
                f"computed from {len(inputs)} inputs ({names}); only slots from one input are "
                "trusted"
            )
            return Unproven(f"{node.name} is {why}")
        trusted += inputs
    nodes = list(slots)
    alike = repeats(view, nodes, trusting)
    return Unproven(alike) if alike else Trust(tuple(dict.fromkeys(trusted)))


def _inputs(ranges: Ranges, node: Node) -> set[Node] | None:
    """The integer inputs whose sign decides the node's; None where something else does."""
    found: set[Node] = set()
    stack, seen = [node], {node}
    while stack:
        current = stack.pop()
        if ranges.of(current)[0] >= 0 or not _is_integers(current):
            continue
        if current.op in INPUTS:
            found.add(current)
            continue
        if is_view(current) or is_cast(current) or word(current) in GATHER or is_getitem(current):
            operands = current.all_input_nodes[:1]
        elif rule_named(current, "range"):
            operands = [arg for arg in current.all_input_nodes if not is_size(arg)]
        else:
            return None
        stack += [arg for arg in operands if arg not in seen]
        seen.update(operands)
    return found


def _is_integers(node: Node) -> bool:
    """The results of a split count; masks do not, since they have no sign."""
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        return True
    return isinstance(value, torch.Tensor) and value.dtype != torch.bool
