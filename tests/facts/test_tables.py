"""Tables: the same numbers for both sides of the attention, however each side has them; proved, not
seen.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.tables import same_values
from tests.fx.tracing import TOKENS, floats, integers, outputs, view

DR = 8
Table = Callable[[Tensor, Tensor], Tensor]  # of angles [T, DR / 2] and positions [T]


def same(a: Table, b: Table, symbolic: bool = False) -> bool:
    graph = view(
        lambda f, p: (a(f, p), b(f, p)),
        floats(TOKENS, DR // 2),
        integers(TOKENS),
        symbolic=symbolic,
    )
    return same_values(graph, *outputs(graph))


def cosines(f: Tensor, p: Tensor) -> Tensor:
    return torch.cat([f, f], -1).cos()


def of_positions(p: Tensor) -> Tensor:
    return torch.outer(p.float(), torch.arange(DR // 2) / DR)


SAME: dict[str, tuple[Table, Table]] = {
    "itself": (cosines, cosines),
    "joined behind": (cosines, lambda f, p: torch.cat([f.cos(), f.cos()], -1)),
    "repeated": (cosines, lambda f, p: f.cos().repeat(1, 2)),
    "an axis for heads": (cosines, lambda f, p: torch.cat([f, f], -1).cos().unsqueeze(1)),
    "widened": (cosines, lambda f, p: cosines(f, p).double()),
    "looked up and selected": (lambda f, p: f.cos()[p], lambda f, p: f.cos().index_select(0, p)),
    "looked up and embedded": (lambda f, p: f[p], lambda f, p: torch.nn.functional.embedding(p, f)),
    "of equal terms": (
        lambda f, p: of_positions(p).cos(),
        lambda f, p: of_positions((p // 4) * 4 + p % 4).cos(),
    ),
}
OTHER: dict[str, tuple[Table, Table]] = {
    "sine": (cosines, lambda f, p: torch.cat([f, f], -1).sin()),
    "interleaved": (cosines, lambda f, p: f.cos().repeat_interleave(2, -1)),
    "negated": (
        lambda f, p: torch.cat([f, f], -1).sin(),
        lambda f, p: -torch.cat([f, f], -1).sin(),
    ),
    "tokens flipped": (cosines, lambda f, p: cosines(f, p).flip(0)),
    "tokens rolled": (cosines, lambda f, p: cosines(f, p).roll(1, 0)),
    "scaled": (cosines, lambda f, p: cosines(f, p) * 1.1),
    "clamped far out": (cosines, lambda f, p: cosines(f.clamp(-1e5, 1e5), p)),
    "outlying angles": (cosines, lambda f, p: cosines(torch.where(f > 1e4, 0.0, f), p)),
    "angles in bfloat16": (cosines, lambda f, p: cosines((f * 3).bfloat16(), p)),
    "size of a table": (lambda f, p: f + 100, lambda f, p: ((f + 100) ** 2).sqrt()),
    "positions clamped": (
        lambda f, p: of_positions(p).cos(),
        lambda f, p: of_positions(p.clamp(max=4095)).cos(),
    ),
    "positions wrapped": (
        lambda f, p: of_positions(p).cos(),
        lambda f, p: of_positions(p % 4096).cos(),
    ),
    "one position replaced": (
        lambda f, p: of_positions(p).cos(),
        lambda f, p: of_positions(torch.where(p == 20011, 0, p)).cos(),
    ),
    "positions in bfloat16": (
        lambda f, p: of_positions(p).cos(),
        lambda f, p: of_positions(p.bfloat16()).cos(),
    ),
    "looked up elsewhere": (lambda f, p: f[p], lambda f, p: f.index_select(0, p // 2)),
    "another table": (lambda f, p: f[p], lambda f, p: (2 * f).index_select(0, p)),
    "noise": (cosines, lambda f, p: cosines(f, p) + torch.randn(DR)),
    "first tokens alone": (
        cosines,
        lambda f, p: torch.cat([cosines(f, p)[:3], cosines(f, p)[3:] * 2]),
    ),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_same(name: str, symbolic: bool) -> None:
    a, b = SAME[name]
    assert same(a, b, symbolic) and same(b, a, symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_other(name: str, symbolic: bool) -> None:
    a, b = OTHER[name]
    assert not same(a, b, symbolic) and not same(b, a, symbolic)


def test_two_inputs_are_two_tables() -> None:
    graph = view(lambda a, b: (a.cos(), b.cos()), floats(TOKENS, DR), floats(TOKENS, DR))
    assert not same_values(graph, *outputs(graph))
