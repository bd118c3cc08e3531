"""Counts from a plan what a fusion takes out of the graph, and what a staged fusion leaves in it.

``record.py`` puts the counts into the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from mla_fusion.fx.kinds import has_effect, is_getitem, is_view, is_writer, op_name, word
from mla_fusion.fx.sizes import has_symbols
from mla_fusion.fx.walk import INPUTS, origin, reached, views_and_writers
from mla_fusion.plan.region import nodes_between
from mla_fusion.report.staging import Leftover

Bound = Callable[[Sequence[Any]], tuple[int, ...]]
_BFLOAT16 = 2  # bytes
_MOST_NODES = 64  # most nodes between the new rows and their caches
# operators that write a slice back into what it was taken from
_PUT_BACK = ("slice_scatter", "select_scatter", "copy_")


def staging_leftovers(
    rows: Mapping[Node, bool], rotated: Sequence[int], width: int, tokens: int, bound: Bound
) -> tuple[Leftover, ...]:
    """Returns what a staged fusion leaves in the graph or adds to it.

    rows     nodes that hold new rows, and whether each joins the rows of both caches
    rotated  for each result that is re-interleaved, how many numbers a token has
    width    how many numbers the rows of a token have
    bound    returns a shape as numbers
    """
    count = len(rotated)
    row_bytes, rotated_bytes = (2 * numbers * _BFLOAT16 for numbers in (width, sum(rotated)))
    parts = (
        Leftover("staging buffers", ("aten.new_empty",) * 2, 2, row_bytes),
        Leftover("re-interleaving", ("aten.transpose",) * count, count, rotated_bytes),
        _cache_writes(rows, tokens, bound),
    )
    return tuple(part for part in parts if part.operators)


def count_replaced(starts: Sequence[Node], ends: Iterable[Node], rows: Iterable[Node]) -> int:
    """Returns how many operators compute ``starts`` from ``ends``, or write ``rows`` to caches.

    Views do not count.
    """
    nodes = nodes_between(starts, ends).union(_nodes_to_caches(rows))
    return sum(not _is_view_only(node) for node in nodes)


def _cache_writes(rows: Mapping[Node, bool], tokens: int, bound: Bound) -> Leftover:
    """Returns the model's own steps from the new rows to the caches."""
    to_caches = _nodes_to_caches(rows)
    new_nodes = {*rows, *to_caches}
    joining = [node for node, is_joined in rows.items() if is_joined]
    steps = [node for node in to_caches if not _is_view_only(node)]
    moved, caches = [*joining], set[Node]()
    for node in steps:
        if _gives_cache(node):
            operands = new_nodes.intersection(node.all_input_nodes)
            moved += (operand for operand in operands if not _gives_cache(operand))
            caches.update(_written_caches(node))
        else:
            moved.append(node)
    token_bytes = sum(2 * _bytes(bound, node) for node in moved) // tokens
    tensors = [cache.meta["val"] for cache in caches]
    is_open = any(has_symbols(tensor.shape) for tensor in tensors)
    bytes_by_cache = (tensor.itemsize * math.prod(tensor.shape) for tensor in tensors)
    whole_bytes = None if is_open else sum(bytes_by_cache)
    names = (op_name(node).replace("::", ".") for node in steps)
    operators = (*("aten.cat" for _ in joining), *names)
    return Leftover("cache writes", operators, len(operators), token_bytes, whole_bytes)


def _gives_cache(node: Node) -> bool:
    """Returns True if a node writes a cache or returns all of one, as a user's operator may."""
    if is_writer(node) or has_effect(node):
        return True
    return not _is_view_only(node) and any(_written_caches(node))


def _nodes_to_caches(rows: Iterable[Node]) -> list[Node]:
    """Returns the nodes from the rows to their cache writes, in order.

    Nodes that write slices of caches back belong to them.
    """
    rows = list(dict.fromkeys(rows))

    def is_end(node: Node) -> bool:
        """Returns True if the node writes the rows."""
        return node not in rows and (is_writer(node) or has_effect(node))

    def readers(node: Node) -> Iterator[Node]:
        """Returns the readers that may lead to a cache write."""
        is_followed = not is_end(node) or _is_put_back(node)
        return (user for user in node.users if is_followed and user.op != "output")

    later_nodes = list(reached(rows, readers, _MOST_NODES))[len(rows) :]
    later = set(later_nodes)
    return sorted(
        reached(
            filter(is_end, later_nodes),
            lambda node: (operand for operand in node.all_input_nodes if operand in later),
        )
    )


def _is_view_only(node: Node) -> bool:
    """Returns True if the node costs no operator."""
    return is_view(node) or is_getitem(node) or word(node) == "view"


def _is_put_back(node: Node) -> bool:
    """Returns True if a reader writes the node back into what it is a slice of."""
    return any(word(user) in _PUT_BACK and not _is_stored(user) for user in node.users)


def _is_stored(node: Node) -> bool:
    """Returns True if the node copies a value into an input at the end of the graph."""
    target = node.args[0]
    return word(node) == "copy_" and isinstance(target, Node) and target.op in INPUTS


def _written_caches(writer: Node) -> Iterator[Node]:
    """Yields the inputs of the graph that a writer changes."""
    for operand in writer.all_input_nodes:
        node = origin(operand, views_and_writers)
        if node.op in INPUTS and any(
            word(user) == "copy_" and user.args[0] is node for user in node.users
        ):
            yield node


def _bytes(bound: Bound, node: Node) -> int:
    """Returns the bytes of what a node holds."""
    value = node.meta["val"]
    return math.prod(bound(value.shape)) * value.element_size() if hasattr(value, "shape") else 0
