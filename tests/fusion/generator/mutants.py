"""Mutants: a generated graph with one change of its nodes.

Steps that are spelled wrongly are near misses of the catalogue, and families of tests/soundness.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from .changes import CHANGES
from .graphs import Case, capture, structure
from .judge import rows
from .prologue import Choices
from .spellings import sample

CHANGES_A_GRAPH = 16
_VISIBLE = 1e-6  # relative difference of float64 results from which a change is one of meaning


@dataclass(frozen=True)
class Mutant:
    """A case that looks like ``origin``, and what was changed: the kind, and where."""

    case: Case
    origin: Case
    kind: str
    change: str

    def changes_meaning(self) -> bool:
        """Do its float64 results differ from the origin's? (If not, the mutant is a spelling.)"""
        before, now = self.origin.exact, self.case.exact
        if len(before.outputs) != len(now.outputs) or before.caches.keys() != now.caches.keys():
            return True
        pairs = [*zip(before.outputs, now.outputs, strict=True)]
        pairs += [(before.caches[name], cache) for name, cache in now.caches.items()]
        return any(_differ(a, b) for a, b in pairs)


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    size = rows(a).norm(dim=-1).clamp(min=1e-30)
    return bool(((rows(a) - rows(b)).norm(dim=-1) / size > _VISIBLE).any())


@dataclass(frozen=True)
class Recipe:
    """How to make mutants of one spelling: so many changes, drawn by ``seed``."""

    choices: Choices
    seed: int

    def make(self) -> Iterator[Mutant]:
        rng, origin = random.Random(self.seed), capture(self.choices)
        for _ in range(CHANGES_A_GRAPH):
            mutant = change(origin, rng.choice(list(CHANGES)), rng)
            if mutant is not None:
                yield mutant


def recipes(seed: int) -> Iterator[Recipe]:
    """Without end."""
    rng = random.Random(seed)
    for choices in sample(seed):
        yield Recipe(choices, rng.randrange(1 << 30))


def change(origin: Case, kind: str, rng: random.Random) -> Mutant | None:
    case = origin.copy()
    try:
        what = CHANGES[kind](case.graph.graph, rng)
        if what is None:
            return None
        _propagate(case.graph)
    except Exception:  # nonsense: an operator refuses it, or there is nothing to change
        return None
    case.graph.graph.eliminate_dead_code()
    if structure(case.graph) == structure(origin.graph):
        return None
    return Mutant(case, origin, kind, what)


def _propagate(gm: GraphModule) -> None:
    """Give every node the meta value that its operator makes of its arguments' (fake) values."""
    mode = next(node.meta["val"].fake_mode for node in gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
            with mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)
    gm.graph.lint()
    gm.recompile()


def _value(node: Node) -> object:
    return node.meta["val"]
