"""Changes of writes into caches and of their readers: each takes a graph and a source of chance."""

from __future__ import annotations

import random

import torch
from torch.fx import Graph

from .nodes import calls, is_float

aten = torch.ops.aten


def drop_write_back(graph: Graph, rng: random.Random) -> str | None:
    """A cache's new value is not stored."""
    copies = [node for node in graph.nodes if node.target is aten.copy_.default]
    if not copies:
        return None
    node = rng.choice(copies)
    graph.erase_node(node)
    return f"{node.name} dropped"


def accumulate(graph: Graph, rng: random.Random) -> str | None:
    """A cache write adds to what is there."""
    writes = [node for node in calls(graph) if node.target is aten.index_put.default]
    if not writes:
        return None
    node = rng.choice(writes)
    node.args = (*node.args[:3], True)
    return f"{node.name}: accumulate=True"


def write_again(graph: Graph, rng: random.Random) -> str | None:
    """A second write of the same rows follows, at other slots."""
    writes = [
        node
        for node in calls(graph)
        if node.target in (aten.index_put.default, aten.index_copy.default)
    ]
    if not writes:
        return None
    node = rng.choice(writes)
    with graph.inserting_after(node):
        again = graph.node_copy(node)
    moved = next(arg for arg in again.all_input_nodes if not is_float(arg))
    with graph.inserting_before(again):
        later = graph.call_function(aten.add.Tensor, (moved, rng.choice((1, 3))))
    node.replace_all_uses_with(again)
    again.replace_input_with(moved, later)
    again.args = (node, *again.args[1:])
    return f"{node.name} written again"


def old_cache_read(graph: Graph, rng: random.Random) -> str | None:
    """Somebody after the write reads the cache as it was before."""
    (output,) = graph.find_nodes(op="output")
    caches = [
        node
        for node in graph.find_nodes(op="placeholder")
        if "cache" in str(node.target) and node.users
    ]
    if not caches:
        return None
    node = rng.choice(caches)
    with graph.inserting_before(output):
        read = graph.call_function(aten.sum.dim_IntList, (node, [0]))
    first = next((user for user in graph.nodes if user.target is aten.copy_.default), output)
    first.prepend(read)
    output.args = ((*output.args[0], read),)
    return f"{node.name} is read before it is written back"
