"""Walks through a graph.

One goes up, from a tensor through what re-indexes or casts it, to the node that computes it. It
asks a policy at each node where it goes from there. The policies differ in what is equal at both
ends, and are named for what they pass. Nothing else in the package loops over ``node.args[0]``.

The other spreads from some nodes to all that they read, or that reads them, as far as it is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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
from mla_fusion.fx.sizes import is_size

INPUTS = ("placeholder", "get_attr")  # the nodes that hold what comes from outside

Item = TypeVar("Item")
Policy = Callable[[Node], "Node | None"]  # the node above, or None where the walk ends


def upward(node: Node, policy: Policy) -> Iterator[Node]:
    """The node, and those above it as far as the policy goes."""
    above: Node | None = node
    while above is not None:
        yield above
        above = policy(above)


def reached(
    starts: Iterable[Item], on: Callable[[Item], Iterable[Item]], most: float = math.inf
) -> Iterator[Item]:
    """The starts, and behind each what ``on`` says comes next: each node once, the nearest first;
    none is added behind so many.
    """
    nodes = list(dict.fromkeys(starts))
    seen = set(nodes)
    for node in nodes:  # grows as it is walked
        yield node
        for found in on(node) if len(nodes) < most else ():
            if found not in seen:
                seen.add(found)
                nodes.append(found)


def nodes_between(sources: Iterable[Node], sink: Node) -> list[Node]:
    """The nodes from which ``sink`` is computed, walking back until ``sources``, in graph order."""
    stop, seen, order = set(sources), set(), []
    stack: list[tuple[Node, bool]] = [(sink, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen and node not in stop:
            seen.add(node)
            stack.append((node, True))
            if filled_with(node) is None:
                stack.extend((arg, False) for arg in node.all_input_nodes)
    return order


def users(node: Node) -> Iterable[Node]:
    """For :func:`reached`: whatever reads the node, but for its sizes and what leaves the graph."""
    return (user for user in node.users if user.op != "output" and not is_size(user))


def origin(node: Node, policy: Policy) -> Node:
    """The last node of the walk."""
    above = policy(node)
    while above is not None:
        node, above = above, policy(above)
    return node


def input_of(node: Node) -> Node | None:
    """The first operand; of one result of a split, the tensor that was split."""
    source = node.args[0] if node.args else None
    if is_getitem(node) and isinstance(source, Node) and is_view(node):
        source = source.args[0]
    return source if isinstance(source, Node) else None


def peel(node: Node) -> Node:
    """Through views and casts among a model's floats, to the node that computes the value."""
    return origin(node, views_and_model_casts)


# -- policies


def views(node: Node) -> Node | None:
    """Views alone."""
    return input_of(node) if is_view(node) else None


def views_and_model_casts(node: Node) -> Node | None:
    """What re-indexes numbers, or rounds them to another of a model's floats: the value as a fact
    speaks of it.
    """
    return input_of(node) if is_view(node) or is_model_cast(node) else None


def views_and_casts(node: Node) -> Node | None:
    """What re-indexes numbers, or casts them to any dtype."""
    return input_of(node) if is_view(node) or is_cast(node) else None


def views_and_writes(node: Node) -> Node | None:
    """Views, and steps that change memory in place: what holds the memory that was written."""
    return input_of(node) if is_view(node) or is_mutating(node) else None


def written(node: Node) -> Node | None:
    """What a value was made from by moving, casting and writing elements of it."""
    return input_of(node) if is_view(node) or is_cast(node) or is_writer(node) else None
