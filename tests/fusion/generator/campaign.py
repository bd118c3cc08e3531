"""Many spellings and many mutants, judged; what is kept of each can be sent between processes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

import torch

from . import quantised
from .graphs import capture, structure
from .judge import Judgement, Verdict, judge
from .mutants import Mutant, Recipe, recipes
from .prologue import Choices
from .spellings import sample

_Item, _Made = TypeVar("_Item"), TypeVar("_Made")


@dataclass(frozen=True)
class Outcome:
    """One judged graph: its structure, the verdict and why, its spelling, a mutant's change."""

    structure: str
    verdict: Verdict
    detail: str
    choices: Choices
    kind: str = ""
    change: str = ""

    def __str__(self) -> str:
        return f"{self.verdict.value}: {self.kind} {self.change}: {self.detail}\n  {self.choices}"


def spellings(count: int, seed: int, jobs: int = 1) -> Iterator[Outcome]:
    """Outcomes of ``count`` spellings, no two of equal structure."""
    return itertools.islice(_distinct(_spread(_spelling, sample(seed), jobs)), count)


def mutants(count: int, seed: int, jobs: int = 1) -> Iterator[Outcome]:
    """``count`` valid mutants' outcomes, no two of one structure, none of its origin's meaning."""
    return itertools.islice(
        _distinct(itertools.chain.from_iterable(_spread(_mutants, recipes(seed), jobs))), count
    )


def quantised_mutants(count: int, seed: int, jobs: int = 1) -> Iterator[Outcome]:
    """The same of quantised graphs of the catalogue."""
    found = itertools.chain.from_iterable(_spread(_quantised, quantised.recipes(seed), jobs))
    return itertools.islice(_distinct(found), count)


def _quantised(recipe: tuple[str, int]) -> list[Outcome]:
    return [
        _outcome(mutant, judgement)
        for mutant, judgement in quantised.mutants(recipe)
        if judgement.verdict is not Verdict.INVALID
    ]


def _outcome(mutant: Mutant, judgement: Judgement) -> Outcome:
    key = structure(mutant.case.graph)
    return Outcome(
        key, judgement.verdict, judgement.detail, mutant.case.choices, mutant.kind, mutant.change
    )


def _spelling(choices: Choices) -> Outcome:
    case = capture(choices)
    judgement = judge(case)
    return Outcome(structure(case.graph), judgement.verdict, judgement.detail, choices)


def _mutants(recipe: Recipe) -> list[Outcome]:
    found = []
    for mutant in recipe.make():
        judgement = judge(mutant.case)
        if judgement.verdict is not Verdict.INVALID and mutant.changes_meaning():
            found.append(_outcome(mutant, judgement))
    return found


def _distinct(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    seen: set[str] = set()
    for outcome in outcomes:
        if outcome.structure not in seen:
            seen.add(outcome.structure)
            yield outcome


def _spread(work: Callable[[_Item], _Made], items: Iterator[_Item], jobs: int) -> Iterator[_Made]:
    """``map`` over ``jobs`` processes, in order; a batch at a time, because the items have no
    end. torch remembers the operators that it has seen on fake tensors: a process ends in time.
    """
    if jobs == 1:
        yield from map(work, items)
        return
    with get_context("spawn").Pool(jobs, quiet, maxtasksperchild=200) as pool:
        while True:
            yield from pool.imap(work, itertools.islice(items, 16 * jobs))


def quiet() -> None:
    """One thread a process; near misses and shapes that do not fit would be logged by thousands."""
    torch.set_num_threads(1)
    for name in ("mla_fusion", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
