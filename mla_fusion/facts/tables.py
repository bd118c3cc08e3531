"""Are two tables the same numbers, however each was lifted, joined or repeated for its side of the
attention?

Integers are compared as terms, and everything else in exact arithmetic, from the values on that
both tables are made of.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import is_symbolic, same
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import exact_casts, origin
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.prove import evaluate
from mla_fusion.prove.evaluate import Evaluation

_FARTHEST = 256  # nodes above a table; of more it is no table


def same_values(view: View, a: Node, b: Node) -> bool:
    """Do ``a`` and ``b`` hold the same rows, whatever the graph's inputs hold?"""
    a, b = origin(a, exact_casts), origin(b, exact_casts)
    if view.same(a, b):
        return True
    if not _as_many(a, b):
        return False
    return view.terms.same(a, b) or _are_proved(view, a, b)


def _as_many(a: Node, b: Node) -> bool:
    """As many elements, in rows of one width?"""
    shapes = [shape_of(node) for node in (a, b)]
    if not shapes[0] or not shapes[1] or not same(shapes[0][-1], shapes[1][-1]):
        return bool(shapes[0] == shapes[1])
    return same(math.prod(shapes[0]), math.prod(shapes[1]))


def _are_proved(view: View, a: Node, b: Node) -> bool:
    of_a, of_b = (_by_term(view, node) for node in (a, b))
    twins = {node: of_a[term] for term, node in of_b.items() if term in of_a}
    atoms = {*twins, *twins.values()}
    if max(len(of_a), len(of_b)) > _FARTHEST:
        return False
    if not all(_keeps_tokens(view, atoms, node) for node in (a, b)):
        return False
    leaves = dict.fromkeys(twins.values(), "")
    twins = {node: twin for node, twin in twins.items() if node is not twin}
    return evaluate.holds(view, leaves, lambda run: _are_equal(run, a, b), twins=twins)


def _are_equal(run: Evaluation, a: Node, b: Node) -> bool:
    return evaluate.is_same(*(run.value(node).flatten() for node in (a, b)))


def _by_term(view: View, node: Node) -> dict[int, Node]:
    """The tensors above a node that are no literals, by the numbers of their terms."""
    found = {}
    for above in nodes_between((), node):
        if isinstance(value_of(above), torch.Tensor) and not view.is_constant(above):
            found[view.terms.number(above)] = above
    return found


def _keeps_tokens(view: View, atoms: set[Node], end: Node) -> bool:
    """Is each row of the end made of the same row of every atom, where the number of rows is
    symbolic?
    """
    steps = nodes_between(tuple(atoms), end)
    tokens = Tokens.of(list(atoms), steps, view.binding.meaning)
    if not tokens:
        return not any(is_symbolic(size) for size in shape_of(end))
    return end in atoms or (tokens.broken(end) is None and tokens.knows(end))
