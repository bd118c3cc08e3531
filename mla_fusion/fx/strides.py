"""A replacement may have other strides than the value it replaces, and the graph was traced for the
latter.

A query that the model rotated head by head was dense with heads first; the kernel's is dense with
tokens first, and handed on permuted. Most operators read either. A view of it may have to become a
reshape; what leaves the graph, what is read by strides of its own, and what random and custom
operators read, gets the strides that it had.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import (
    has_reader_by_strides,
    heeds_strides,
    needs_strides,
)
from mla_fusion.fx.sizes import Binding, same
from mla_fusion.fx.walk import reached

aten = torch.ops.aten
_DEMANDING = frozenset((aten.view.default, aten._unsafe_view.default))


def follow(
    builder: GraphBuilder, replaced: Iterable[tuple[Node, Node]], exact: bool = True
) -> None:
    """Carry the strides of (new, old) values down the graph, and let go of what only the old ones
    allowed.

    ``exact``: what leaves the graph, and what random and custom operators read, gets the old
    strides.
    """
    differ = {
        new: old
        for new, old in replaced
        if new.users and not lie_alike(new.meta["val"], old.meta["val"])
    }
    if not differ:
        return
    with builder.propagating():
        if has_reader_by_strides(builder.gm.graph) and reader(differ) is not None:
            for new, old in differ.items():
                _restore(builder, new, old.meta["val"], set(new.users))
            return
        traced: dict[Node, Any] = {new: old.meta["val"] for new, old in differ.items()}
        readers = {user for value in traced for user in value.users}
        for node in list(builder.gm.graph.nodes):
            if node not in readers:
                continue
            if node.op == "output" or heeds_strides(node):
                for value in node.all_input_nodes:
                    if value in traced and exact:
                        _restore(builder, value, traced[value], {node})
            elif node not in traced and node.op == "call_function":
                _carry(builder, node, traced)
                readers.update(node.users if node in traced else ())


def reader(starts: Iterable[Node]) -> Node | None:
    """The first node behind these that needs the strides they were traced with."""
    behind = (user for node in reached(starts, lambda node: node.users) for user in node.users)
    return next(filter(needs_strides, behind), None)


def _carry(builder: GraphBuilder, node: Node, traced: dict[Node, Any]) -> None:
    try:
        value = builder.propagate(node.target, node.args, node.kwargs)
    except (RuntimeError, ValueError):
        if node.target not in _DEMANDING:
            return
        node.target = aten.reshape.default
        value = builder.propagate(node.target, node.args, node.kwargs)
    if not lie_alike(value, node.meta["val"]):
        traced[node], node.meta["val"] = node.meta["val"], value


def _restore(builder: GraphBuilder, node: Node, traced: Any, readers: set[Node]) -> None:
    """Give the readers of a node a copy of it with the strides that it had when the graph was
    traced.
    """
    if not isinstance(traced, torch.Tensor):
        return
    builder.at(node.next, node.meta)
    outermost_first = _order(traced)
    back = [outermost_first.index(axis) for axis in range(traced.dim())]
    in_order = builder.call(aten.permute.default, node, outermost_first)
    dense = builder.call(aten.clone.default, in_order, memory_format=torch.contiguous_format)
    restored = builder.call(aten.permute.default, dense, back)
    for reader in readers:
        reader.replace_input_with(node, restored)


def _order(value: torch.Tensor) -> list[int]:
    """The axes, the one of the greatest stride first."""
    strides = Binding().shape(value.stride())
    return sorted(range(value.dim()), key=lambda axis: -strides[axis])


def lie_alike(a: Any, b: Any) -> bool:
    """Equal strides of every axis that is longer than one."""
    if isinstance(a, (tuple, list)):
        return all(map(lie_alike, a, b))
    if not isinstance(a, torch.Tensor):
        return True
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(same(one, other) for size, one, other in steps if not same(size, 1))
