"""Columns that nothing rotates: read as one piece by products and writes, and by no step that might
rotate them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.facts import unrotated
from mla_fusion.facts.rope import RopeFact
from tests.facts.reading import T, behind, read
from tests.fx.tracing import floats

N, D, DR = 2, 4, 6
WIDTH = N * (D + DR)
NOPE = {n * (D + DR) + d for n in range(N) for d in range(D)}
Step = Callable[[Tensor, Tensor], Tensor]  # of q and rows that it meets


def find(step: Step, heads: int = N, width: int | None = DR) -> list[RopeFact]:
    graph = behind(step, WIDTH, floats(DR, 3))
    (_, *_), (facts, *_) = read(graph)
    return unrotated.find(graph, facts.cone, NOPE, heads, width)


def rope(y: Tensor) -> Tensor:
    return y.view(T, N, D + DR)[..., D:]


SPELLINGS: dict[str, tuple[Step, float]] = {
    "product": (lambda y, rows: rope(y) @ rows, 1.0),
    "heads first": (lambda y, rows: rope(y).transpose(0, 1) @ rows, 1.0),
    "scaled": (lambda y, rows: (rope(y) * 0.5) @ rows, 0.5),
    "given out": (lambda y, rows: rope(y), 1.0),
    "scaled behind a join": (lambda y, rows: (torch.cat([rope(y), rope(y)], 0) * 0.5) @ rows, 1.0),
    "cast": (lambda y, rows: rope(y).double() @ rows.double(), 1.0),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    step, factor = SPELLINGS[name]
    fact = next(fact for fact in find(step) if fact.factor == factor)
    columns = [[n * (D + DR) + D + r for r in range(DR)] for n in range(N)]
    assert [
        [*first, *second] for first, second in zip(fact.first, fact.second, strict=True)
    ] == columns
    assert (fact.heads, fact.rope_dim, fact.layout, fact.cos, fact.sin) == (N, DR, "half", (), ())


MISSES: dict[str, Step] = {
    "scaled and rolled": lambda y, rows: (rope(y) * 0.5).roll(1, 0) * rows.t()[:1] @ rows,
    "half of it negated": lambda y, rows: (rope(y) * rows.t()[:1]) @ rows,
    "clamped": lambda y, rows: rope(y).clamp(-1, 1) @ rows,
    "a bias": lambda y, rows: (rope(y) + 1) @ rows,
    "one head alone": lambda y, rows: y.view(T, N, D + DR)[:, 0][..., D:] @ rows,
    "not all columns": lambda y, rows: y.view(T, N, D + DR)[..., D + 2 :] @ rows[2:],
}


@pytest.mark.parametrize("name", MISSES)
def test_what_may_be_rotated_or_is_not_whole(name: str) -> None:
    assert find(MISSES[name]) == []


def test_another_number_of_heads_or_columns() -> None:
    step = SPELLINGS["product"][0]
    assert find(step, heads=4) == [] and find(step, width=4) == []
    assert len(find(step, width=None)) == 1
