"""The part of a graph that verification runs: from leaves, which are drawn, to all that a plan
replaces or reads.

Two nodes are two values here, even where recognition holds them equal, with one exception: integers
that the graph computes twice, where their terms are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.compat import expression_of
from mla_fusion.emit.targets import target_of
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.fx.kinds import filled_with, operator_of, tensor_held
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import has_symbols, is_symbolic, same, same_shape
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import (
    INPUTS,
    origin,
    reached,
    reshapes_and_exact_casts,
    views_and_casts,
)
from mla_fusion.match.candidate import Candidate
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.plan.plan import Plan

_INTEGERS = (torch.int64, torch.int32)
_FARTHEST = 24  # nodes looked at above x for something that x is computed from a second time


@dataclass(frozen=True)
class Region:
    """What is run, in an order in which it can be.

    nodes     from the leaves to the targets and to what the call reads
    leaves    what is drawn, with the part that it plays: "x", "weight", "gamma", "scale",
              "token_scale", "cache", "inverse", "slots", "one_scale", "one_inverse", "one_offset"
              (vectors that repeat one number), "constant" (its real value is taken), or "" for
              anything else
    twins     integers that are, by proof, the very integers of another node
    targets   what the call replaces
    """

    nodes: tuple[Node, ...]
    leaves: dict[Node, str]
    twins: dict[Node, Node]
    targets: tuple[Node, ...]
    reads: tuple[Node, ...]


def cut_out(view: View, plan: Plan) -> Region:
    """The region of a plan."""
    targets = tuple(dict.fromkeys(item.node for item in plan.replacements))
    reads = tuple(target_of(plan).inputs(plan))
    roles = _roles(plan)
    xs = plan.read_from or (_leaf_of_x(plan),)
    above = set[Node]() if plan.read_from else _above_x(plan.candidate.down.origin)
    walk = _Walk(view, plan, {**dict.fromkeys(xs, "x"), **roles})
    met = walk.run([*targets, *reads], stop_at=above.difference(xs))
    # x is computed a second time from what lies above it: that is drawn, and both are computed
    if met:
        roles = {node: role for node, role in roles.items() if above.isdisjoint(_upward(node))}
        walk = _Walk(view, plan, {**dict.fromkeys(met, "x"), **roles})
        walk.run([*targets, *reads])
    outside = walk.not_runnable()
    if outside:
        walk = _Walk(view, plan, {**dict.fromkeys(outside, ""), **walk.given})
        walk.run([*targets, *reads])
    return Region(tuple(walk.order), walk.leaves, walk.twins, targets, reads)


class _Walk:
    """Upwards, depth first, in the order of arguments: equal regions are walked alike."""

    def __init__(self, view: View, plan: Plan, given: dict[Node, str]) -> None:
        """``given``: leaves that are known, with their parts."""
        self.view, self.given = view, given
        self.order: list[Node] = []
        self.leaves: dict[Node, str] = {}
        self.twins: dict[Node, Node] = {}
        self._slots = plan.caches.slots.nodes

    def run(self, starts: Iterable[Node], stop_at: Iterable[Node] = ()) -> list[Node]:
        """Fill ``order`` and ``leaves``; the nodes of ``stop_at`` that were met."""
        stop, met, seen = frozenset(stop_at), [], set[Node]()
        stack = [(node, False) for node in reversed(list(starts))]
        while stack:
            node, done = stack.pop()
            if done:
                self.order.append(node)
                continue
            if node in seen or not _has_value(node):
                continue
            seen.add(node)
            role = self.given.get(node)
            if role is None and node in stop:
                met.append(node)
            elif role is not None or _is_drawn(node):
                self.leaves[node] = self._role_of_input(node) if role is None else role
            elif (twin := self._twin(node)) is not None:
                self.twins[node] = twin
                stack.append((twin, False))
            else:
                stack.append((node, True))
                if filled_with(node) is None:
                    stack += [(read, False) for read in reversed(node.all_input_nodes)]
        return met

    def _role_of_input(self, node: Node) -> str:
        return "constant" if node.op == "get_attr" and tensor_held(node) is not None else ""

    def _twin(self, node: Node) -> Node | None:
        if getattr(node.meta["val"], "dtype", None) not in _INTEGERS or node in self._above_slots:
            return None
        alike = (
            slot for slot in self._slots if _like(node, slot) and self.view.terms.same(node, slot)
        )
        return next(alike, None)

    @cached_property
    def _above_slots(self) -> set[Node]:
        """What slots are made of, and they: none of these is their twin, for it would be made of
        itself.
        """
        return {node for slot in self._slots for node in nodes_between((), slot)}

    def not_runnable(self) -> list[Node]:
        """What depends on no x and is no plain computation: a product of another layer, a
        collective, an effect.
        """
        xs = {node for node, role in self.leaves.items() if role == "x"}
        depends: set[Node] = set(xs)
        outside = []
        for node in self.order:
            if any(read in depends for read in node.all_input_nodes):
                depends.add(node)
            elif not operator_of(node).runs or node in self.view.contractions:
                outside.append(node)
        return outside


def _roles(plan: Plan) -> dict[Node, str]:
    """The parts that graph inputs and weights play in the plan."""
    parts: list[tuple[Iterable[Node | None], str, Callable[[Node], Node]]] = []
    if isinstance(plan.candidate, Candidate):
        parts += _roles_of_query(plan.candidate)
    parts.append(((plan.candidate.key.gamma,), "gamma", _source))
    parts += [((node,), role, _only_input) for node, role in plan.parts]
    for scale in plan.caches.scales:
        parts.append(((scale.node,), "inverse" if scale.inverse else "cache_scale", _source))
    parts.append((plan.caches.slots.nodes, "slots", same_elements))
    parts.append((plan.caches.inputs, "cache", lambda node: node))
    found: dict[Node, str] = {}
    for nodes, role, above in parts:
        for node in nodes:
            if node is not None:
                found.setdefault(above(node), role)
    return found


def _roles_of_query(
    candidate: Candidate,
) -> Iterator[tuple[Iterable[Node | None], str, Callable[[Node], Node]]]:
    """Those of the weights, and of what else only a whole prologue has."""
    q = candidate.query
    quantised = [item.quantised for item in candidate.projections if item.quantised is not None]
    yield [item.weight for item in candidate.projections], "weight", _source
    if isinstance(q.absorb, AbsorbFact):
        yield q.absorb.weights, "weight", _source
    smooth = [item.dynamic.smooth for item in quantised if item.dynamic is not None]
    yield (q.norm.gamma, *smooth), "gamma", _source
    yield [item.weight_scale for item in quantised], "scale", _source
    if q.down.quantised is not None and q.down.quantised.dynamic is None:
        yield (q.down.quantised.token_scale,), "token_scale", _source


def _source(node: Node) -> Node:
    """The graph input of which the node is a view or a cast, or the node itself where something
    computes it.
    """
    above = origin(node, views_and_casts)
    return above if above.op in INPUTS else node


def _only_input(node: Node) -> Node:
    """The graph input that the node is computed from, where there is one alone: a model may compute
    it twice.
    """
    found = node
    while found.op not in INPUTS and len(found.all_input_nodes) == 1:
        (found,) = found.all_input_nodes
    return found if found.op in INPUTS else _source(node)


def same_elements(node: Node) -> Node:
    """Up through what keeps every integer, its place and their number."""
    return origin(node, reshapes_and_exact_casts)


def _leaf_of_x(plan: Plan) -> Node:
    """Of the x that the call reads and the x that the projections read, the one from which the
    other is computed.
    """
    origin = plan.candidate.down.origin
    if origin in _upward(plan.token_x):
        return origin
    return plan.token_x if plan.token_x in _above_x(origin) else origin


def _upward(node: Node) -> Iterator[Node]:
    return reached([node], lambda read: read.all_input_nodes, _FARTHEST)


def _above_x(origin: Node) -> set[Node]:
    """What x is computed from that has as many elements: a wider form of it, the value before its
    norm, residuals, what is quantised.
    """
    size = prod(shape_of(origin))

    def is_as_large(node: Node) -> bool:
        value = value_of(node)
        return isinstance(value, torch.Tensor) and same(prod(value.shape), size)

    _, *above = reached([origin], lambda node: filter(is_as_large, node.all_input_nodes), _FARTHEST)
    return set(above)


def _is_drawn(node: Node) -> bool:
    return node.op in INPUTS or operator_of(node).random or _makes_a_size(node)


def _makes_a_size(node: Node) -> bool:
    """Does it have as many rows as the values say that it reads (nonzero, an index by a mask)?
    These are drawn.
    """
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and not has_symbols(value.shape):
        return False  # most are such
    own = _symbols(value)
    given = (_symbols(value_of(read)) for read in node.all_input_nodes) if own else ()
    return bool(own.difference(*given))


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, (tuple, list)):
        return set().union(*map(_symbols, value))
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {
        symbol for size in sizes if is_symbolic(size) for symbol in expression_of(size).free_symbols
    }


def _has_value(node: Node) -> bool:
    """Does it hold a tensor, or several? (Sizes are bound to numbers, not run.)"""
    return isinstance(value_of(node), (torch.Tensor, tuple, list))


def _like(a: Node, b: Node) -> bool:
    one, other = a.meta["val"], b.meta["val"]
    return bool(one.dtype == other.dtype) and same_shape(one.shape, other.shape)
