"""A replacement may have other strides than the value it replaces: a view of it may have to become a reshape.

A query that the model rotated head by head was dense with heads first; the kernel's is dense with tokens first, and
handed on permuted. The graph's views were traced for the former.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import operator_of
from mla_fusion.fx.sizes import same_shape

aten = torch.ops.aten
_DEMANDING = frozenset((aten.view.default, aten._unsafe_view.default))


def follow(builder: GraphBuilder, replaced: Iterable[tuple[Node, Node]]) -> None:
    """Carry the strides of (new, old) values down the graph, and let go of what only the old ones allowed."""
    moved = {new for new, old in replaced if not _lie_alike(new.meta["val"], old.meta["val"])}
    if not moved:
        return
    with builder.propagating():
        for node in builder.gm.graph.nodes:
            if node not in moved and not moved.isdisjoint(node.all_input_nodes) and operator_of(node).runs:
                _carry(builder, node, moved)


def _carry(builder: GraphBuilder, node: Node, moved: set[Node]) -> None:
    try:
        value = builder.propagate(node.target, node.args, node.kwargs)
    except (RuntimeError, ValueError):
        if node.target not in _DEMANDING:
            return
        node.target = aten.reshape.default
        value = builder.propagate(node.target, node.args, node.kwargs)
    if not _lie_alike(value, node.meta["val"]):
        node.meta["val"] = value
        moved.add(node)


def _lie_alike(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return all(map(_lie_alike, a, b))
    return not isinstance(a, torch.Tensor) or same_shape(a.stride(), b.stride())
