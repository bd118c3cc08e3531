"""Can two tokens have one slot, where no two elements of an input are the same?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.distinct import repeats
from mla_fusion.fx.ranges import Ranges
from tests.fx.tracing import integers, outputs, view

T, ROWS = 5, 1 << 20
Make = Callable[..., Any]


def answer(make: Make, *inputs: Tensor) -> str:
    graph = view(make, *(inputs or (integers(T),)))
    return repeats(graph, outputs(graph), Ranges(graph, (0.0, ROWS - 1.0)))


APART: dict[str, Make] = {
    "the input": lambda s: s + 0,
    "plus a number": lambda s: s + 7,
    "less a number": lambda s: s - 7,
    "a number less it": lambda s: -s + 100,
    "times a number": lambda s: s * 3,
    "shifted up": lambda s: s << 4,
    "turned": lambda s: s.flip(0).roll(1),
    "inert clamp": lambda s: s.clamp(min=0),
    "put together": lambda s: (s // 16) * 16 + s % 16,
    "quotient and remainder": lambda s: (s // 16, s % 16),
    "shift and mask": lambda s: (s >> 4, s & 15),
    "wide cast": lambda s: s.int().long(),
    "literals": lambda s: torch.arange(T) * 2,
}
ALIKE: dict[str, Make] = {
    "quotient": lambda s: s // 2,
    "remainder": lambda s: s % 16,
    "shifted down": lambda s: s >> 1,
    "masked": lambda s: s & 15,
    "times nothing": lambda s: s * 0,
    "squared": lambda s: s * s,
    "clamped": lambda s: s.clamp(max=15),
    "size of a difference": lambda s: (s - 8).abs(),
    "sum with the quotient": lambda s: s + s // 2,
    "another remainder": lambda s: (s // 16) * 16 + s % 8,
    "another product": lambda s: (s // 16) * 8 + s % 16,
    "quotient and another remainder": lambda s: (s // 16, s % 8),
    "quotient of another and remainder": lambda s: (s // 8, s % 16),
    "one for all": lambda s: s[:1].expand(T),
    "repeated": lambda s: s[:1].repeat(T),
    "joined": lambda s: torch.cat([s[:3], s[:2]]),
    "through bfloat16": lambda s: s.bfloat16().long(),
    "through float16": lambda s: s.half().long(),
    "through float32": lambda s: (s * 64).float().long(),
    "through int8": lambda s: s.to(torch.int8).long(),
    "through a mask": lambda s: s.bool().long(),
    "literals that repeat": lambda s: torch.arange(T) // 2,
    "one literal": lambda s: torch.zeros(T, dtype=torch.int64),
    "spread by a bound": lambda s: torch.maximum(s, torch.zeros(2, 1, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    assert answer(APART[name]) == ""


@pytest.mark.parametrize("name", ALIKE)
def test_alike(name: str) -> None:
    assert "may give two tokens one" in answer(ALIKE[name])


TABLE, POSITIONS = integers(T, 8), integers(T)


def looked_up(t: Tensor, p: Tensor, size: int = 16) -> Tensor:
    return t.gather(1, (p // size).unsqueeze(1)).squeeze(1)


TABLES_APART: dict[str, Make] = {
    "block and place": lambda t, p: (looked_up(t, p), p % 16),
    "block times its size and place": lambda t, p: looked_up(t, p) * 16 + p % 16,
    "slots by their number": lambda t, p: t.flatten()[p],
    "block of each and places": lambda t, p: (t[:, 0][:, None], p[:3]),
    "sequences and places": lambda t, p: (torch.arange(2)[:, None], p),
}
TABLES_ALIKE: dict[str, Make] = {
    "less than a block": lambda t, p: looked_up(t, p) * 8 + p % 16,
    "place beyond a block": lambda t, p: looked_up(t, p) * 16 + p % 32,
    "the entry of twice the block": lambda t, p: looked_up(t, p, 32) * 16 + p % 16,
    "positions in pairs": lambda t, p: looked_up(t, p // 2) * 16 + (p // 2) % 16,
    "entry and place of other positions": lambda t, p: looked_up(t, p) * 16 + (p + 16) // 2 % 16,
    "block of twice the size and place": lambda t, p: (looked_up(t, p, 32), p % 16),
    "slots by a quotient": lambda t, p: t.flatten()[p // 16],
    "slots by a remainder": lambda t, p: t.flatten()[p % 16],
    "an entry for two": lambda t, p: t[torch.zeros(2, 1, dtype=torch.int64), p],
    "places that meet in a block": lambda t, p: t[:2, :1] * 16 + p % 16,
    "expanded block and place": lambda t, p: (t[0][p].expand(2, T), p.expand(2, T)),
    "place of a sequence": lambda t, p: (t[:, :1].expand(T, 2), p[:, None]),
    "half of a block's number": lambda t, p: (looked_up(t, p) // 2, p % 16),
}


@pytest.mark.parametrize("name", TABLES_APART)
def test_entries_of_a_table_are_apart(name: str) -> None:
    assert answer(TABLES_APART[name], TABLE, POSITIONS) == ""


@pytest.mark.parametrize("name", TABLES_ALIKE)
def test_entries_of_a_table_are_alike(name: str) -> None:
    assert answer(TABLES_ALIKE[name], TABLE, POSITIONS) != ""


def test_one_token_meets_no_other() -> None:
    assert answer(lambda s: s % 16, integers(1)) == ""
