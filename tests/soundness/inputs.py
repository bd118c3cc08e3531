"""Inputs by name, ordinary ones and those that expose an attack; each drawn from a seed alone.

``ordinary`` is what a probe looks like. ``exposing`` is what a served model also meets: outlier
channels of 1e2 to 1e4 at every place of the prologue, exact zeros, positions beyond every table
that fits a small model, slots at both ends, masks and flags of every kind, and (where the token
count is symbolic) other numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from tests.catalogue.base import BLOCK_SIZE, DR, HCKV, HCQ, HE, D

from .program import HEADS, Named

BLOCKS, POSITIONS, PAGES = 32, 32768, 16
ROWS = BLOCKS * BLOCK_SIZE
FEW = 64  # positions that an ordinary draw knows
CACHES = ("kv_cache", "kr_cache", "kv_cache_2", "kr_cache_2")


@lru_cache(maxsize=2)
def _weights(loud: bool) -> Named:
    """``loud``: a few rows and norms' weights are hundreds of times the rest, as trained ones."""
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    weights = {
        "w_dq": matrix(HCQ, HE),
        "w_uq": matrix(HEADS * (D + DR), HCQ),
        "w_uk": matrix(HEADS, D, HCKV) * 2,
        "w_dkv_kr": matrix(HCKV + DR, HE),
        "gamma_q": 1 + 0.2 * torch.randn(HCQ, generator=generator),
        "gamma_kv": 1 + 0.2 * torch.randn(HCKV, generator=generator),
    }
    if loud:
        weights["w_dq"][::97] *= 30
        weights["w_dkv_kr"][5::61] *= 30
        weights["w_uq"][:, ::101] *= 20
        weights["w_uk"][:, ::17] *= 30
        weights["gamma_q"][::97] *= 20
        weights["gamma_kv"][5::61] *= 20
    return {name: weight.bfloat16() for name, weight in weights.items()}


@lru_cache(maxsize=1)
def _all_tables() -> Named:
    angles = torch.arange(POSITIONS)[:, None] / 10000.0 ** (torch.arange(0, DR, 2) / DR)
    both = torch.cat([angles, angles], -1)
    return {"all_cos": both.cos().bfloat16(), "all_sin": both.sin().bfloat16()}


def ordinary(tokens: int, seed: int = 0, n: int = 3, m: int | None = None) -> Named:
    """What a probe, or a first call, looks like: normal numbers, early positions, no padding."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(FEW, (tokens,), generator=generator)
    tables = _all_tables()
    return {
        **_weights(False),
        **tables,
        "x": torch.randn(tokens, HE, generator=generator).bfloat16(),
        "positions": positions,
        "cos": tables["all_cos"][positions],
        "sin": tables["all_sin"][positions],
        "slots": torch.randperm(ROWS, generator=generator)[:tokens],
        "kv_cache": torch.randn(BLOCKS, BLOCK_SIZE, 1, HCKV, generator=generator).bfloat16(),
        "kr_cache": torch.randn(BLOCKS, BLOCK_SIZE, 1, DR, generator=generator).bfloat16(),
        "kv_cache_2": torch.randn(BLOCKS, BLOCK_SIZE, 1, HCKV, generator=generator).bfloat16(),
        "kr_cache_2": torch.randn(BLOCKS, BLOCK_SIZE, 1, DR, generator=generator).bfloat16(),
        "mask": torch.ones(tokens, dtype=torch.bool),
        "flag": torch.tensor(True),
        "kind": torch.tensor(1),
        "kinds": torch.ones(tokens, dtype=torch.int64),
        "count": torch.tensor(tokens),
        "other": torch.randn(tokens, 1, generator=generator).bfloat16() * 0.1 - 20,
        "table_of_blocks": torch.randperm(BLOCKS, generator=generator)[:PAGES],
        "inv_freq": 1.0 / 10000.0 ** (torch.arange(0, DR, 2) / DR),
        "n": min(n, tokens),
        "m": tokens if m is None else m,
        "seed": seed,
    }


def exposing(tokens: tuple[int, ...], seed: int = 1) -> Iterator[tuple[str, Named]]:
    """Named draws; ``tokens``: the numbers of tokens that the graph must serve."""
    longest, generator = max(tokens), torch.Generator().manual_seed(seed)
    yield "outlier channels", _loud(ordinary(tokens[0], seed), generator)
    yield "large integers", _late(ordinary(longest, seed + 1), generator)
    yield "flags and masks", _flagged(ordinary(tokens[-1], seed + 2), False)
    yield "zeros and edges", _edges(ordinary(tokens[0], seed + 3))
    yield (
        "mixed masks",
        _flagged(_late(_loud(ordinary(longest, seed + 4), generator), generator), None),
    )
    for count in tokens[1:]:
        yield (
            f"{count} tokens",
            ordinary(count, seed + count, n=max(1, count - 2), m=max(1, count - 7)),
        )


def fresh(named: Named) -> Named:
    """The same again, with caches of its own."""
    return {name: value.clone() if name in CACHES else value for name, value in named.items()}


def _loud(named: Named, generator: torch.Generator) -> Named:
    x = named["x"].float()
    x[:, ::37] *= 10.0 ** (2 + 2 * torch.rand(x[:, ::37].shape, generator=generator))
    x[1::3] *= 0.01
    return {**named, **_weights(True), "x": x.bfloat16(), "other": named["other"].abs() * 1.5}


def _late(named: Named, generator: torch.Generator) -> Named:
    tokens = len(named["positions"])
    positions = torch.randint(4096, POSITIONS, (tokens,), generator=generator)
    positions[-1] = 20011 if tokens > 1 or int(positions[0]) % 2 else POSITIONS - 1
    tables = {"cos": named["all_cos"][positions], "sin": named["all_sin"][positions]}
    slots = ROWS - 1 - torch.randperm(ROWS // 2, generator=generator)[:tokens]
    if not bool((slots == ROWS - 1).any()):
        slots[-1] = ROWS - 1
    return {**named, "positions": positions, **tables, "slots": slots, "kind": torch.tensor(7)}


def _flagged(named: Named, all_of: bool | None) -> Named:
    """Every flag down, and masks all false (``all_of``), or mixed."""
    tokens = len(named["mask"])
    mask = torch.arange(tokens) % 3 != 1 if all_of is None else torch.full((tokens,), all_of)
    if all_of is None and tokens == 1:
        mask = torch.zeros(1, dtype=torch.bool)
    kinds = (2 * torch.arange(tokens) + 4) % 5
    down = {
        "flag": torch.tensor(False),
        "kind": torch.tensor(4),
        "count": torch.tensor(tokens // 2),
    }
    return {**named, "mask": mask, "kinds": kinds, **down}


def _edges(named: Named) -> Named:
    x, slots = named["x"].clone(), named["slots"].clone()
    x[:, ::2] = 0
    x[::2] *= 0 if len(x) > 1 else 1e-3
    x[1::4] *= 1e-3
    slots[0] = 0
    if len(slots) > 1:
        slots[1:][slots[1:] == 0] = 1
        slots[slots == ROWS - 1] = ROWS - 2
        slots[-1] = ROWS - 1
        if len(set(slots.tolist())) < len(slots):
            slots = torch.randperm(ROWS)[: len(slots)]
    return {**named, "x": x, "slots": slots, "positions": torch.zeros_like(named["positions"])}
