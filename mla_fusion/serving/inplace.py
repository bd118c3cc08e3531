"""The functional kernel call as the one that writes its caches, for graphs that run as they are.

torchair does this itself when it compiles a graph. A pass manager that hands the FX graph back to be executed leaves
it undone: the functional operator then copies both caches at every step, and AOT autograd copies them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fusion.compat import storage_id
from mla_fusion.meta.prolog import V3, V3_FUNCTIONAL

# argument -> the result that is that cache afterwards
_WRITTEN = dict(zip(V3.places(*V3.written), map(V3_FUNCTIONAL.results.index, V3.written), strict=True))


def write_in_place(graph: Graph) -> int:
    """Rewrite, in place, every call whose caches are inputs of the graph that nothing else reads; how many."""
    functional = torch.ops.npu.npu_mla_prolog_v3_functional.default
    changed = 0
    for call in graph.find_nodes(op="call_function", target=functional):
        caches = {result: call.args[position] for position, result in _WRITTEN.items()}
        if all(_its_own(call, cache) for cache in caches.values()) and _apart(caches.values()):
            _rewrite(graph, call, caches)
            changed += 1
    return changed


def _its_own(call: Node, cache: Any) -> bool:
    """Does nobody but the call, and what copies its result back, use this input?"""
    return (
        isinstance(cache, Node)
        and cache.op == "placeholder"
        and all(user is call or _copies_back(user, cache) for user in cache.users)
    )


def _apart(caches: Iterable[Node]) -> bool:
    storages = [storage_id(cache.meta["val"]) for cache in caches]
    return len(set(storages)) == len(storages)


def _copies_back(node: Node, cache: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default and node.args[0] is cache


def _rewrite(graph: Graph, call: Node, caches: Mapping[Any, Any]) -> None:
    call.target = torch.ops.npu.npu_mla_prolog_v3.default
    call.meta.pop("val", None)
    for item in list(call.users):
        cache = caches.get(item.args[1])
        if cache is None:
            continue
        for user in list(item.users):
            if _copies_back(user, cache):
                user.replace_all_uses_with(cache)
                graph.erase_node(user)
        item.replace_all_uses_with(cache)
        graph.erase_node(item)
