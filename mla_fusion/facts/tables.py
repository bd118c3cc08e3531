"""Are two tables the same numbers, however each was lifted, joined or repeated for its side of the
attention?

Integers are compared as terms. What movement and analytic steps alone make of floats is run on
random values of what both tables are made of, which proves the tables equal or shows that they are
not. A step that picks by values, a cast that loses some, or tokens that are mixed on the way prove
nothing, and count as different.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import is_cast, is_faithful_cast
from mla_fusion.fx.measured import measured
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.sizes import is_symbolic, same
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import exact_casts, origin

_DRAWS = 2


@measured
def same_values(view: View, a: Node, b: Node) -> bool:
    """Do ``a`` and ``b`` hold the same rows, whatever the graph's inputs hold?"""
    a, b = origin(a, exact_casts), origin(b, exact_casts)
    if view.same(a, b):
        return True
    if not _as_many(a, b):
        return False
    if view.terms.same(a, b):
        return True
    common = {view.terms.number(node) for node in nodes_between((), a)}
    common &= {view.terms.number(node) for node in nodes_between((), b)}
    of_a, of_b = _between(view, a, common), _between(view, b, common)
    if of_a is None or of_b is None:
        return False
    (atoms_a, steps_a), (atoms_b, steps_b) = of_a, of_b
    if not (_keeps_tokens(view, atoms_a, steps_a, a) and _keeps_tokens(view, atoms_b, steps_b, b)):
        return False
    sides = ((a, atoms_a, steps_a), (b, atoms_b, steps_b))
    for seed in range(_DRAWS):
        first, second = (_run(view, node, atoms, steps, seed) for node, atoms, steps in sides)
        if (
            first is None
            or second is None
            or not torch.equal(first.reshape(-1), second.reshape(-1))
        ):
            return False
    return True


def _as_many(a: Node, b: Node) -> bool:
    """As many elements, in rows of one width?"""
    shapes = [node.meta["val"].shape for node in (a, b)]
    if not shapes[0] or not shapes[1] or not same(shapes[0][-1], shapes[1][-1]):
        return bool(shapes[0] == shapes[1])
    return same(math.prod(shapes[0]), math.prod(shapes[1]))


def _between(view: View, node: Node, common: set[int]) -> tuple[list[Node], list[Node]] | None:
    """The nearest floats above the node that are common, and the steps from these; None where a
    step proves nothing.
    """
    atoms: dict[Node, None] = {}
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if is_symbolic(current.meta.get("val")):
            continue
        # the parts of a split differ: what is split is above
        whole = isinstance(current.meta.get("val"), torch.Tensor)
        if whole and view.terms.number(current) in common and not view.is_constant(current):
            if not _is_float(current):
                # what is made of integers is compared as terms; these differ further down
                return None
            atoms[current] = None
            continue
        if view.step_ends_proof(current) or not (_is_float(current) or view.is_constant(current)):
            return None
        if is_cast(current) and not (is_faithful_cast(current) or view.is_constant(current)):
            return None
        new = [arg for arg in current.all_input_nodes if arg not in seen]
        seen.update(new)
        stack.extend(new)
    found = list(atoms)
    return found, nodes_between(found, node)


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _keeps_tokens(view: View, atoms: list[Node], steps: list[Node], end: Node) -> bool:
    """Is each row of the end made of the same row of every atom, where the number of rows is
    symbolic?
    """
    tokens = Tokens.of(atoms, steps, view.binding.meaning)
    if not tokens:
        return not any(is_symbolic(size) for size in end.meta["val"].shape)
    return end in atoms or (tokens.broken(end) is None and tokens.knows(end))


def _run(
    view: View, node: Node, atoms: list[Node], steps: list[Node], seed: int
) -> torch.Tensor | None:
    """The node's value on random values of the atoms, equal for atoms of one term; None if it
    fails.
    """
    program = Program(atoms, steps, view.binding)
    value = program.run([_draw(view, atom, seed) for atom in atoms])[program.slot(node)]
    return value if isinstance(value, torch.Tensor) else None


def _draw(view: View, node: Node, seed: int) -> torch.Tensor:
    """Random values that depend only on the node's term: the same for both tables."""
    generator = torch.Generator().manual_seed(view.terms.number(node) * _DRAWS + seed)
    value = node.meta["val"]
    shape = view.binding.shape(value.shape)
    dtype = torch.complex128 if value.dtype.is_complex else torch.float64
    return torch.randn(math.prod(shape), generator=generator, dtype=dtype).reshape(shape)
