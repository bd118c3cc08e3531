"""What a fusion takes out of the graph, and what a staged one leaves there for a step to pay:
counted from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from mla_fusion.fx.kinds import (
    has_effect,
    is_getitem,
    is_reshape,
    is_view,
    is_writer,
    op_name,
    word,
)
from mla_fusion.fx.sizes import has_symbols
from mla_fusion.fx.walk import INPUTS, reached
from mla_fusion.plan.region import nodes_between
from mla_fusion.report.staging import Leftover

Bound = Callable[[Sequence[Any]], tuple[int, ...]]
_BFLOAT16 = 2  # bytes
_FARTHEST = 64  # nodes between the new rows and their caches
# a slice into what it was taken from
_PUT_BACK = ("slice_scatter", "select_scatter", "copy_")


def staged(
    rows: Mapping[Node, bool],
    turned: Sequence[int],
    widths: Sequence[int],
    tokens: int,
    bound: Bound,
) -> tuple[Leftover, ...]:
    """What staging leaves.

    rows    the nodes that hold new rows, and whether each joins the rows of both caches
    turned  of each result that is re-interleaved, how many numbers a token has
    widths  of the rows
    bound   a shape as numbers
    """
    found = buffers(sum(widths)), re_interleaving(turned), writes(rows, tokens, bound)
    return tuple(one for one in found if one.operators)


def replaced_by(starts: Sequence[Node], ends: Iterable[Node], rows: Iterable[Node]) -> int:
    """How many operators compute ``starts`` from ``ends``, and write ``rows`` to caches."""
    return count(nodes_between(starts, ends).union(_to_caches(rows)))


def count(nodes: Iterable[Node]) -> int:
    """Of operators: views are none."""
    return sum(not _is_free(node) for node in nodes)


def buffers(width: int) -> Leftover:
    """Of rows that are so wide together."""
    return Leftover("staging buffers", ("aten.new_empty",) * 2, 2, 2 * width * _BFLOAT16)


def re_interleaving(widths: Sequence[int]) -> Leftover:
    """Of results with so many numbers a token."""
    count = len(widths)
    return Leftover(
        "re-interleaving", ("aten.transpose",) * count, count, 2 * sum(widths) * _BFLOAT16
    )


def writes(rows: Mapping[Node, bool], tokens: int, bound: Bound) -> Leftover:
    """The model's own steps from the new rows to the caches."""
    joined = [node for node, is_joined in rows.items() if is_joined]
    to_caches = _to_caches(rows)
    steps = [node for node in to_caches if not _is_free(node)]
    made = {*rows, *to_caches}
    moved, whole = sum(2 * _bytes(bound, node) for node in joined), dict[Node, int | None]()
    for node in steps:
        if is_writer(node) or has_effect(node):
            inside = [read for read in node.all_input_nodes if read in made and not is_writer(read)]
            moved += sum(2 * _bytes(bound, read) for read in inside)
            whole |= {cache: _whole(cache) for cache in _caches(node)}
        else:
            moved += 2 * _bytes(bound, node)
    sizes = list(whole.values())
    known = None if None in sizes else sum(size for size in sizes if size is not None)
    own = (op_name(node).replace("::", ".") for node in steps)
    operators = ("aten.cat",) * len(joined) + tuple(own)
    return Leftover("cache writes", operators, len(operators), moved // tokens, known)


def _to_caches(rows: Iterable[Node]) -> list[Node]:
    """The nodes on the way from the rows to what writes them, and to what puts slices of caches
    back; in order.
    """
    rows = list(dict.fromkeys(rows))

    def ends(node: Node) -> bool:
        return node not in rows and (is_writer(node) or has_effect(node))

    def behind(node: Node) -> Iterator[Node]:
        goes_on = not ends(node) or _is_put_back(node)
        return (user for user in node.users if goes_on and user.op != "output")

    below = list(reached(rows, behind, _FARTHEST))[len(rows) :]
    inside = set(below)
    return sorted(
        reached(
            filter(ends, below),
            lambda node: (read for read in node.all_input_nodes if read in inside),
        )
    )


def _is_free(node: Node) -> bool:
    return is_view(node) or is_reshape(node) or is_getitem(node) or word(node) == "view"


def _is_put_back(node: Node) -> bool:
    return any(word(user) in _PUT_BACK and not _is_stored(user) for user in node.users)


def _is_stored(node: Node) -> bool:
    """Does it end the graph with what an input holds then?"""
    into = node.args[0]
    return word(node) == "copy_" and isinstance(into, Node) and into.op in INPUTS


def _caches(writer: Node) -> Iterator[Node]:
    """The inputs of the graph that a writer changes."""
    for read in writer.all_input_nodes:
        node = read
        while (is_view(node) or is_writer(node)) and isinstance(node.args[0], Node):
            node = node.args[0]
        if node.op in INPUTS and any(
            word(user) == "copy_" and user.args[0] is node for user in node.users
        ):
            yield node


def _whole(cache: Node) -> int | None:
    value = cache.meta["val"]
    return None if has_symbols(value.shape) else value.numel() * value.element_size()


def _bytes(bound: Bound, node: Node) -> int:
    value = node.meta["val"]
    return math.prod(bound(value.shape)) * value.element_size() if hasattr(value, "shape") else 0
