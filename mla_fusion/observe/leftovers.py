"""Counts from a plan what a fusion takes out of the graph, and what a staged fusion leaves in it.

``record.py`` puts the counts into the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch.fx import Node

from mla_fusion.fx.kinds import is_getitem, is_view, op_name, word, writes
from mla_fusion.fx.sizes import bytes_of, has_symbols
from mla_fusion.fx.walk import INPUTS, is_copy_into, origin, reached, views_and_writers
from mla_fusion.graph.form import nearest, strip_reshapes
from mla_fusion.plan.caches import Staged
from mla_fusion.plan.plan import Plan
from mla_fusion.report.staging import Leftover

_BFLOAT16 = 2  # bytes
_MOST_NODES = 64  # most nodes between the new rows and their caches
# operators that write a slice back into what it was taken from
_PUT_BACK = ("slice_scatter", "select_scatter", "copy_")


def leftovers_of(plan: Plan) -> tuple[Leftover, ...]:
    """Returns what a staged plan leaves in the graph or adds to it; nothing for a plan in place."""
    if not isinstance(plan.caches, Staged):
        return ()
    dims, rotation = plan.dims, plan.proposal.rotation
    # query_rope and k_pe
    count = 2 if rotation is not None and rotation[1] == "interleaved" else 0
    widths = dims["Hckv"] + dims["Dr"], (dims["N"] + 1) * dims["Dr"]  # numbers of a token
    row_bytes, rotated_bytes = (2 * width * _BFLOAT16 for width in widths)
    parts = (
        Leftover("staging buffers", ("aten.new_empty",) * 2, 2, row_bytes),
        Leftover("re-interleaving", ("aten.transpose",) * count, count, rotated_bytes),
        _cache_writes(plan),
    )
    return tuple(part for part in parts if part.operators)


def count_replaced(plan: Plan) -> int:
    """Returns how many operators compute what a plan replaces, or write new rows to caches.

    Views do not count.
    """
    nodes = plan.steps.union(_nodes_to_caches(_new_rows(plan)))
    return sum(not _is_view_only(node) for node in nodes)


def _new_rows(plan: Plan) -> dict[Node, bool]:
    """Returns the nodes that hold the new rows of a staged plan, and whether each joins both
    rows.
    """
    rows = {plan.proposal.results.kv_rows, plan.proposal.results.kr_rows}
    names = rows.union(plan.results.values())
    return {
        node: strip_reshapes(value).op == "join"
        for node, value in plan.replaced.items()
        if not rows.isdisjoint(nearest([value], names))
    }


def _cache_writes(plan: Plan) -> Leftover:
    """Returns the model's own steps from the new rows to the caches."""
    rows, tokens = _new_rows(plan), max(plan.proposal.x.shape[0], 1)
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
    token_bytes = sum(2 * _bytes(plan, node) for node in moved) // tokens
    tensors = [cache.meta["val"] for cache in caches]
    is_open = any(has_symbols(tensor.shape) for tensor in tensors)
    whole_bytes = None if is_open else sum(map(bytes_of, tensors))
    names = (op_name(node).replace("::", ".") for node in steps)
    operators = (*("aten.cat" for _ in joining), *names)
    return Leftover("cache writes", operators, len(operators), token_bytes, whole_bytes)


def _gives_cache(node: Node) -> bool:
    """Returns True if a node writes a cache or returns all of one, as a user's operator may."""
    if writes(node):
        return True
    return not _is_view_only(node) and any(_written_caches(node))


def _nodes_to_caches(rows: Iterable[Node]) -> list[Node]:
    """Returns the nodes from the rows to their cache writes, in order.

    Nodes that write slices of caches back belong to them.
    """
    rows = list(dict.fromkeys(rows))

    def is_end(node: Node) -> bool:
        """Returns True if the node writes the rows."""
        return node not in rows and writes(node)

    def readers(node: Node) -> Iterator[Node]:
        """Returns the readers that may lead to a cache write."""
        # a reader may write the node back into what it is a slice of
        is_followed = not is_end(node) or any(
            word(user) in _PUT_BACK and not _is_stored(user) for user in node.users
        )
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


def _is_stored(node: Node) -> bool:
    """Returns True if the node copies a value into an input at the end of the graph."""
    target = node.args[0]
    return word(node) == "copy_" and isinstance(target, Node) and target.op in INPUTS


def _written_caches(writer: Node) -> Iterator[Node]:
    """Yields the inputs of the graph that a writer changes."""
    for operand in writer.all_input_nodes:
        node = origin(operand, views_and_writers)
        if node.op in INPUTS and any(is_copy_into(user, node) for user in node.users):
            yield node


def _bytes(plan: Plan, node: Node) -> int:
    """Returns the bytes of what a node holds."""
    value = node.meta["val"]
    if not hasattr(value, "shape"):
        return 0
    return math.prod(plan.graph.shape(value.shape)) * value.element_size()
