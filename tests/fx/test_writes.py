"""Values assembled in place are joined from their parts: the graph computes what it did, and gives
out own memory.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fusion.fx import subgraphs, writes
from mla_fusion.fx.walk import peel
from tests.harness import flat


class Scribble:
    """A sequence of views, writes and readings of one value, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor]:
        draw, seen = random.Random(self.seed), []
        row = x * 2 if draw.random() < 0.5 else torch.zeros_like(x)
        for _ in range(draw.randint(2, 6)):
            part = self._part(draw, self._form(draw, row))
            kind = draw.randrange(4)
            if kind == 0:
                seen.append(part * 3)
            elif kind == 1:
                part.copy_(part.flip(-1) + 1)
            elif kind == 2:
                part.mul_(part.abs().sum())
            else:
                part.copy_(y.reshape(-1)[: part.numel()].reshape(part.shape))
        return [*seen, self._part(draw, self._form(draw, row)) + 0, row]

    @staticmethod
    def _form(draw: random.Random, row: Tensor) -> Tensor:
        forms = (
            lambda t: t,
            lambda t: t.unsqueeze(1),
            lambda t: t.view(t.shape[0], 2, -1),
            lambda t: t.view(t.shape[0], 2, -1).transpose(0, 1),
            lambda t: t.t(),
            lambda t: t.view(-1),
            lambda t: t.view(2, -1, t.shape[1]),
        )
        return draw.choice(forms)(row)

    @staticmethod
    def _part(draw: random.Random, value: Tensor) -> Tensor:
        axis = draw.randrange(value.dim())
        size = value.shape[axis]
        kind = draw.randrange(5)
        if kind == 0:
            return value.select(axis, draw.randrange(size))
        if kind == 1 and size > 1:
            return value.split([size // 2, size - size // 2], axis)[draw.randrange(2)]
        if kind == 2:
            return value[(slice(None),) * axis + (slice(draw.randrange(size), None, 2),)]
        start = draw.randrange(size)
        return value.narrow(axis, start - draw.choice((0, size)), draw.randint(1, size - start))


def graph_of(model: Any, args: tuple[Tensor, ...]) -> GraphModule:
    with torch.no_grad():
        return make_fx(torch.func.functionalize(model), tracing_mode="fake")(*args)


def scattered(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if "scatter" in str(node.target)]


@pytest.mark.parametrize("seed", range(12))
def test_the_same_values_in_memory_of_their_own(seed: int) -> None:
    args = torch.randn(4, 6), torch.randn(4, 6)
    gm = graph_of(Scribble(seed), args)
    wanted = flat(gm(*args))
    gm.graph = subgraphs.copied(gm)
    writes.take_apart(gm)
    gm.graph.lint()
    gm.recompile()
    got = flat(gm(*args))
    for want, value in zip(wanted, got, strict=True):
        torch.testing.assert_close(want, value)  # a sum may run over other strides
    memory = [value.untyped_storage().data_ptr() for value in (*got, *args)]
    before = [value.untyped_storage().data_ptr() for value in (*wanted, *args)]
    assert len(set(memory)) >= len(set(before))


def overwritten(x: Tensor, y: Tensor) -> Tensor:
    row = x * 2
    row.unsqueeze(1)[..., :4] = row[:, None, :4].abs()
    row[:, 4:] = y[:, 4:] + 1
    return row


def joined_and_overwritten(x: Tensor, y: Tensor) -> Tensor:
    row = torch.cat([x * 2, y + 1], -1)
    row[:, 6:] = row[:, 6:].abs()
    return row * 3


def test_a_join_that_is_written_into_is_its_parts() -> None:
    args = torch.randn(4, 6), torch.randn(4, 6)
    gm = graph_of(joined_and_overwritten, args)
    wanted = gm(*args)
    gm.graph = subgraphs.copied(gm)
    writes.take_apart(gm)
    gm.recompile()
    assert torch.equal(gm(*args), wanted) and not scattered(gm)
    (joined,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.cat.default)
    assert [part.target for part in joined.args[0]] == [
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.abs.default,
    ]
    (rotated,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.abs.default)
    assert rotated.args[0].target is torch.ops.aten.add.Tensor


def given_out(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total, copied = x + y, torch.empty_like(x)
    copied.copy_(total)
    return total, copied


def test_what_was_overwritten_is_gone() -> None:
    args = torch.randn(4, 6), torch.randn(4, 6)
    gm = graph_of(overwritten, args)
    assert scattered(gm)
    gm.graph = subgraphs.copied(gm)
    writes.take_apart(gm)
    assert not scattered(gm)
    (joined,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.cat.default)
    assert [peel(part).target for part in joined.args[0]] == [
        torch.ops.aten.abs.default,
        torch.ops.aten.add.Tensor,
    ]


def test_a_copy_that_is_given_out_stays_a_copy() -> None:
    args = torch.randn(4, 6), torch.randn(4, 6)
    gm = graph_of(given_out, args)
    gm.graph = subgraphs.copied(gm)
    writes.take_apart(gm)
    gm.recompile()
    total, copied = gm(*args)
    assert torch.equal(total, copied) and total.data_ptr() != copied.data_ptr()


def test_writes_into_inputs_are_left_alone() -> None:
    def cached(cache: Tensor, row: Tensor) -> Tensor:
        cache[2:4] = row
        return cache.sum()

    assert not writes.found(graph_of(cached, (torch.zeros(8, 6), torch.ones(2, 6))).graph)


def joined_and_cut(x: Tensor, y: Tensor) -> Tensor:
    row = torch.cat([x * 2, y + 1], -1).unsqueeze(1) * y[:, :1, None]
    first, second = row.split([6, 6], -1)
    return first.abs() + second


def test_a_part_of_a_join_is_what_was_joined() -> None:
    args = torch.randn(4, 6), torch.randn(4, 6)
    gm = graph_of(joined_and_cut, args)
    wanted = gm(*args)
    gm.graph = subgraphs.copied(gm)
    writes.take_apart(gm)
    gm.recompile()
    assert torch.equal(gm(*args), wanted)
    assert not any(node.target is torch.ops.aten.cat.default for node in gm.graph.nodes)


def changed_afterwards(x: Tensor, y: Tensor) -> Tensor:
    part = x * 2
    row = torch.cat([part, y + 1], -1)
    part.add_(1)
    return row[:, :6] * part


def of_an_input(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], -1)[:, :6] * 2


@pytest.mark.parametrize("fn", [changed_afterwards, of_an_input])
def test_a_join_of_what_may_change_is_left(fn: Any) -> None:
    """Never made functional: what was joined is not what it was when somebody takes a part."""
    with torch.no_grad():
        gm = make_fx(fn, tracing_mode="fake")(torch.randn(4, 6), torch.randn(4, 6))
    assert not writes.found(gm.graph)
