"""Makes functional kernel calls write their caches, in graphs that run as they are.

torchair does this when it compiles a graph, for caches that are inputs of it. Two cases are left:

* A pass manager returns the FX graph to be executed. The functional operator then copies both
  caches at every step, and AOT autograd copies them back.
* npugraph_ex, if a cache is made in the graph: the buffers of a staged call, or the empty kr_cache
  beside packed rows. It leaves calls with the latter functional. Calls with buffers it makes in
  place, and then passes the first buffer to whatever read one of the results (torch_npu 2.13). So
  it must not see such calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from mla_fusion.compat import storage_id
from mla_fusion.compile import inductor_bridge
from mla_fusion.fx.kinds import is_view, shape_of, word
from mla_fusion.fx.walk import is_copy_into, reached
from mla_fusion.meta.prolog import V3

aten = torch.ops.aten


def write_in_place(graph: Graph) -> int:
    """Makes every call in place whose caches nothing else uses. Returns how many.

    Such caches are inputs of the graph that nothing else reads, and buffers of the call.
    """
    _keep_returned_copies(graph)
    return sum(_write_in_place(*call) for call in _functional_calls(graph))


def make_ready_to_run(gm: GraphModule) -> None:
    """Prepares a graph with kernel calls for npugraph_ex.

    Copies that the graph returns stay copies, and calls on caches that are made in the graph become
    calls in place. torchair makes the other calls in place.
    """
    _keep_returned_copies(gm.graph)
    for node, caches in _functional_calls(gm.graph):
        if any(map(_is_buffer, caches.values())):
            _write_in_place(node, caches)
    gm.recompile()


def _keep_returned_copies(graph: Graph) -> None:
    """Keeps torchair from removing copies of written caches that the graph returns.

    torchair removes operators that change nothing (a clone, a cat of one tensor). That is right as
    long as the kernel returns a cache of its own. But then torchair lets the kernel write in place,
    and what was a copy would be the cache.
    """
    caches_written = {
        result
        for node, caches in _functional_calls(graph)
        for result in node.users
        if result.args[1] in caches
    }
    copies_back = graph.find_nodes(op="call_function", target=aten.copy_.default)
    results = {
        node
        for copy in copies_back
        for node in _upward_through(copy.args[1], ())
        if node in caches_written
    }
    if not results:
        return
    noops, end, kept = inductor_bridge.noops(), graph.output_node(), dict[Node, Node]()

    def keep(node: Node) -> Node:
        """Returns what the graph returns for a node: a copy that torchair keeps, or the node."""
        if node not in kept and not results.isdisjoint(_upward_through(node, noops)):
            with graph.inserting_before(end):
                kept[node] = graph.call_function(aten.alias_copy.default, (node,))
                kept[node].meta = dict(node.meta)
        return kept.get(node, node)

    end.args = map_arg(end.args, keep)


def _upward_through(node: Node, noops: Collection[Any]) -> Iterator[Node]:
    """Yields the node, and the nodes above it through views and ``noops``."""
    return reached(
        [node],
        lambda node: node.all_input_nodes if is_view(node) or node.target in noops else (),
    )


def _functional_calls(graph: Graph) -> list[tuple[Node, dict[int, Any]]]:
    """Returns the functional calls of a graph, each with its caches by the index of the result that
    is the cache's new content.
    """
    places = [*enumerate(V3.places(*V3.written), len(V3.results))]
    return [
        (node, {result: node.args[place] for result, place in places})
        for node in graph.find_nodes(
            op="call_function", target=torch.ops.npu.npu_mla_prolog_v3_functional.default
        )
    ]


def _write_in_place(node: Node, caches: dict[int, Any]) -> bool:
    """Makes a call in place if nothing else uses its caches, and they lie in different memory.

    Returns True if it has. A cache without elements has no memory.
    """
    if not all(_is_own(node, cache) for cache in caches.values()):
        return False
    storages = [
        storage_id(cache.meta["val"]) for cache in caches.values() if 0 not in shape_of(cache)
    ]
    if len(set(storages)) < len(storages):
        return False
    node.target = torch.ops.npu.npu_mla_prolog_v3.default
    node.meta.pop("val", None)
    for result in list(node.users):
        cache = caches.get(result.args[1])  # type: ignore[arg-type]  # of a getitem
        if cache is None:
            continue
        for user in list(result.users):
            if is_copy_into(user, cache):
                user.replace_all_uses_with(cache)
                node.graph.erase_node(user)
        result.replace_all_uses_with(cache)
        node.graph.erase_node(result)
    return True


def _is_buffer(cache: Any) -> bool:
    """Returns True if the cache is memory that the graph allocates for a call."""
    return isinstance(cache, Node) and word(cache) == "new_empty"


def _is_own(call: Node, cache: Any) -> bool:
    """Returns True if only the call, and the copy of its result into the cache, use the cache."""
    if _is_buffer(cache):
        return set(cache.users) == {call} or 0 in shape_of(cache)
    return (
        isinstance(cache, Node)
        and cache.op == "placeholder"
        and all(
            user is call or (is_copy_into(user, cache) and user.args[1] in call.users)
            for user in cache.users
        )
    )


def runs_fx_graph(compiler_config: Any) -> bool:
    """Returns True if torchair runs the FX graph under this ``CompilerConfig``, and makes no GE
    graph.

    So do npugraph_ex, and torchair in mode "reduce-overhead". None is no torchair's.
    """
    mode = getattr(getattr(compiler_config, "mode", None), "value", None)
    return mode in ("reduce-overhead", "npugraph_ex") or type(
        compiler_config
    ).__module__.startswith("npugraph_ex")
