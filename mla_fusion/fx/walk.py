"""Walks through a graph.

A walk upwards starts at a tensor and passes nodes that only move, cast or write its elements. A
policy says which nodes it passes, and is named for them. ``reached`` and ``nodes_between`` visit
all that some nodes read, or that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import (
    filled_with,
    is_cast,
    is_getitem,
    is_model_cast,
    is_mutating,
    is_view,
    is_writer,
)

INPUTS = ("placeholder", "get_attr")  # the nodes that hold what comes from outside

Item = TypeVar("Item")
Policy = Callable[[Node], "Node | None"]  # the node above, or None where the walk ends


def upward(node: Node, policy: Policy) -> Iterator[Node]:
    """Yields the node, and those above it as far as the policy goes."""
    above: Node | None = node
    while above is not None:
        yield above
        above = policy(above)


def origin(node: Node, policy: Policy) -> Node:
    """Returns the last node of the walk upwards."""
    *_, last = upward(node, policy)
    return last


def reached(
    starts: Iterable[Item], successors: Callable[[Item], Iterable[Item]], most: float = math.inf
) -> Iterator[Item]:
    """Yields the starts and all that follow them, each once and the nearest first.

    successors  returns what follows an item
    most        once there are so many items, their successors are not visited
    """
    items = list(dict.fromkeys(starts))
    seen = set(items)
    for item in items:  # grows as it is walked
        yield item
        for successor in successors(item) if len(items) < most else ():
            if successor not in seen:
                seen.add(successor)
                items.append(successor)


def nodes_between(sources: Iterable[Node], sinks: Iterable[Node]) -> set[Node]:
    """Returns the nodes from which ``sinks`` are computed, up to ``sources`` and without them.

    What a filled tensor reads is not among them: its numbers do not depend on it.
    """
    ends = set(sources)

    def operands(node: Node) -> Iterable[Node]:
        """Returns the operands of a node, or none if the walk ends there."""
        return () if node in ends or filled_with(node) is not None else node.all_input_nodes

    return {*reached(sinks, operands)} - ends


def is_copy_into(node: Node, target: Node) -> bool:
    """Returns True if the node copies a value into the target."""
    return node.target is torch.ops.aten.copy_.default and node.args[0] is target


def is_in_last_copies(node: Node) -> bool:
    """Returns True if only copies and the output come after the node."""
    while node.target is torch.ops.aten.copy_.default:
        node = node.next
    return node.op == "output"


def input_of(node: Node) -> Node | None:
    """Returns the first operand; for one result of a split, the tensor that was split."""
    source = node.args[0] if node.args else None
    if is_getitem(node) and isinstance(source, Node) and is_view(node):
        source = source.args[0]
    return source if isinstance(source, Node) else None


# -- policies


def _through(*predicates: Callable[[Node], bool]) -> Policy:
    """Returns the policy that passes nodes for which one of these is True."""
    return lambda node: input_of(node) if any(is_passed(node) for is_passed in predicates) else None


views_and_model_casts = _through(is_view, is_model_cast)
views_and_casts = _through(is_view, is_cast)
views_and_writers = _through(is_view, is_writer)
# to the memory that was written
views_and_writes = _through(is_view, is_mutating)
