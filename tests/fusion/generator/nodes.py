"""Nodes of a graph that changes choose from."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def calls(graph: Graph) -> list[Node]:
    return [
        n for n in graph.nodes if n.op == "call_function" and n.target is not aten.copy_.default
    ]


def tensors(graph: Graph) -> list[Node]:
    """Nodes that compute one tensor."""
    return [node for node in calls(graph) if isinstance(node.meta.get("val"), torch.Tensor)]


def is_float(node: Node) -> bool:
    return bool(node.meta["val"].is_floating_point())
