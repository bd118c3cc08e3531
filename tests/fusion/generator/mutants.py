"""Mutants: a generated graph with one change of its nodes, or a spelling with one step spelled wrongly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from .changes import CHANGES
from .graphs import Case, capture, run, structure
from .judge import Judgement, Verdict, judge, rows
from .prologue import Choices
from .spellings import MISTAKES, refused, sample

_VISIBLE = 1e-6  # relative difference of float64 results from which a change is one of meaning


@dataclass(frozen=True)
class Mutant:
    """A case that looks like ``origin``, and what was changed: the kind, and where."""

    case: Case
    origin: Case
    kind: str
    change: str

    def changes_meaning(self, judgement: Judgement) -> bool:
        """Do its float64 results differ from the origin's? (A mutant that means the same is a spelling.)"""
        assert judgement.exact is not None
        before = run(self.origin.graph, self.origin.inputs(), wide=True)
        now = judgement.exact
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


def of_nodes(seed: int) -> Iterator[Mutant]:
    """Some changes of each generated graph; those that do not propagate are passed over."""
    rng = random.Random(seed)
    for choices in sample(seed):
        origin = capture(choices)
        for _ in range(8):
            kind = rng.choice(list(CHANGES))
            mutant = _changed(origin, kind, rng)
            if mutant is not None:
                yield mutant


def _changed(origin: Case, kind: str, rng: random.Random) -> Mutant | None:
    case = origin.copy()
    try:
        change = CHANGES[kind](case.graph.graph, rng)
        if change is None:
            return None
        _propagate(case.graph)
    except Exception:  # nonsense: an operator refuses it, or it has nothing to change
        return None
    case.graph.graph.eliminate_dead_code()
    if structure(case.graph) == structure(origin.graph):
        return None
    return Mutant(case, origin, kind, change)


def _propagate(gm: GraphModule) -> None:
    """Give every node the meta value that its operator makes of its arguments' (fake) values."""
    mode = next(n.meta["val"].fake_mode for n in gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _meaning)
            with mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)
    gm.graph.lint()
    gm.recompile()


def _meaning(node: Node) -> object:
    return node.meta["val"]


def of_spellings(seed: int) -> Iterator[Mutant]:
    """Each mistake in turn, in spellings of its own."""
    rng = random.Random(seed)
    spellings = sample(seed + 1)
    mistakes = [(axis, mistake) for axis, wrong in MISTAKES.items() for mistake in wrong]
    for axis, mistake in itertools.chain.from_iterable(rng.sample(mistakes, len(mistakes)) for _ in itertools.count()):
        choices = _with_mistake(next(spellings), axis, mistake)
        if choices is None:
            continue
        right, wrong = choices
        try:
            yield Mutant(capture(wrong), capture(right), f"{axis} spelled wrongly", mistake)
        except RuntimeError:  # the mistake does not fit these shapes
            continue


def _with_mistake(choices: Choices, axis: str, mistake: str) -> tuple[Choices, Choices] | None:
    if axis == "kv_product" and choices["down"].startswith("merged"):
        choices = {**choices, "down": "two"}
    if axis == "up" and choices["query_scale"] == "before":
        choices = {**choices, "query_scale": "none"}
    if axis == "key_tables" and choices["tables"] == "shared_by_sequences":
        choices = {**choices, "tables": "given"}
    return None if refused(choices) else (choices, {**choices, axis: mistake})


def judged(mutants: Iterator[Mutant], verify: str = "first") -> Iterator[tuple[Mutant, Judgement]]:
    """Mutants that are valid graphs, differ from each other in structure, and mean something else than their origin."""
    seen: set[str] = set()
    for mutant in mutants:
        key = structure(mutant.case.graph)
        if key in seen:
            continue
        seen.add(key)
        judgement = judge(mutant.case, verify)
        if judgement.verdict in (Verdict.WRONG, Verdict.CRASHED) or (
            judgement.verdict is not Verdict.INVALID and mutant.changes_meaning(judgement)
        ):
            yield mutant, judgement
