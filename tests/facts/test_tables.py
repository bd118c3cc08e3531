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
    "clamped alike": (
        lambda f, p: cosines(f.clamp(-9, 9), p),
        lambda f, p: torch.cat([f.clamp(-9, 9).cos()] * 2, -1),
    ),
    "rounded at the end": (cosines, lambda f, p: cosines(f, p).bfloat16()),
    "rounded, then looked up": (
        lambda f, p: f.cos().bfloat16()[p],
        lambda f, p: f.cos().bfloat16().index_select(0, p),
    ),
    "angles in bfloat16 on both sides": (
        lambda f, p: (f * 3).bfloat16().float().cos(),
        lambda f, p: (f * 3).bfloat16().view(-1, DR // 2).float().cos(),
    ),
    "int64 that holds every product": (
        lambda f, p: (p * 3 * 5).float().unsqueeze(1).cos(),
        lambda f, p: (p * 15).float().unsqueeze(1).cos(),
    ),
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
    "angles multiplied in bfloat16": (
        lambda f, p: (f.bfloat16() * 7.3).float().cos(),
        lambda f, p: (f.bfloat16().float() * 7.3).cos(),
    ),
    "another part rounded": (
        lambda f, p: (f.bfloat16().float() + f.exp()).cos(),
        lambda f, p: (f + f.exp().bfloat16().float()).cos(),
    ),
    "what rounding leaves, a thousand times": (
        lambda f, p: f,
        lambda f, p: f + 1000 * torch.stack([f, -f.bfloat16().float()], -1).sum(-1),
    ),
    "a quotient by its rounded self": (
        lambda f, p: f,
        lambda f, p: f * (f.bfloat16() / f) ** 16,
    ),
    "written to bfloat16": (
        lambda f, p: f,
        lambda f, p: f + 1000 * (f - torch.empty(f.shape, dtype=torch.bfloat16).copy_(f)),
    ),
    "a number that bfloat16 has not": (
        lambda f, p: f,
        lambda f, p: f + 1e4 * (torch.full((1,), 0.1, dtype=torch.bfloat16).float() - 0.1),
    ),
    "summed as integers": (
        lambda f, p: f + f.exp(),
        lambda f, p: f + torch.stack([f.exp(), 0 * f], -1).sum(-1, dtype=torch.int64),
    ),
    "powers in int32": (
        lambda f, p: (p**4).float().unsqueeze(1).cos(),
        lambda f, p: (p.to(torch.int32) ** 4).float().unsqueeze(1).cos(),
    ),
    "products that end in int32": (
        lambda f, p: (p * 100 * 100 * 100 * 15).float().unsqueeze(1).cos(),
        lambda f, p: (p.to(torch.int32) * 100 * 100 * 100 * 15).float().unsqueeze(1).cos(),
    ),
    "products that are cast to int32": (
        lambda f, p: (p * 15_000_000).float().unsqueeze(1).cos(),
        lambda f, p: (p * 15_000_000).to(torch.int32).float().unsqueeze(1).cos(),
    ),
    "sums that end in int32": (
        lambda f, p: (p + 2147483500).float().unsqueeze(1).cos(),
        lambda f, p: (p.to(torch.int32) + 2147483500).float().unsqueeze(1).cos(),
    ),
    "literals that end in int8": (
        lambda f, p: f * (torch.tensor([3] * (DR // 2)) * 64),
        lambda f, p: f * (torch.tensor([3] * (DR // 2), dtype=torch.int8) << 6),
    ),
    "a float among integers": (
        lambda f, p: f * 2.7,
        lambda f, p: f * torch.zeros(1, dtype=torch.int64).fill_(2.7),
    ),
    "a float for masked integers": (
        lambda f, p: f * 2.7,
        lambda f, p: f * p.masked_fill(torch.ones(TOKENS, dtype=torch.bool), 2.7).unsqueeze(1),
    ),
    "the least for the largest": (
        lambda f, p: f * torch.stack([f, f.exp()], -1).abs().amax(-1),
        lambda f, p: f * torch.stack([f, f.exp()], -1).abs().amin(-1),
    ),
    "bounded below for above": (
        lambda f, p: f + f.round().clamp_min(1e-9),
        lambda f, p: f + f.round().clamp_max(1e-9),
    ),
    "a complex quotient": (
        lambda f, p: f,
        lambda f, p: f * (torch.complex(f, f.exp()).conj() / torch.complex(f, f.exp())).real,
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
