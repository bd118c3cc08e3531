"""Copies nodes into an empty graph, in a module with the attributes of the one that owns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from mla_fusion.compat import call_like


def workplace(gm: GraphModule) -> GraphModule:
    """Returns a module with the attributes of ``gm``, the same objects, and an empty graph.

    The graph is called as the graph of ``gm`` is. What is registered on the new module is not
    registered on ``gm``.
    """
    module = GraphModule(torch.nn.Module(), Graph())
    attributes = dict(
        (
            *gm.named_parameters(recurse=False),
            *gm.named_buffers(recurse=False),
            *gm.named_children(),
        )
    )
    for op in ("get_attr", "call_module"):
        for node in gm.graph.find_nodes(op=op):
            name = str(node.target).partition(".")[0]
            attributes[name] = getattr(gm, name)
    for name, value in attributes.items():
        setattr(module, name, value)
    call_like(module.graph, gm.graph)
    return module


def copied(node: Node, graph: Graph, transform: Callable[[Node], Any]) -> Node:
    """Returns a copy of a node at the end of another graph, with its name and its metadata."""
    args, kwargs = map_arg((node.args, node.kwargs), transform)
    copy = created(graph, node.op, node.target, args, kwargs, node.name)
    copy.meta.update(node.meta)
    return copy


def created(graph: Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> Node:
    """Returns a new node.

    The arguments are set afterwards. ``create_node`` would search them for raw symbolic sizes,
    which is half of its time, and there are none.
    """
    node = graph.create_node(op, target, name=name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node
