"""Epsilons and scales that ``dynamic=True`` has made inputs of the graph, made numbers again.

Under ``torch.compile(dynamic=True)`` dynamo hands every float to the graph as a tensor of one element, a module's
``variance_epsilon`` included; the kernel wants a number. A float that is an attribute of a module, or a global,
hardly ever changes: it is taken at its value, with a guard, so that the graph is compiled again if it does. Floats that
are arguments (a temperature) stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from mla_fusion.compat import source_name


def specialise(gm: GraphModule) -> list[str]:
    """Replace attributes of modules, and globals, among dynamo's float inputs by their values; their dynamo names."""
    found = []
    for node in list(gm.graph.nodes):
        source = _attribute(node.args[0]) if node.op == "call_method" and node.target == "item" else ""
        value = node.meta.get("example_value")
        if source and isinstance(value, torch.SymFloat):
            node.replace_all_uses_with(float(value))  # the conversion is the guard
            gm.graph.erase_node(node)
            found.append(source)
    if found:
        gm.recompile()
    return found


def _attribute(node: Any) -> str:
    """The source of an input that is a module's attribute or a global, "" for anything else."""
    if not isinstance(node, Node) or node.op != "placeholder":
        return ""
    name = source_name(node)
    of_module = name.startswith("L['self'].") or "._modules[" in name
    return name if name.startswith("G[") or (of_module and not name.endswith("]")) else ""
