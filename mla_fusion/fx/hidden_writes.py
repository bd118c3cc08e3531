"""Inputs that a graph gives out, as views, behind an operator that writes them though its schema
does not say so.

A model that keeps ``self.cache = cache.view(..)`` has that view among the outputs of its graph.
Behind the operator the memory holds the new rows, which are what the operator returns: so that is
what is given out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Graph, GraphModule, Node

from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import is_getitem, is_mutating, word
from mla_fusion.fx.walk import INPUTS, origin, reshapes, views
from mla_fusion.operators.known import calls_of, shape_of

# operator: argument written, result that is it
_WRITTEN = {"npu_kv_rmsnorm_rope_cache": ((5, 0), (6, 1))}
_NEVER_COPY = ("view", "unsqueeze", "squeeze", "alias", "detach")


def found(graph: Graph) -> list[tuple[Node, Node, int]]:
    """Each view of an input among the outputs, the one operator that writes that input, and which
    of its results.
    """
    by_input: dict[Node, list[tuple[Node, int]]] = {}
    for writer, cache, result in of(graph):
        by_input.setdefault(origin(cache, _same_memory), []).append((writer, result))
    for node in graph.nodes if by_input else ():
        if is_mutating(node):  # the last word on what that memory holds
            by_input.pop(origin(node.args[0], views), None)
    given_out = graph.output_node().all_input_nodes if by_input else ()
    written = ((node, by_input.get(origin(node, _same_memory), ())) for node in given_out)
    return [
        (node, *writes[0]) for node, writes in written if len(writes) == 1 and node.op not in INPUTS
    ]


def of(graph: Graph) -> Iterator[tuple[Node, Node, int]]:
    """Each operator that writes an input unseen, the node that it is given, and which result has
    the new rows.
    """
    for node in calls_of(graph, _WRITTEN):
        for place, result in _WRITTEN[word(node)]:
            cache = node.args[place] if len(node.args) > place else None
            if isinstance(cache, Node) and origin(cache, _same_memory).op in INPUTS:
                yield node, cache, result


def _same_memory(node: Node) -> Node | None:
    """Reshapes that never copy: a clone is the input as it was."""
    return reshapes(node) if word(node) in _NEVER_COPY else None


def give_results(gm: GraphModule) -> None:
    """Let the graph give out the operator's results in place of the inputs that it has written."""
    builder = GraphBuilder(gm)
    output = gm.graph.output_node()
    for node, writer, result in found(gm.graph):
        builder.at(output, {})
        with builder.propagating():
            taken = next(
                (user for user in writer.users if is_getitem(user) and user.args[1] == result), None
            )
            value = taken if taken is not None else builder.call(operator.getitem, writer, result)
            output.replace_input_with(node, builder.reshape(value, shape_of(node)))
    gm.graph.lint()
