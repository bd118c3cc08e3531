"""A pool whose layers are inputs of their own: the graph computes what it did, and writes the same
rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fusion.fx import empty_parts, pools
from mla_fusion.fx.kinds import op_name
from mla_fusion.fx.pool_parts import Part
from tests.fx.tracing import TOKENS, trace

LAYERS = 3
Step = Callable[[Tensor, Tensor], list[Tensor]]


def functional(fn: Step) -> GraphModule:
    made: GraphModule = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(pool(), rows())
    made.graph.eliminate_dead_code()
    return made


def pool(layers: int = LAYERS) -> Tensor:
    return torch.arange(layers * 4 * 2.0).view(layers, 4, 2)


def rows() -> Tensor:
    return torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])


SPELLINGS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda pool, number: pool[number],
    lambda pool, number: pool[number - LAYERS],
    lambda pool, number: pool.unbind(0)[number],
    lambda pool, number: pool.view(LAYERS, 2, 4)[number].view(4, 2),
    lambda pool, number: pool[number:][0],
    lambda pool, number: pool.split(1)[number].squeeze(0),
    lambda pool, number: pool.view(1, LAYERS, 4, 2)[0, number],
    lambda pool, number: pool.flatten(0, 1)[number * 4 : number * 4 + 4],
    lambda pool, number: pool.view(-1).narrow(0, (number - LAYERS) * 8, 8).view(4, 2),
    lambda pool, number: pool[-9 : number + 1][-1],
    lambda pool, number: pool.flatten(0, 1)[-99 : number * 4 + 4][-4:],
    lambda pool, number: pool[number:99][0],
)
RUNS = (
    *SPELLINGS,
    lambda pool, number: pool.flatten(0, 1)[number * 2 :][:4],
    lambda pool, number: pool[:2][number % 2],
)


FROM_THE_BEGINNING = SPELLINGS[0], SPELLINGS[4], SPELLINGS[7]
FROM_THE_END = (
    SPELLINGS[1],
    lambda pool, number: pool.flatten(0, 1)[(number - LAYERS) * 4 :][:4],
    lambda pool, number: pool.view(-1, 2).narrow(0, (number - LAYERS) * 4, 4),
)


class Scribble:
    """Writes to layers of a pool and readings of them, drawn from a seed."""

    def __init__(self, seed: int, spellings: Sequence[Callable[[Tensor, int], Tensor]]) -> None:
        self.seed, self.spellings = seed, spellings

    def __call__(self, pool: Tensor, rows: Tensor) -> list[Tensor]:
        draw, seen = random.Random(self.seed), []
        for _ in range(draw.randint(3, 8)):
            layer = self.layer(draw, pool)
            kind = draw.randrange(5)
            if kind == 0:
                seen.append(layer * 2)
            elif kind == 1:
                layer.view(-1, 2)[torch.tensor([draw.randrange(4), 0])] = rows + 1
            elif kind == 2:
                layer.add_(1)
            elif kind == 3:
                layer.view(-1, 2)[1:3] = rows * self.layer(draw, pool).mean()
            else:
                layer.copy_(self.layer(draw, pool))
        return [*seen, self.layer(draw, pool).sum()]

    def layer(self, draw: random.Random, pool: Tensor) -> Tensor:
        return draw.choice(self.spellings)(pool, draw.randrange(LAYERS))


def run(gm: GraphModule, count: int = LAYERS) -> list[Tensor]:
    """What the graph gives out, and the pool afterwards."""
    whole = pool(count)
    inputs = gm.graph.find_nodes(op="placeholder")
    layers = [pools.part_of(node) for node in inputs]
    given = [
        rows() if at == 1 else whole if of is None else of[1].of(whole)
        for at, of in enumerate(layers)
    ]
    return [*gm.forward(*given), whole]


@pytest.mark.parametrize("seed", range(40))
def test_taken_apart_it_computes_the_same(seed: int) -> None:
    gm = functional(Scribble(seed, SPELLINGS))
    wanted, is_written = run(gm), "aten::copy_" in map(op_name, gm.graph.nodes)
    assert bool(pools.found(gm.graph)) == is_written
    assert_same_apart(gm, wanted)
    assert not is_written or not gm.graph.find_nodes(op="placeholder")[0].users


@pytest.mark.parametrize("seed", range(40))
def test_runs_that_overlap_are_one_part(seed: int) -> None:
    gm = functional(Scribble(seed, RUNS))
    assert_same_apart(gm, run(gm))


@pytest.mark.parametrize(
    "spellings",
    [FROM_THE_BEGINNING, FROM_THE_END, (*FROM_THE_BEGINNING, RUNS[-2])],
    ids=["from the beginning", "from the end", "overlapping"],
)
@pytest.mark.parametrize("seed", range(10))
def test_of_a_symbolic_number_of_layers(
    seed: int, spellings: Sequence[Callable[[Tensor, int], Tensor]]
) -> None:
    gm = trace(Scribble(seed, spellings), pool(TOKENS), rows(), symbolic=True)
    empty_parts.drop(gm.graph)
    gm.recompile()
    wanted = [run(gm, count) for count in (4, 7, 9)]
    is_written = "aten::copy_" in map(op_name, gm.graph.nodes)
    assert bool(pools.found(gm.graph)) == is_written or len(spellings) > 3
    pools.take_apart(gm)
    gm.graph.lint()
    gm.recompile()
    for count, values in zip((4, 7, 9), wanted, strict=True):
        assert all(map(torch.equal, run(gm, count), values)), count


@pytest.mark.parametrize(
    "layer",
    [
        lambda pool, number: pool[number if number else -1],  # from both ends
        lambda pool, number: pool[-3:-1][number % 2] if number else pool[0],
    ],
)
def test_places_that_may_be_one_are_not_taken_apart(
    layer: Callable[[Tensor, int], Tensor],
) -> None:
    def fn(pool: Tensor, rows: Tensor) -> list[Tensor]:
        for number in range(2):
            layer(pool, number)[:2] = rows
        return [layer(pool, 0) + layer(pool, 1)]

    assert not pools.found(trace(fn, pool(TOKENS), rows(), symbolic=True).graph)


def assert_same_apart(gm: GraphModule, wanted: list[Tensor]) -> None:
    pools.take_apart(gm)
    gm.graph.lint()
    gm.recompile()
    assert all(map(torch.equal, run(gm), wanted))


def only_written(pool: Tensor, rows: Tensor) -> list[Tensor]:
    pool[0, :2] = rows
    return []


def read_as_a_whole(pool: Tensor, rows: Tensor) -> list[Tensor]:
    pool[0, :2] = rows
    return [pool.sum(0)]


def of_another_axis(pool: Tensor, rows: Tensor) -> list[Tensor]:
    pool[:, 0] = rows.sum()
    return [pool[0] + 1]


def by_a_tensor(pool: Tensor, rows: Tensor) -> list[Tensor]:
    pool[0, :2] = rows
    return [pool[torch.tensor([1])] + 1]


def a_layer_of_another(pool: Tensor, rows: Tensor) -> list[Tensor]:
    before = pool.clone()
    pool[0] += 1
    pool[1] = before[0]
    return [pool[0] + 1]


def never_written(pool: Tensor, rows: Tensor) -> list[Tensor]:
    return [pool[0] @ rows]


def test_only_layers_that_are_written() -> None:
    """Weights of layers in one tensor, say, are packed as they are."""
    assert pools.found(functional(only_written).graph)
    for fn in (read_as_a_whole, of_another_axis, by_a_tensor, a_layer_of_another, never_written):
        assert not pools.found(functional(fn).graph), fn


def test_layers_are_numbered_by_their_pool() -> None:
    gm = functional(lambda pool, rows: [*only_written(pool, rows), pool[2] + 1])
    pools.take_apart(gm)
    parts = [pools.part_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    # two rows are all that is taken of the first, and these are assigned: they are rows of it
    assert parts == [None, None, (0, Part(0)), (0, Part(2))]


def in_bits(pool: Tensor, rows: Tensor) -> list[Tensor]:
    """The first layer as integers half as long, so that entry 3 of those lies in the second
    layer.
    """
    pool[2] += rows.sum()
    halves = pool[:2].view(torch.int16).flatten()
    return [halves[3] + 1, pool[:1].view(torch.int16).view(2, -1)[1] + 1, pool[2] + 1]


def all_in_bits(pool: Tensor, rows: Tensor) -> list[Tensor]:
    pool[2] += rows.sum()
    return [pool.view(torch.int16).view(-1, 8)[1] + 1]


def test_another_dtype_counts_other_elements() -> None:
    gm = functional(in_bits)
    assert pools.found(gm.graph)
    assert_same_apart(gm, run(gm))
    assert not pools.found(functional(all_in_bits).graph)


NOTHING: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda pool: pool[5:7],
    lambda pool: pool[1:1],
    lambda pool: pool[:, 2:2],
    lambda pool: pool[2:][5:],
    lambda pool: pool[0][:0],
    lambda pool: pool[5:7].view(4, 0),
    lambda pool: pool.split([0, LAYERS])[0],
)


@pytest.mark.parametrize("nothing", NOTHING)
def test_an_empty_run_is_no_reader(nothing: Callable[[Tensor], Tensor]) -> None:
    def fn(pool: Tensor, rows: Tensor) -> list[Tensor]:
        nothing(pool).add_(1)
        pool[0, :2] = rows
        return [pool[0] + 1, nothing(pool) * 2]

    gm = functional(fn)
    assert pools.found(gm.graph)
    wanted = run(gm)
    assert wanted[1].numel() == 0
    assert_same_apart(gm, wanted)
    assert [tensor.shape for tensor in run(gm)] == [tensor.shape for tensor in wanted]
    assert not gm.graph.find_nodes(op="placeholder")[0].users


def test_detached_it_is_the_same_pool() -> None:
    """Torch may leave a detach in a graph, which is a view as any."""
    gm = functional(lambda pool, rows: [*only_written(pool.detach(), rows), pool.detach()[0] + 1])
    wanted = run(gm)
    assert "aten::detach" in map(op_name, gm.graph.nodes) and pools.found(gm.graph)
    assert_same_apart(gm, wanted)


def test_what_is_written_as_another_dtype_is_written() -> None:
    def fn(pool: Tensor, rows: Tensor) -> list[Tensor]:
        pool[0].view(torch.int16).add_(1)
        return [pool[1] @ rows]

    gm = make_fx(fn, tracing_mode="fake")(pool(), rows())
    assert pools.found(gm.graph)
    assert_same_apart(gm, run(gm))


def test_a_copy_is_told_from_a_part() -> None:
    gm = functional(lambda pool, rows: [pool.transpose(0, 1).flatten(0, 1) @ rows, pool[0] @ rows])
    part = next(node for node in gm.graph.nodes if op_name(node) == "aten::select")
    copy = next(node for node in gm.graph.nodes if op_name(node) == "aten::clone")
    assert "is a copy of" in pools.no_input(copy.next)
    assert "is a part of" in pools.no_input(part)
