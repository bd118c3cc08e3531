"""Functional kernel calls as those that write their caches, for graphs that run as they are.

torchair does this itself when it compiles a graph, for caches that are inputs of it. Two others are
left:

* A pass manager that hands the FX graph back to be executed. The functional operator then copies
  both caches at every step, and AOT autograd copies them back.
* npugraph_ex, where a cache is made in the graph: the buffers of a staged call, and the empty
  kr_cache beside packed rows. It leaves the latter functional. Of the former it makes a call in
  place, and then hands the first buffer to whoever read one of the results (torch_npu 2.13), so it
  must not be given them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from mla_fusion.compat import OpOverload, storage_id
from mla_fusion.compile import inductor_bridge
from mla_fusion.fx.kinds import is_view, shape_of, word
from mla_fusion.fx.walk import reached
from mla_fusion.meta import key_operator
from mla_fusion.meta.prolog import V3

aten = torch.ops.aten

# the operators that write; the results of their functional forms are theirs, then the caches
_WRITERS = (V3, key_operator.V2)


def write_in_place(graph: Graph) -> int:
    """Rewrite, in place, every call whose caches are its own; how many.

    Its own are inputs of the graph that nothing else reads, and buffers that were made for it.
    """
    return sum(_write_in_place(graph, *found) for found in _functional_calls(graph))


def ready_to_run(graph: Graph) -> int:
    """What npugraph_ex needs of a graph with calls of kernels: returned copies that stay, and calls
    in place on caches that are made in the graph (torchair sees to the others). How many nodes were
    changed.
    """
    kept = keep_returned_copies(graph)
    found = [one for one in _functional_calls(graph) if any(map(_is_buffer, one[2].values()))]
    return kept + sum(_write_in_place(graph, *one) for one in found)


def keep_returned_copies(graph: Graph) -> int:
    """Copies of a written cache that the graph returns, spelled so that torchair keeps them; how
    many.

    torchair takes operators out that leave their operand as it is (a clone, a cat of one), which is
    right as long as the kernel gives out a cache of its own. It then lets the kernel write in
    place, and the copy would be the cache.
    """
    written = {
        result
        for call, _, caches in _functional_calls(graph)
        for result in call.users
        if result.args[1] in caches
    }
    backs = graph.find_nodes(op="call_function", target=aten.copy_.default) if written else []
    results = written.intersection(
        chain.from_iterable(upward_through(back.args[1], ()) for back in backs)
    )
    noops, end, kept = inductor_bridge.noops(), graph.output_node(), dict[Node, Node]()

    def keep(node: Node) -> Node:
        if node not in kept and any(one in results for one in upward_through(node, noops)):
            with graph.inserting_before(end):
                kept[node] = graph.call_function(aten.alias_copy.default, (node,))
                kept[node].meta = dict(node.meta)
        return kept.get(node, node)

    if results:
        end.args = map_arg(end.args, keep)
    return len(kept)


def upward_through(node: Node, noops: Collection[Any]) -> Iterator[Node]:
    """The node and what it is, element by element, as far as views and ``noops`` go."""

    def above(current: Node) -> list[Node]:
        passes = is_view(current) or current.target in noops
        return current.all_input_nodes if passes else []

    return reached([node], above)


def _functional_calls(graph: Graph) -> list[tuple[Node, OpOverload, dict[int, Any]]]:
    """Each call with the operator that writes in its place, and its caches, by the result that is
    the cache afterwards.
    """
    found = []
    for writes in _WRITERS:
        places = [*enumerate(writes.places(*writes.written), len(writes.results))]
        target, in_place = (
            getattr(torch.ops.npu, name).default for name in (writes.functional, writes.name)
        )
        calls = graph.find_nodes(op="call_function", target=target)
        found += [
            (call, in_place, {result: call.args[place] for result, place in places})
            for call in calls
        ]
    return found


def _write_in_place(
    graph: Graph, call: Node, writes: OpOverload, caches: Mapping[int, Any]
) -> bool:
    """Whether the call may: its caches are its own, and lie in different memory (one without
    elements lies in none).
    """
    if not all(_its_own(call, cache) for cache in caches.values()):
        return False
    full = [storage_id(one.meta["val"]) for one in caches.values() if 0 not in shape_of(one)]
    if len({*full}) < len(full):
        return False
    call.target = writes
    call.meta.pop("val", None)
    for item in list(call.users):
        cache = caches.get(item.args[1])  # type: ignore[arg-type]  # of a getitem
        if cache is None:
            continue
        for user in list(item.users):
            if _copies_back(user, cache):
                user.replace_all_uses_with(cache)
                graph.erase_node(user)
        item.replace_all_uses_with(cache)
        graph.erase_node(item)
    return True


def _is_buffer(cache: Any) -> bool:
    """Memory made in the graph for a call to write."""
    return isinstance(cache, Node) and word(cache) == "new_empty"


def _its_own(call: Node, cache: Any) -> bool:
    """Does nobody but the call, and what copies its result back, use this input or buffer?"""
    if _is_buffer(cache):
        return set(cache.users) == {call} or 0 in shape_of(cache)
    return (
        isinstance(cache, Node)
        and cache.op == "placeholder"
        and all(user is call or _copies_back(user, cache) for user in cache.users)
    )


def _copies_back(node: Node, cache: Node) -> bool:
    return node.target is aten.copy_.default and node.args[0] is cache


def runs_fx_graph(compiler_config: Any) -> bool:
    """Does torchair, under this ``CompilerConfig``, run the FX graph itself rather than make a GE
    graph of it?

    npugraph_ex does, and torchair in mode "reduce-overhead". None, of a caller that is no torchair:
    False.
    """
    mode = getattr(getattr(compiler_config, "mode", None), "value", None)
    return mode in ("reduce-overhead", "npugraph_ex") or type(
        compiler_config
    ).__module__.startswith("npugraph_ex")
