"""A graph is rewritten beside the module that owns it, and given to that module when nothing is left that could fail.

Until :func:`install` the caller's module is only read: a failure before it, wherever it happens, changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from mla_fusion.compat import call_like


def workplace(gm: GraphModule) -> GraphModule:
    """A module with the attributes of ``gm``, the very same objects, and an empty graph that is called as its graph is.

    What is registered on it is not registered on ``gm``.
    """
    made = GraphModule(torch.nn.Module(), Graph())
    held = dict((*gm.named_parameters(recurse=False), *gm.named_buffers(recurse=False), *gm.named_children()))
    for op in ("get_attr", "call_module"):
        for node in gm.graph.find_nodes(op=op):
            name = str(node.target).partition(".")[0]
            held.setdefault(name, getattr(gm, name))
    for name, value in held.items():
        setattr(made, name, value)
    call_like(made.graph, gm.graph)
    return made


def copied(node: Node, into: Graph, transform: Callable[[Node], Any]) -> Node:
    """``node`` at the end of another graph, with its name and its metadata.

    The arguments are set afterwards because ``create_node`` looks through all that it is given for raw symbolic
    sizes, which is half of the time of ``Graph.node_copy`` and has been done when the node was first made.
    """
    made = into.create_node(node.op, node.target, None, None, node.name, node.type)
    if node.args:
        made.args = map_arg(node.args, transform)
    if node.kwargs:
        made.kwargs = map_arg(node.kwargs, transform)
    made.meta = copy.copy(node.meta)
    return made


def install(gm: GraphModule, graph: Graph, buffers: Mapping[str, torch.Tensor]) -> None:
    """Make ``graph`` the graph of ``gm``, with the buffers that it reads beside those of ``gm``; all or nothing."""
    before, registered = gm.graph, []
    try:
        for name, value in buffers.items():
            gm.register_buffer(name, value)
            registered.append(name)
        gm.graph = graph  # generates the code
    except BaseException:
        with suppress(Exception):  # the graph is back before its code is generated, and that is still the old code
            gm.graph = before
        for name in registered:
            delattr(gm, name)
        raise
