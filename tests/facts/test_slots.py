"""Slots: which cannot be negative, whose word is taken for it, and which stay unproven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.slots import Trust, Unproven, judge
from tests.fx.tracing import POSITIONS, TOKENS, floats, integers, masks, outputs, view

T, ROWS = 5, 64
Make = Callable[..., Any]


def verdict(
    make: Make, *others: Tensor, dtype: torch.dtype = torch.int64
) -> tuple[list[str] | str, int]:
    """Of slots made of an input of integers and others: whom they trust, or why they are
    unproven.
    """
    graph = view(make, integers(T, dtype=dtype), *others)
    found = judge(graph, outputs(graph))
    return str(found) if isinstance(found, Unproven) else [node.name for node in found.inputs], len(
        graph.nodes
    )


TRUSTED: dict[str, Make] = {
    "the input": lambda s: s + 0,
    "reshaped": lambda s: s.view(-1, 1).flatten(),
    "narrowed": lambda s: s.int(),
    "plus something": lambda s: s + 3,
    "times something": lambda s: s * 2,
    "in another order": lambda s: s.flip(0),
    "block and place": lambda s: (s // 16, s % 16),
    "put together": lambda s: (s // 16) * 16 + s % 16,
    "floor that nothing passes": lambda s: s.clamp(min=0),
}
PROVEN: dict[str, Make] = {
    "literals": lambda s: torch.arange(T),
    "literals from 3": lambda s: torch.arange(3, 3 + T),
    "literals as they are": lambda s: torch.tensor([9, 3, 40, 1, 0]),
    "entries of literals": lambda s: torch.tensor([4, 9, 1, 12, 7, 30])[s],
}
UNPROVEN: dict[str, Make] = {
    "less something": lambda s: s - 1,
    "counted from the end": lambda s: ROWS - 1 - s,
    "the last for the rest": lambda s: s.clamp(max=ROWS - 1),
    "negated": lambda s: -s,
    "plus literals that may be negative": lambda s: s + torch.arange(-2, T - 2),
    "padded with -1": lambda s: torch.where(s > 10, s, -1),
    "masked with -1": lambda s: s.masked_fill(s > 10, -1),
    "literals": lambda s: torch.arange(T) - 1,
    "literals as they are": lambda s: torch.tensor([-1, -2, 3, 4, 5]),
    "literals times something": lambda s: torch.tensor([-1, -2, 3, 4, 5], dtype=torch.int32) * 2,
    "entries of literals": lambda s: torch.tensor([4, 9, -1, 12, 7, 30])[s],
    "the same for all": lambda s: torch.full((T,), 3),
    "remainder": lambda s: s % 16,
    "quotient": lambda s: s // 16,
    "ring buffer": lambda s: (s // 16) % 2 * 16 + s % 16,
    "clamped": lambda s: s.clamp(0, 15),
    "product of itself": lambda s: s * s,
    "halves": lambda s: torch.cat([s[:3], s[:2]]),
    "first for all": lambda s: s[:1].expand(T),
    "through bfloat16": lambda s: s.bfloat16().long(),
    "through float32": lambda s: s.float().long(),
    "sorted": lambda s: s.sort().values,
    "random": lambda s: torch.randint(0, ROWS, (T,)),
    "in int8, wrapped": lambda s: (s * 4).to(torch.int8),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_the_word_of_one_input(name: str) -> None:
    trusted, _ = verdict(TRUSTED[name])
    assert isinstance(trusted, list) and len(trusted) == 1


@pytest.mark.parametrize("name", PROVEN)
def test_nobody_is_trusted_with_what_is_known(name: str) -> None:
    assert verdict(PROVEN[name])[0] == []


@pytest.mark.parametrize("name", UNPROVEN)
def test_unproven(name: str) -> None:
    assert isinstance(verdict(UNPROVEN[name])[0], str)


def test_choices_and_sums_of_inputs_are_trusted_with_nothing() -> None:
    other, mask = integers(T), masks(T)
    for make in (
        lambda s, o: s + o,
        lambda s, o: torch.maximum(s, o),
        lambda s, o: torch.cat([s[:2], o[:3]]),
    ):
        assert isinstance(verdict(make, other)[0], str)
    assert isinstance(verdict(lambda s, o, m: torch.where(m, s, o), other, mask)[0], str)
    assert isinstance(verdict(lambda s, m: torch.where(m, s, -1), mask)[0], str)


def test_a_block_table_is_trusted_and_a_remainder_is_not_asked() -> None:
    table = integers(T, 4)

    def block_and_place(p: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return t.gather(1, (p // 16).unsqueeze(1)).squeeze(1), p % 16

    graph = view(block_and_place, integers(T), table)
    found = judge(graph, outputs(graph))
    assert isinstance(found, Trust)
    # the table; the place is known by itself
    assert [node.meta["val"].dim() for node in found.inputs] == [2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_block_table_and_blocks_of_symbolic_size(dtype: torch.dtype, is_apart: bool) -> None:
    def slots(p: Tensor, t: Tensor, cache: Tensor) -> Tensor:
        size, other = cache.shape
        entry = t.gather(1, (p // size).unsqueeze(1).long()).squeeze(1)
        return entry.long() * size + p % (size if is_apart else other)

    tables = integers(T, dtype=dtype), integers(T, 4, dtype=dtype), floats(TOKENS, POSITIONS)
    graph = view(slots, *tables, symbolic=True)
    found = judge(graph, outputs(graph))
    assert isinstance(found, Trust) == is_apart
    if isinstance(found, Trust):
        assert [node.meta["val"].dim() for node in found.inputs] == [2]


def test_one_token_cannot_meet_another() -> None:
    graph = view(lambda s: s % 16, integers(1))
    found = judge(graph, outputs(graph))
    assert isinstance(found, Trust) and found.inputs == ()
