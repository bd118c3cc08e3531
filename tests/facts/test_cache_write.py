"""Cache writes: whole rows into a graph input by slots, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_fusion.facts import cache_write
from mla_fusion.facts.cache_write import WriteFact, paged_shape, readers
from mla_fusion.facts.obstacle import Obstacles
from mla_fusion.fx.kinds import is_writer
from mla_fusion.fx.sizes import same
from tests.fx.tracing import POSITIONS, TOKENS, floats, inputs, integers, view

T, BLOCKS, SIZE, WIDTH = 5, 4, 16, 8
ROWS = BLOCKS * SIZE
PAGED = floats(BLOCKS, SIZE, 1, WIDTH)
Write = Callable[..., Any]  # of a cache, rows and slots


def found(
    write: Write, cache: Tensor = PAGED, slots: Tensor | None = None, *others: Tensor
) -> WriteFact | Obstacles:
    graph = view(write, cache, floats(T, WIDTH), integers(T) if slots is None else slots, *others)
    writer, *_ = [node for node in graph.nodes if is_writer(node)]
    return cache_write.find(graph, writer, inputs(graph)[1])


def flat(cache: Tensor) -> Tensor:
    return cache.view(ROWS, WIDTH)


def put(cache: Tensor, rows: Tensor, *indices: Tensor) -> Tensor:
    return torch.index_put(cache, indices, rows)


BY_SLOT: dict[str, Write] = {
    "index_put of rows": lambda c, v, s: put(flat(c), v, s),
    "index_copy": lambda c, v, s: flat(c).index_copy(0, s, v),
    "scatter": lambda c, v, s: flat(c).scatter(0, s.unsqueeze(1).expand(T, WIDTH), v),
    "block and place": lambda c, v, s: put(c.view(BLOCKS, SIZE, WIDTH), v, s // SIZE, s % SIZE),
    "shift and mask": lambda c, v, s: put(c.view(BLOCKS, SIZE, WIDTH), v, s >> 4, s & 15),
    "block and place of a view": lambda c, v, s: put(c.view(-1, 8, WIDTH), v, s // 8, s % 8),
    "put together again": lambda c, v, s: put(flat(c), v, (s // SIZE) * SIZE + s % SIZE),
}


@pytest.mark.parametrize("name", BY_SLOT)
def test_rows_by_slot(name: str) -> None:
    fact = found(BY_SLOT[name])
    assert isinstance(fact, WriteFact)
    assert fact.cache.op == fact.value.op == "placeholder" and fact.slots.index is not None
    assert fact.result is fact.node and len(fact.trusted) == 1


def test_places_of_another_size_are_no_slots_of_this_one() -> None:
    fact = found(lambda c, v, s: put(c.view(BLOCKS, SIZE, WIDTH), v, s // 8, s % 8))
    # block * 16 + place, which is not s
    assert isinstance(fact, WriteFact) and fact.slots.index is None
    assert fact.slots.block_size == SIZE
    other = found(lambda c, v, s: put(c.view(-1, 8, WIDTH), v, s // 4, s % 4))
    assert isinstance(other, WriteFact) and other.slots.block_size == 8


def test_block_and_place_of_two_inputs() -> None:
    write = lambda c, v, b, p: put(c.view(BLOCKS, SIZE, WIDTH), v, b, p % SIZE)  # noqa: E731
    fact = found(write, PAGED, integers(T), integers(T))
    assert isinstance(fact, WriteFact)
    assert (
        fact.slots.index is None and fact.slots.block is not None and fact.slots.offset is not None
    )


MISSES: dict[str, Write] = {
    "accumulated": lambda c, v, s: torch.index_put(flat(c), [s], v, True),
    "columns": lambda c, v, s: flat(c).t().contiguous().index_copy(1, s, v.t()),
    "part of a row": lambda c, v, s: c.view(-1, WIDTH // 2).slice_scatter(
        v[:, : WIDTH // 2], 0, 0, T
    ),
    "every second row": lambda c, v, s: flat(c).slice_scatter(v, 0, 0, 2 * T, 2),
    "a slice of a computed cache": lambda c, v, s: flat(c * 2).slice_scatter(v, 0, 0, T),
    "a cache that is computed": lambda c, v, s: put(flat(c * 2), v, s),
    "a part of a cache": lambda c, v, s: put(flat(c)[:32], v, s),
    "negative slots": lambda c, v, s: put(flat(c), v, s - 1),
    "padded slots": lambda c, v, s: put(flat(c), v, torch.where(s > 9, s, -1)),
    "slots that repeat": lambda c, v, s: put(flat(c), v, s // 2),
    "ring buffer": lambda c, v, s: put(
        c.view(BLOCKS, SIZE, WIDTH), v, (s // SIZE) % BLOCKS, s % SIZE
    ),
    "blocks of half rows": lambda c, v, s: put(
        c.view(-1, 2, WIDTH // 2), v[:, : WIDTH // 2], s // 2, s % 2
    ),
    "blocks alone": lambda c, v, s: put(c.view(BLOCKS, SIZE, WIDTH), v.unsqueeze(1), s),
    "by a mask": lambda c, v, s: put(flat(c), v[0], torch.arange(ROWS) < s[0]),
    "scatter by columns": lambda c, v, s: flat(c).scatter(
        1, s.unsqueeze(1).expand(T, WIDTH) % WIDTH, v
    ),
    "added": lambda c, v, s: flat(c).index_add(0, s, v),
    "masked": lambda c, v, s: flat(c).masked_scatter(flat(c) > 0, v),
}


@pytest.mark.parametrize("name", MISSES)
def test_miss(name: str) -> None:
    assert isinstance(found(MISSES[name]), tuple)


@pytest.mark.parametrize(
    "shape, blocks",
    [
        ((TOKENS, 16, 1, 8), (1, 16)),
        ((TOKENS, 16, 8), (1, 16)),
        ((TOKENS, 1, 16, 8), (1, 16)),
        ((TOKENS, 2048, 8), (16, 128)),
        ((TOKENS, 1, 96, 8), (3, 32)),
        ((TOKENS, 24, 8), None),
        ((TOKENS, POSITIONS, 8), None),
        ((TOKENS, 8), None),
    ],
)
def test_rows_in_a_symbolic_number_of_blocks(
    shape: tuple[int, ...], blocks: tuple[int, int] | None
) -> None:
    (cache,) = inputs(view(lambda c: c + 1, floats(*shape), symbolic=True))
    paged, count = paged_shape(cache), cache.meta["val"].shape[0]
    if blocks is None:
        assert paged is None
    else:
        times, size = blocks
        assert paged is not None and same(paged[0], count * times) and paged[1:] == (size, 1, 8)


@pytest.mark.parametrize(
    "shape, paged",
    [
        ((4, 16, 1, 8), (4, 16, 1, 8)),
        ((4, 16, 8), (4, 16, 1, 8)),
        ((64, 8), (1, 64, 1, 8)),
        ((256, 8), (2, 128, 1, 8)),
        ((4, 24, 8), (3, 32, 1, 8)),
        ((48, 8), (3, 16, 1, 8)),
        ((50, 8), None),
        ((4, 16, 2, 8), (1, 128, 1, 8)),
        ((8,), None),
    ],
)
def test_rows_in_blocks(shape: tuple[int, ...], paged: tuple[int, ...] | None) -> None:
    graph = view(lambda c: c + 1, floats(*shape))
    assert paged_shape(inputs(graph)[0]) == paged


def test_readers_of_the_cache_as_it_was() -> None:
    def fn(c: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return put(flat(c), v, s), flat(c).sum(), c.shape[0] * v

    graph = view(fn, PAGED, floats(T, WIDTH), integers(T))
    writer, *_ = [node for node in graph.nodes if is_writer(node)]
    assert [node.name for node in readers(inputs(graph)[0], writer)] == ["sum_1"]
