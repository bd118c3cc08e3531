"""Epsilons and scales that ``dynamic=True`` has made inputs of the graph, made numbers again.

Under ``torch.compile(dynamic=True)`` dynamo hands every float to the graph as a tensor of one
element, a module's ``variance_epsilon`` included; the kernel wants a number. A float that a module
or its class holds, or a global, hardly ever changes: it is taken at its value, with a guard, so
that the graph is compiled again if it does. Floats that are arguments (a temperature) stay what
they are.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from mla_fusion.compat import is_held, source_name


def specialise(gm: GraphModule) -> list[str]:
    """Replace dynamo's float inputs that modules hold, or globals, by their values; their dynamo
    names.
    """
    found = []
    for node in list(gm.graph.nodes):
        if node.op != "call_method" or node.target != "item":
            continue
        value, given = node.meta.get("example_value"), node.args[0]
        if isinstance(value, torch.SymFloat) and isinstance(given, Node) and is_held(given):
            node.replace_all_uses_with(float(value))  # the conversion is the guard
            gm.graph.erase_node(node)
            found.append(source_name(given))
    if found:
        gm.recompile()
    return found
