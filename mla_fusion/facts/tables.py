"""Are two tables the same numbers, however each was lifted, joined or repeated for its side of the attention?"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.fx import Node

from mla_fusion.graph.kinds import is_faithful_cast
from mla_fusion.graph.program import Program, nodes_between
from mla_fusion.graph.sizes import is_symbolic
from mla_fusion.graph.view import View


def same_values(view: View, a: Node, b: Node) -> bool:
    """Do ``a`` and ``b`` hold the same rows? Equal computations do; others are run from what both are made of.

    Two tables made of one tensor, by whatever views, joins and casts, agree on random values of it or they do not.
    """
    a, b = _without_casts(a), _without_casts(b)
    if view.same(a, b):
        return True
    shapes = [view.binding.shape(node.meta["val"].shape) for node in (a, b)]
    if math.prod(shapes[0]) != math.prod(shapes[1]) or shapes[0][-1:] != shapes[1][-1:]:
        return False
    common = _numbers(view, a) & _numbers(view, b)
    agreed = False
    for step, start in _POSITIONS:
        first, second = (_run(view, node, common, step, start) for node in (a, b))
        if first is None and second is None:
            continue  # positions beyond a table that is indexed by them
        if first is None or second is None or not torch.equal(first.reshape(-1), second.reshape(-1)):
            return False
        agreed = True
    return agreed


# Integers (positions) are drawn as a permutation of 0, 1, .. times a step, plus a start: of a single token, the first
# draw is 0, which many functions leave alone, and in every first draw a remainder by the number of tokens is nothing.
_POSITIONS = ((1, 0), (1, 1), (7, 3))


def _without_casts(node: Node) -> Node:
    while is_faithful_cast(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _numbers(view: View, node: Node) -> set[int]:
    """Of the node and of everything that it is computed from."""
    return {view.number(ancestor) for ancestor in nodes_between((), node)}


def _run(view: View, node: Node, common: set[int], step: int, start: int) -> torch.Tensor | None:
    """The node's value where every nearest ancestor numbered in ``common`` is drawn at random; None if it fails."""
    drawn = list(_nearest(view, node, common))
    program = Program(drawn, nodes_between(drawn, node), view.binding)
    value = program.run([_draw(view, ancestor, step, start) for ancestor in drawn])[program.slot(node)]
    return value if isinstance(value, torch.Tensor) else None


def _nearest(view: View, node: Node, common: set[int]) -> Iterable[Node]:
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if view.number(current) in common and isinstance(current.meta.get("val"), torch.Tensor):
            if not view.is_constant(current):
                yield current
            continue
        new = [arg for arg in current.all_input_nodes if arg not in seen and not is_symbolic(arg.meta.get("val"))]
        seen.update(new)
        stack.extend(new)


def _draw(view: View, node: Node, step: int, start: int) -> torch.Tensor:
    """Random values that depend only on the node's number: the same for both tables."""
    generator = torch.Generator().manual_seed(view.number(node))
    value = node.meta["val"]
    shape = view.binding.shape(value.shape)
    if value.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    if value.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    order = torch.randperm(math.prod(shape), generator=generator).reshape(shape)
    return (order * step + start).to(value.dtype)
