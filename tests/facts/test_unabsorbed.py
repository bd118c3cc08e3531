"""q_nope where no product with W_uk follows: all columns that are not rotated, read as one
piece.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from mla_fusion.facts import unabsorbed
from mla_fusion.facts.unabsorbed import UnabsorbedFact
from mla_fusion.fx.walk import upward, views_and_casts
from tests.facts.reading import T, behind, read
from tests.fx.tracing import outputs

N, D, DR, HCKV = 2, 4, 2, 16
WIDTH = N * (D + DR)
ROTATED = {n * (D + DR) + D + r for n in range(N) for r in range(DR)}
Step = Callable[[Tensor], Tensor]


def find(step: Step, rotated: set[int] = ROTATED, heads: int = N) -> list[UnabsorbedFact]:
    graph = behind(step, WIDTH)
    (item,), (facts,) = read(graph)
    found = unabsorbed.find(graph, facts.cone, item, rotated, heads, HCKV)
    read_at = set(upward(outputs(graph)[0], views_and_casts))
    return [fact for fact in found if any(node in read_at for node, _ in fact.roots)]


def heads(y: Tensor) -> Tensor:
    return y.view(T, N, D + DR)


SPELLINGS: dict[str, tuple[Step, float]] = {
    "sliced": (lambda y: heads(y)[..., :D], 1.0),
    "split": (lambda y: heads(y).split([D, DR], -1)[0], 1.0),
    "heads first": (lambda y: heads(y).transpose(0, 1)[..., :D], 1.0),
    "in one row": (lambda y: heads(y)[..., :D].reshape(T, N * D), 1.0),
    "scaled": (lambda y: heads(y)[..., :D] * 0.25, 0.25),
    "scaled before it is cut": (lambda y: heads(y * 2.0)[..., :D], 2.0),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    step, factor = SPELLINGS[name]
    (fact,) = find(step)
    assert (fact.heads, fact.nope_dim, fact.factor, fact.latent_dim) == (N, D, factor, HCKV)
    assert fact.columns == tuple(tuple(n * (D + DR) + d for d in range(D)) for n in range(N))
    assert sorted(fact.codes.flatten().tolist()) == list(range(T * N * D))


MISSES: dict[str, Step] = {
    "one head alone": lambda y: heads(y)[:, 0, :D],
    "rotated columns": lambda y: heads(y)[..., 2:],
    "all columns": lambda y: y * 1.0 + 0 * y.sum(),
    "one token less": lambda y: heads(y)[1:, :, :D],
    "not linear": lambda y: heads(y)[..., :D].square(),
    "shifted": lambda y: heads(y)[..., :D] + 1,
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_not_q_nope(name: str) -> None:
    assert find(MISSES[name]) == []


def test_columns_that_no_number_of_heads_divides() -> None:
    assert find(lambda y: heads(y)[..., :D], heads=3) == []


def test_two_factors_are_two_facts() -> None:
    graph = behind(lambda y: (heads(y)[..., :D] * 0.5, heads(y)[..., :D] * 0.25), WIDTH)
    (item,), (facts,) = read(graph)
    found = unabsorbed.find(graph, facts.cone, item, ROTATED, N, HCKV)
    assert {0.5, 0.25} <= {fact.factor for fact in found}
