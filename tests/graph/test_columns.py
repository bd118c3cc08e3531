"""Columns of a weight that views take are the columns that were asked for."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.graph.columns import groups_of
from tests.catalogue.base import Base, paged_args
from tests.harness import traced_graph


def pairs(first: int, half: int) -> list[int]:
    return [first + one for k in range(half) for one in (k, half + k)]


def taken(matrix: Tensor, columns: list[int]) -> Tensor | None:
    found = groups_of(tuple(columns), matrix.shape[1])
    if found is None:
        return None
    inside = matrix[:, found.start : found.start + found.number * found.stride]
    groups = inside.reshape(len(matrix), found.number, found.stride)
    parts = []
    for first, size, is_paired in found.runs:
        part = groups[..., first : first + size]
        halves = part.unflatten(-1, (2, -1)).mT.flatten(-2) if is_paired else part
        parts.append(halves)
    return torch.cat(parts, -1).flatten(1)


HEADS = [
    one for n in range(3) for one in (*range(192 * n, 192 * n + 128), *pairs(192 * n + 128, 32))
]


@pytest.mark.parametrize("columns, width", [(HEADS, 576), ([*range(512), *pairs(512, 32)], 2112)])
def test_columns_of_a_prologue_need_no_index(columns: list[int], width: int) -> None:
    matrix = torch.arange(2 * width).view(2, width)
    found = taken(matrix, columns)
    assert found is not None and torch.equal(found, matrix[:, columns])


def test_any_columns() -> None:
    draw, found = random.Random(0), list[bool]()
    for _ in range(3000):
        width = draw.randint(1, 14)
        columns = [draw.randrange(width) for _ in range(draw.randint(1, width))]
        matrix = torch.arange(2 * width).view(2, width)
        own = taken(matrix, columns)
        assert own is None or torch.equal(own, matrix[:, columns]), columns
        found.append(own is not None)
    assert 0 < sum(found) < len(found)


def test_a_graph_holds_no_list_of_columns() -> None:
    """A compiler for a device takes no tensor of numbers that lies on the host."""
    model: nn.Module = Base()
    gm = traced_graph(model, *paged_args())
    assert mf.fuse(gm).fused
    assert not [node for node in gm.graph.nodes if "constant" in str(node.target)]
