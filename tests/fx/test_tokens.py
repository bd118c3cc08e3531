"""The token axis: where it stands behind each step, and which steps break it.

What is claimed is held against the meaning: a step that keeps tokens apart gives the tokens'
results in another order where they are given in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.token_axis import Broken, Place, TokenAxis
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View

from .tracing import POSITIONS, SEQUENCES, TOKENS, floats, inputs, outputs, view

Step = Callable[..., Any]
WIDTH = 8


def states(graph: View) -> tuple[TokenAxis, list[Node]]:
    """The axis of the first input's tokens, followed through a graph of steps, and what the graph
    returns.
    """
    first, *others = inputs(graph)
    axis = TokenAxis(first.meta["val"].shape[0])
    axis.start(first, Place(0))
    for other in others:
        axis.start_outside(other)
    axis.follow(graph.nodes)
    return axis, outputs(graph)


def state(step: Step, *others: Tensor) -> Any:
    """Of a step on rows ``v`` [T, WIDTH], with T symbolic; tensors with rows of their own come
    after it.
    """
    axis, (result,) = states(view(step, floats(TOKENS, WIDTH), *others, symbolic=True))
    return axis.state(result)


def rows(v: Tensor) -> int:
    return v.shape[0]


# name: the step, and where the tokens stand behind it (the axis, the elements that change faster)
KEPT: dict[str, tuple[Step, Place]] = {
    "element-wise": (lambda v: v * 2 + v.cos(), Place(0)),
    "cast": (lambda v: v.double(), Place(0)),
    "transpose": (lambda v: v.t(), Place(1)),
    "swap twice": (lambda v: v.t().transpose(0, 1), Place(0)),
    "heads": (lambda v: v.view(rows(v), 2, 4), Place(0)),
    "windows of columns": (lambda v: v.unfold(1, 4, 2), Place(0)),
    "heads first": (lambda v: v.view(rows(v), 2, 4).permute(1, 0, 2), Place(1)),
    "heads merged into tokens": (
        lambda v: v.view(rows(v), 2, 4).reshape(rows(v) * 2, 4),
        Place(0, 2),
    ),
    "and taken out again": (lambda v: v.reshape(rows(v) * 2, 4).view(rows(v), WIDTH), Place(0)),
    "heads merged in front of tokens": (
        lambda v: v.view(-1, 2, 4).transpose(0, 1).reshape(2 * rows(v), 4),
        Place(0),
    ),
    "flat": (lambda v: v.reshape(-1), Place(0, WIDTH)),
    "unsqueezed": (lambda v: v[None, :, None], Place(1)),
    "squeezed": (lambda v: v[None].squeeze(0), Place(0)),
    "expanded in front": (lambda v: v.expand(3, -1, -1), Place(1)),
    "expanded behind": (lambda v: v.unsqueeze(1).expand(-1, 3, -1), Place(0)),
    "some columns": (lambda v: v[:, 2:6], Place(0)),
    "one column": (lambda v: v[:, 3], Place(0)),
    "one of the leading": (lambda v: v.expand(3, -1, -1)[1], Place(0)),
    "split columns": (lambda v: v.split([3, 5], -1)[1], Place(0)),
    "unbound columns": (lambda v: v.unbind(1)[2], Place(0)),
    "all tokens": (lambda v: v[:], Place(0)),
    "all tokens by their number": (lambda v: v[: rows(v)], Place(0)),
    "columns flipped and rolled": (lambda v: v.flip(1).roll(1, 1), Place(0)),
    "running sum of columns": (lambda v: v.cumsum(1), Place(0)),
    "softmax of columns": (lambda v: v.softmax(-1), Place(0)),
    "mean of columns": (lambda v: v.mean(-1), Place(0)),
    "mean of columns, kept": (lambda v: v * v.square().mean(-1, keepdim=True), Place(0)),
    "mean of heads": (lambda v: v.view(-1, 2, 4).permute(1, 0, 2).sum(0), Place(0)),
    "norm": (lambda v: F.layer_norm(v, (WIDTH,)), Place(0)),
    "joined columns": (lambda v: torch.cat([v, v.neg()], -1), Place(0)),
    "joined with nothing": (lambda v: torch.cat([v.new_zeros(0, WIDTH), v]), Place(0)),
    "stacked in front": (lambda v: torch.stack([v, v]), Place(1)),
    "stacked behind": (lambda v: torch.stack([v, v], -1).flatten(1), Place(0)),
    "repeated columns": (lambda v: v.repeat(1, 2), Place(0)),
    "repeated in front": (lambda v: v.repeat(2, 1, 1), Place(1)),
    "each token twice": (lambda v: v.repeat_interleave(2, 0), Place(0, 2)),
    "padded columns": (lambda v: F.pad(v, (1, 2)), Place(0)),
    "pairs": (
        lambda v: torch.view_as_real(torch.view_as_complex(v.view(-1, 4, 2)) * 1j).flatten(1),
        Place(0),
    ),
    "columns by literals": (lambda v: v[:, torch.arange(3)], Place(0)),
    "written columns": (lambda v: torch.slice_scatter(v, v[:, :4] * 2, 1, 0, 4), Place(0)),
    "ones for each token": (lambda v: v + torch.ones(rows(v), WIDTH), Place(0)),
    "a row for all": (lambda v: v * torch.arange(WIDTH), Place(0)),
    "a row, spread": (lambda v: v * torch.arange(WIDTH).expand(rows(v), WIDTH), Place(0)),
    "times a matrix": (lambda v: v @ torch.ones(WIDTH, 3), Place(0)),
    "a matrix times it": (lambda v: torch.ones(3, WIDTH) @ v.t(), Place(1)),
    "each head by a matrix": (
        lambda v: torch.bmm(v.view(-1, 2, 4).transpose(0, 1), torch.ones(2, 4, 3)),
        Place(1),
    ),
    "einsum": (
        lambda v: torch.einsum("tnd,ndc->tnc", v.view(-1, 2, 4), torch.ones(2, 4, 3)),
        Place(0),
    ),
    "each token's own matrix": (lambda v: torch.bmm(v.view(-1, 2, 4), v.view(-1, 4, 2)), Place(0)),
    "each by itself": (lambda v: (v @ v.t()).diagonal(), Place(0)),
    "each by itself, turned and scaled": (
        lambda v: (1e-6 + (v @ v.t() / WIDTH).T).rsqrt().diagonal(0, 1, 0),
        Place(0),
    ),
    "each by another of its own": (lambda v: (v @ v.cos().t()).diagonal()[:, None], Place(0)),
    "each head by itself": (
        lambda v: torch.einsum("tnd,snd->nst", *[v.view(-1, 2, 4)] * 2).diagonal(0, 1, 2),
        Place(1),
    ),
    "each by itself, heads merged into tokens": (
        lambda v: (v.view(-1, 4) @ v.view(-1, 4).t()).diagonal(),
        Place(0, 2),
    ),
    "heads by themselves": (
        lambda v: (v.view(-1, 2, 4) @ v.view(-1, 4, 2)).diagonal(0, 1, 2),
        Place(0),
    ),
    "a diagonal of columns, heads first": (
        lambda v: v.view(-1, 2, 4).permute(1, 0, 2).diagonal(0, 0, 2),
        Place(0),
    ),
}

BROKEN: dict[str, Step] = {
    "joined": lambda v: torch.cat([v, v]),
    "halves": lambda v: torch.cat([v[:3], v[3:] / 2]),
    "a row in front": lambda v: torch.cat([v.new_zeros(1, WIDTH), v]),
    "flipped": lambda v: v.flip(0),
    "rolled": lambda v: v.roll(1, 0),
    "rolled flat": lambda v: v.roll(1),
    "running sum": lambda v: v.cumsum(0),
    "mean": lambda v: v - v.mean(0, keepdim=True),
    "mean of all": lambda v: v - v.mean(),
    "softmax": lambda v: v.softmax(0),
    "norm of all": lambda v: v / torch.linalg.vector_norm(v),
    "slice": lambda v: v[:3],
    "slice from the end": lambda v: v[-3:],
    "slice with symbolic end": lambda v: v[: rows(v) // 2],
    "all but the first": lambda v: v[1:],
    "every second": lambda v: v[::2],
    "one token": lambda v: v * v[0],
    "one of the unbound": lambda v: v * v.select(0, -1),
    "token number": lambda v: v * torch.arange(rows(v)).unsqueeze(-1),
    "some by their number": lambda v: torch.where(
        (torch.arange(rows(v)) < 4).unsqueeze(-1), v, 0.0
    ),
    "repeated": lambda v: v.repeat(2, 1),
    "padded": lambda v: F.pad(v, (0, 0, 1, 1)),
    "shifted by padding": lambda v: F.pad(v, (0, 0, 1, -1)),
    "by an index": lambda v: v.index_select(0, torch.arange(rows(v) - 1, -1, -1)),
    "sums over tokens": lambda v: v.t() @ v,
    "products of tokens": lambda v: v @ v.t(),
    "products with the next": lambda v: (v @ v.t()).diagonal(1),
    "products with all, summed": lambda v: (v @ v.t()).sum(-1),
    "products with all, masked": lambda v: ((v @ v.t()) * torch.eye(rows(v))).sum(-1),
    "products with all, each as many": lambda v: ((v @ v.t()) * v[:, :1]).diagonal(),
    "products with others": lambda v: (v @ v.flip(0).t()).diagonal(),
    "products, flipped": lambda v: (v @ v.t()).flip(0).diagonal(),
    "products, shifted": lambda v: (v @ v.t()).roll(1).diagonal(),
    "products, both ways": lambda v: (v @ v.t() - (v @ v.t()).t() * 2).diagonal(),
    "products of heads with tokens": lambda v: (v.view(-1, 4) @ v[:, :4].t()).diagonal(),
    "products by number": lambda v: (v @ v.t() * torch.arange(rows(v))).diagonal(),
    "products, of sums": lambda v: (v @ v.t() @ (v @ v.t())).diagonal(),
    "products onto others": lambda v: torch.addmm(v[:, :1], v, v.t()).diagonal(),
    "products, flat": lambda v: (v @ v.t()).reshape(-1)[:: WIDTH + 1],
    "a diagonal of tokens and columns": lambda v: v.diagonal(),
    "tokens meet tokens": lambda v: v[:, :1] + v[:, :1].t(),
    "reinterpreted": lambda v: v.reshape(WIDTH, rows(v)),
    "turned and reinterpreted": lambda v: v.t().reshape(rows(v), WIDTH),
    "sorted": lambda v: v.sort(0).values,
    "first token overwritten": lambda v: torch.select_scatter(v, v[0] * 2, 0, 0),
    "windows": lambda v: v.unfold(0, 2, 1),
    "windows of one": lambda v: v.unfold(0, 1, 2),
    "lower triangle": lambda v: v.tril(),
}


@pytest.mark.parametrize("name", KEPT)
def test_tokens_are_kept_apart(name: str) -> None:
    step, wanted = KEPT[name]
    assert state(step) == wanted


@pytest.mark.parametrize("name", BROKEN)
def test_tokens_are_mixed(name: str) -> None:
    assert isinstance(state(BROKEN[name]), Broken)


def reordered(value: Tensor, place: Place, order: Tensor) -> Tensor:
    apart = value.unflatten(place.axis, (-1, len(order), place.inner))
    return apart.index_select(place.axis + 1, order).reshape(value.shape)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_apart_can_be_reordered(name: str) -> None:
    step, place = KEPT[name]
    v = torch.randn(TOKENS, WIDTH, dtype=torch.float32)
    order = torch.randperm(TOKENS)
    torch.testing.assert_close(step(v[order]), reordered(step(v), place, order))


def test_the_step_that_mixes_is_named() -> None:
    found = state(lambda v: (v * 2).flip(0).cos() + 1)
    assert (
        isinstance(found, Broken)
        and found.node.name == "flip"
        and "along the tokens" in found.reason
    )


# -- other tensors, other axes


def test_tables_of_as_many_rows_meet_the_tokens() -> None:
    assert state(lambda v, table: v * table, floats(TOKENS, WIDTH)) == Place(0)
    assert state(lambda v, row: v * row, floats(1, WIDTH)) == Place(0)
    assert isinstance(state(lambda v, table: v * table.flip(0), floats(TOKENS, WIDTH)), Broken)


@pytest.mark.parametrize("merged", [False, True])
def test_sequences_and_positions(merged: bool) -> None:
    def merge(v: Tensor) -> Tensor:
        return v.view(v.shape[0] * v.shape[1], WIDTH) * 2

    def split(v: Tensor) -> Tensor:
        return merge(v).view(v.shape[0], v.shape[1], 2, 4).transpose(1, 2)

    graph = view(merge if merged else split, floats(SEQUENCES, POSITIONS, WIDTH), symbolic=True)
    v, (result,) = inputs(graph)[0], outputs(graph)
    lead = v.meta["val"].shape[:2]
    tokens = Tokens(None)
    tokens.start(v, lead, (0, 1))
    tokens.follow(graph.nodes)
    assert tokens.broken(result) is None and tokens.knows(result)
    places = [axis.state(result) for axis in tokens._axes.values()]
    positions = lead[1].node.expr
    assert places == ([Place(0, positions), Place(0)] if merged else [Place(0), Place(2)])


@pytest.mark.parametrize(
    "step",
    [
        # positions read as sequences
        lambda v: v.transpose(0, 1).reshape(v.shape[0], v.shape[1], WIDTH),
        lambda v: v.view(v.shape[1], v.shape[0], WIDTH),
        lambda v: v.cumsum(1),
        lambda v: v[:, -1:] * v,
        lambda v: v - v.mean(0, keepdim=True),
        lambda v: v.view(-1, WIDTH).roll(1, 0),
    ],
)
def test_sequences_and_positions_that_are_mixed(step: Step) -> None:
    graph = view(step, floats(SEQUENCES, POSITIONS, WIDTH), symbolic=True)
    v, (result,) = inputs(graph)[0], outputs(graph)
    tokens = Tokens(None)
    tokens.start(v, v.meta["val"].shape[:2], (0, 1))
    tokens.follow(graph.nodes)
    assert tokens.broken(result) is not None


# batch and length are one symbol: the step on [S, S, WIDTH], is it mixed?
SQUARE: dict[str, tuple[Step, bool]] = {
    "a table of positions": (lambda v, a, b: v * a, False),
    "a table of tokens": (lambda v, a, b: v * b, False),
    "heads, merged": (lambda v, a, b: v.view(*v.shape[:2], 2, 4).flatten(0, 1) * 2, False),
    "the other axis first": (lambda v, a, b: v.transpose(0, 1) * b.transpose(0, 1), False),
    "turned": (lambda v, a, b: v + v.transpose(0, 1), True),
    "a table of tokens, turned": (lambda v, a, b: v * b.transpose(0, 1), True),
    "a table, merged in the other order": (
        lambda v, a, b: v.flatten(0, 1) + (v * b).transpose(0, 1).flatten(0, 1),
        True,
    ),
    "a table of sequences": (lambda v, a, b: v * a.unsqueeze(1), True),
    "positions summed": (lambda v, a, b: v - v.mean(1, keepdim=True), True),
    "sequences summed": (lambda v, a, b: v - v.mean(0, keepdim=True), True),
    "positions by themselves": (lambda v, a, b: (v @ v.mT).diagonal(0, 1, 2), False),
    "tokens by themselves": (
        lambda v, a, b: (v.flatten(0, 1) @ v.flatten(0, 1).T).diagonal(),
        False,
    ),
    "positions by sequences": (lambda v, a, b: (v @ v.mT).diagonal(0, 0, 1), True),
    "tokens by tokens, turned": (
        lambda v, a, b: (v.flatten(0, 1) @ v.transpose(0, 1).flatten(0, 1).T).diagonal(),
        True,
    ),
    "positions by those of the table": (lambda v, a, b: (v @ a.T).diagonal(0, 1, 2), False),
    "sequences by those of the table": (lambda v, a, b: (v @ a.T).diagonal(0, 0, 2), True),
}


@pytest.mark.parametrize("name", SQUARE)
def test_batch_and_length_of_one_symbol(name: str) -> None:
    step, is_mixed = SQUARE[name]
    given = floats(TOKENS, TOKENS, WIDTH), floats(TOKENS, WIDTH), floats(TOKENS, TOKENS, WIDTH)
    graph = view(step, *given, symbolic=True)
    (v, *others), (result,) = inputs(graph), outputs(graph)
    tokens = Tokens(None)
    tokens.start(v, v.meta["val"].shape[:2], (0, 1))
    tokens.start_outside(others)
    tokens.follow(graph.nodes)
    assert (tokens.broken(result) is not None) == is_mixed
    assert is_mixed or tokens.knows(result)


def test_where_every_token_is_probed_nothing_needs_a_proof() -> None:
    graph = view(lambda v: v.flip(0), floats(TOKENS, WIDTH))
    tokens = Tokens(None)
    tokens.start(inputs(graph)[0], (TOKENS,), (0,))
    assert not tokens and tokens.broken(outputs(graph)[0]) is None


def test_of_several_kinds_those_of_the_products_asked_for() -> None:
    graph = view(
        lambda v, w: (v * 2, w * 2), floats(TOKENS, WIDTH), floats(SEQUENCES, WIDTH), symbolic=True
    )
    v, w = inputs(graph)
    tokens = Tokens(None)
    for product in (v, w):
        tokens.start(product, product.meta["val"].shape[:1], (0,))
    tokens.follow(graph.nodes)
    of_v, of_w = outputs(graph)
    assert not tokens.knows(of_v) and not tokens.knows(of_w)
    assert tokens.among([v]).knows(of_v) and not tokens.among([v]).knows(of_w)
    assert not tokens.among([v, w]).knows(of_v)


def test_a_product_shrunk_along_an_axis_that_nothing_follows_needs_every_proof() -> None:
    graph = view(lambda v, w: (v * 2, w.roll(1, 0)), floats(64, WIDTH), floats(128, WIDTH))
    v, w = inputs(graph)
    tokens = Tokens(Shrink(64))
    tokens.start(v, (64,), (0,))
    tokens.start(w, (128,), (0,))  # two times as many: probed with ten
    tokens.follow(graph.nodes)
    assert tokens.among([v]).knows(outputs(graph)[0])
    assert not tokens.among([w]).knows(outputs(graph)[1])
