"""Beside the module that owns a graph: a module of its attributes with an empty graph, into which
nodes are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from mla_fusion.compat import call_like


def workplace(gm: GraphModule) -> GraphModule:
    """A module with the attributes of ``gm``, the very same objects, and an empty graph that is
    called as its graph is.

    What is registered on it is not registered on ``gm``.
    """
    made = GraphModule(torch.nn.Module(), Graph())
    held = dict(
        (
            *gm.named_parameters(recurse=False),
            *gm.named_buffers(recurse=False),
            *gm.named_children(),
        )
    )
    for op in ("get_attr", "call_module"):
        for node in gm.graph.find_nodes(op=op):
            name = str(node.target).partition(".")[0]
            held.setdefault(name, getattr(gm, name))
    for name, value in held.items():
        setattr(made, name, value)
    call_like(made.graph, gm.graph)
    return made


def copied(node: Node, into: Graph, transform: Callable[[Node], Any]) -> Node:
    """``node`` at the end of another graph, with its name and its metadata."""
    args, kwargs = map_arg((node.args, node.kwargs), transform)
    made = created(into, node.op, node.target, args, kwargs, node.name)
    # a node that is given an attribute is sorted anew among those of its graph
    if node.type is not None:
        made.type = node.type
    made.meta.update(node.meta)
    return made


def created(into: Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> Node:
    """A new node. Its arguments are set afterwards, because ``create_node`` looks through all that
    it is given for raw symbolic sizes, which is half of its time; there are none.
    """
    made = into.create_node(op, target, name=name)
    if args:
        made.args = args
    if kwargs:
        made.kwargs = kwargs
    return made
