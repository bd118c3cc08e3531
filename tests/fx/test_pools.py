"""A pool whose layers are inputs of their own: the graph computes what it did, and writes the same rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fusion.fx import pools
from mla_fusion.fx.kinds import op_name

LAYERS = 3
Step = Callable[[Tensor, Tensor], list[Tensor]]


def functional(fn: Step) -> GraphModule:
    made: GraphModule = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(pool(), rows())
    made.graph.eliminate_dead_code()
    return made


def pool() -> Tensor:
    return torch.arange(LAYERS * 4 * 2.0).view(LAYERS, 4, 2)


def rows() -> Tensor:
    return torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])


class Scribble:
    """Writes to layers of a pool and readings of them, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

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

    @staticmethod
    def layer(draw: random.Random, pool: Tensor) -> Tensor:
        number, kind = draw.randrange(LAYERS), draw.randrange(3)
        if kind == 0:
            return pool[number]
        return pool.unbind(0)[number] if kind == 1 else pool.view(LAYERS, 2, 4)[number].view(4, 2)


def run(gm: GraphModule) -> list[Tensor]:
    """What the graph gives out, and the pool afterwards."""
    whole = pool()
    inputs = gm.graph.find_nodes(op="placeholder")
    layers = [pools.layer_of(node) for node in inputs]
    given = [rows() if at == 1 else whole if of is None else whole[of[1]] for at, of in enumerate(layers)]
    return [*gm.forward(*given), whole]


@pytest.mark.parametrize("seed", range(40))
def test_taken_apart_it_computes_the_same(seed: int) -> None:
    gm = functional(Scribble(seed))
    wanted, is_written = run(gm), "aten::copy_" in map(op_name, gm.graph.nodes)
    assert bool(pools.found(gm.graph)) == is_written
    pools.take_apart(gm)
    gm.graph.lint()
    gm.recompile()
    assert not is_written or not gm.graph.find_nodes(op="placeholder")[0].users
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
    assert [pools.layer_of(node) for node in gm.graph.find_nodes(op="placeholder")] == [None, None, (0, 0), (0, 2)]
