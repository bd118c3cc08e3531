"""Rows of a per-tile quantised cache: int8 tiles, the key's bytes and a scale a tile, however they
are made.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mla_fusion.meta.spec import TILE_SIZE
from torch import Tensor

from mla_fusion.facts.packed_rows import Rows, find
from tests.fx.tracing import floats, inputs, view

T, HCKV, DR = 5, 2 * TILE_SIZE, 64
Pack = Callable[[Tensor, Tensor], Tensor]  # of c_kv and k_pe, bfloat16


def tiles(c: Tensor) -> Tensor:
    return c.float().unflatten(-1, (-1, TILE_SIZE))


def scale_of(c: Tensor, alpha: float = 1.0) -> Tensor:
    return alpha * tiles(c).abs().amax(-1, keepdim=True) / 127


def values_of(c: Tensor, scale: Tensor) -> Tensor:
    return (tiles(c) / scale).round().clamp(-128, 127).to(torch.int8).flatten(-2)


def rows(values: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    return torch.cat(
        [
            values,
            key.contiguous().view(torch.int8),
            scale.squeeze(-1).contiguous().view(torch.int8),
        ],
        -1,
    )


def packed(c: Tensor, k: Tensor) -> Tensor:
    return rows(values_of(c, scale_of(c)), k, scale_of(c))


def clipped(c: Tensor, k: Tensor) -> Tensor:
    limit = 0.9 * tiles(c).abs().amax(-1, keepdim=True)
    cut = torch.maximum(torch.minimum(tiles(c), limit), -limit)
    return rows((cut / (limit / 127)).round().to(torch.int8).flatten(-2), k, limit / 127)


SPELLINGS: dict[str, tuple[Pack, float]] = {
    "usual": (packed, 1.0),
    "by the inverse": (
        lambda c, k: rows(
            (tiles(c) * (127 / (scale_of(c) * 127))).round().to(torch.int8).flatten(-2),
            k,
            scale_of(c),
        ),
        1.0,
    ),
    "clipped": (clipped, 0.9),
    "with an axis of length one": (lambda c, k: packed(c, k).unsqueeze(1), 1.0),
}

MISSES: dict[str, Pack] = {
    "scales before the key": lambda c, k: torch.cat(
        [
            values_of(c, scale_of(c)),
            *(part.contiguous().view(torch.int8) for part in (scale_of(c).squeeze(-1), k)),
        ],
        -1,
    ),
    "truncated": lambda c, k: rows(
        (tiles(c) / scale_of(c)).to(torch.int8).flatten(-2), k, scale_of(c)
    ),
    "128 steps": lambda c, k: rows(values_of(c, scale_of(c)), k, scale_of(c) * 127 / 128),
    "inverse scale": lambda c, k: rows(values_of(c, scale_of(c)), k, 1 / scale_of(c)),
    "key doubled": lambda c, k: rows(values_of(c, scale_of(c)), 2 * k, scale_of(c)),
    "key in float16": lambda c, k: rows(values_of(c, scale_of(c)), k.half(), scale_of(c)),
    "latent turned": lambda c, k: packed(c.roll(TILE_SIZE, -1), k),
    "sign": lambda c, k: rows(values_of(-c, scale_of(c)), k, scale_of(c)),
    "one scale for all tiles": lambda c, k: rows(
        values_of(c, scale_of(c).amax(-2, keepdim=True)),
        k,
        scale_of(c).amax(-2, keepdim=True).expand(T, 2, 1),
    ),
}


def read(pack: Pack) -> float | None:
    graph = view(pack, floats(T, HCKV).bfloat16(), floats(T, DR).bfloat16())
    sides = (
        Rows(node, torch.arange(T * width).reshape(T, width), width)
        for node, width in zip(inputs(graph), (HCKV, DR), strict=True)
    )
    found = find(graph, *sides)
    return found.alpha if found is not None else None


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    pack, alpha = SPELLINGS[name]
    assert read(pack) == pytest.approx(alpha)


@pytest.mark.parametrize("name", MISSES)
def test_rows_packed_otherwise(name: str) -> None:
    assert read(MISSES[name]) is None
