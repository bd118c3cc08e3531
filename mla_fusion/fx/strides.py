"""Gives readers that need them the strides that the graph was traced with.

A replacement may have other strides than the value that it replaces. A query that the model rotated
head by head is dense with heads first; the kernel's is dense with tokens first, and permuted. Most
operators read either. A view of it may have to become a reshape. A copy with the old strides goes
to what leaves the graph, to readers by strides, and to random and custom operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.build import GraphBuilder
from mla_fusion.fx.kinds import heeds_strides, needs_strides
from mla_fusion.fx.sizes import Binding, same
from mla_fusion.fx.walk import reached

aten = torch.ops.aten
_DEMANDING = frozenset((aten.view.default, aten._unsafe_view.default))


def follow(
    builder: GraphBuilder, replaced: Iterable[tuple[Node, Node]], exact: bool = True
) -> None:
    """Carries the strides of new nodes down the graph.

    replaced  each new node, with the node that it replaces
    exact     True: what leaves the graph, and what random and custom operators read, gets the old
              strides
    """
    traced = {
        new: old.meta["val"]
        for new, old in replaced
        if new.users and not lie_alike(new.meta["val"], old.meta["val"])
    }
    if not traced:
        return
    with builder.propagating():
        if any(map(needs_strides, reached(traced, lambda node: node.users))):
            for new, value in traced.items():
                _restore(builder, new, value, set(new.users))
            return
        readers = {user for value in traced for user in value.users}
        for node in list(builder.gm.graph.nodes):
            if node not in readers:
                continue
            if node.op == "output" or heeds_strides(node):
                for operand in node.all_input_nodes:
                    if operand in traced and exact:
                        _restore(builder, operand, traced[operand], {node})
            elif node not in traced and node.op == "call_function":
                _carry(builder, node, traced)
                readers.update(node.users if node in traced else ())


def _carry(builder: GraphBuilder, node: Node, traced: dict[Node, Any]) -> None:
    """Computes the value of a node anew. Adds the old one to ``traced`` if it lies otherwise."""
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
    """Makes the readers of a node read a copy of it, with the strides of the traced value."""
    builder.at(node.next, node.meta)
    binding, axes = Binding(), range(traced.dim())
    binding.admit(traced.shape)  # a stride may have a difference of symbols
    strides = binding.shape(traced.stride())
    outermost_first = sorted(axes, key=lambda axis: -strides[axis])
    back = [outermost_first.index(axis) for axis in axes]
    in_order = builder.call(aten.permute.default, node, outermost_first)
    restored = builder.call(aten.permute.default, builder.contiguous(in_order), back)
    for reader in readers:
        reader.replace_input_with(node, restored)


def lie_alike(a: Any, b: Any) -> bool:
    """Returns True if tensors have equal strides along every axis that is longer than 1."""
    if isinstance(a, (tuple, list)):
        return all(map(lie_alike, a, b))
    if not isinstance(a, torch.Tensor):
        return True
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(same(step, other) for size, step, other in steps if not same(size, 1))
