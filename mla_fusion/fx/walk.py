"""Walks through a graph.

One goes up, from a tensor through what re-indexes or casts it, to the node that computes it. It
asks a policy at each node where it goes from there. The policies differ in what is equal at both
ends, and are named for what they pass. Nothing else in the package loops over ``node.args[0]``.

The other spreads from some nodes to all that they read, or that reads them, as far as it is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import (
    argument,
    filled_with,
    is_cast,
    is_faithful_cast,
    is_getitem,
    is_model_cast,
    is_mutating,
    is_reshape,
    is_view,
    is_writer,
    operator_of,
    word,
)
from mla_fusion.fx.sizes import is_size, same
from mla_fusion.operators.known import EXPANDS, dtype_of, shape_of, value_of

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


def codes_of(node: Node) -> Node:
    """The bytes of which the node is another reading (e8m0 scales, held as uint8), or itself."""
    reading = origin(node, _detached)  # AOT detaches what view.dtype gives
    source = input_of(reading)
    if word(reading) != "view" or not isinstance(reading.args[1], torch.dtype) or source is None:
        return node
    return source if dtype_of(source).itemsize == dtype_of(node).itemsize == 1 else node


def _detached(node: Node) -> Node | None:
    return input_of(node) if word(node) == "detach" else None


# -- policies


def views(node: Node) -> Node | None:
    """Views alone."""
    return input_of(node) if is_view(node) else None


def reshapes(node: Node) -> Node | None:
    """What keeps every element, their order and their number."""
    return input_of(node) if is_reshape(node) else None


def row_reshapes(node: Node) -> Node | None:
    """Reshapes of the axes before the last."""
    above = reshapes(node)
    return above if above is not None and same(_width(above), _width(node)) else None


def rows_and_exact_casts(node: Node) -> Node | None:
    """Reshapes of the axes before the last, and casts that keep every number."""
    return exact_casts(node) or row_reshapes(node)


def exact_casts(node: Node) -> Node | None:
    """Casts that keep every number."""
    return input_of(node) if is_faithful_cast(node) else None


def reshapes_and_exact_casts(node: Node) -> Node | None:
    """What keeps every number and its place among the others."""
    return input_of(node) if is_reshape(node) or is_faithful_cast(node) else None


def reshapes_and_casts(node: Node) -> Node | None:
    """What keeps the place of every number among the others."""
    return input_of(node) if is_reshape(node) or is_cast(node) else None


def views_and_exact_casts(node: Node) -> Node | None:
    """What re-indexes numbers and keeps each."""
    return input_of(node) if is_view(node) or is_faithful_cast(node) else None


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


def shared_memory(node: Node) -> Node | None:
    """Whatever may give back the memory that it is given: views of any kind, casts, steps in
    place.
    """
    return (
        input_of(node) if operator_of(node).aliases or is_getitem(node) or is_cast(node) else None
    )


def repeats(node: Node) -> Node | None:
    """Reshapes, casts and expands: what holds the same numbers, however often."""
    return input_of(node) if is_reshape(node) or is_cast(node) or word(node) in EXPANDS else None


def expands(node: Node) -> Node | None:
    """Expands alone."""
    return input_of(node) if word(node) in EXPANDS else None


def unit_selections(node: Node) -> Node | None:
    """Reshapes, a selection along an axis of length one among them."""
    above = input_of(node)
    if above is None or not (is_reshape(node) or word(node) in _SELECTS):
        return None
    return (
        above
        if is_reshape(node) or same(shape_of(above)[int(argument(node, "dim", 0))], 1)
        else None
    )


def table_columns(node: Node) -> Node | None:
    """What keeps the rows of a table: reshapes, expands, exact casts, selections of columns, the
    parts of complex rows.

    A selection of rows (``freqs[start:end]``) is not passed, for above it may be the table of every
    position. Nor is a part of a vector, which has no rows: the weights of several norms in one.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if is_getitem(node):
        return input_of(node) if is_view(node) and _on_last_axis(source) else None
    if is_reshape(node):
        return source if _width(node) == _width(source) else None
    if (
        word(node) in EXPANDS
        or is_widening(node)
        or (word(node) in _SLICES and _on_last_axis(node))
    ):
        return source
    if word(node) in _SELECTS and word(source) == "view_as_real" and _on_last_axis(node):
        return input_of(source)
    return None


_SELECTS = ("select", "select_copy")
_SLICES = ("slice", "narrow")


def is_widening(node: Node) -> bool:
    """A cast from bfloat16 to a wider float: exact, so the narrow source holds the same numbers."""
    source = input_of(node) if is_cast(node) else None
    wide = getattr(value_of(node), "dtype", None) in (torch.float32, torch.float64)
    return source is not None and wide and dtype_of(source) == torch.bfloat16


def _on_last_axis(node: Node) -> bool:
    source = node.args[0]
    value: Any = value_of(source) if isinstance(source, Node) else None
    axis = argument(node, "dim", 0)
    return (
        hasattr(value, "dim")
        and isinstance(axis, int)
        and value.dim() > 1
        and axis % value.dim() == value.dim() - 1
    )


def _width(node: Node) -> Any:
    """The length of the last axis."""
    value: Any = value_of(node)
    return value.shape[-1] if hasattr(value, "shape") and len(value.shape) else None
