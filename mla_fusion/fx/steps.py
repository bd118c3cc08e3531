"""Sizes that a graph's operators hold equal, though nothing in the graph says so.

``mark_dynamic`` gives each tensor a symbol of its own. Element-wise operators make torch unify the
symbols; the operators below do not, and run all the same for nothing but equal sizes (or for 1,
which dynamo compiles apart).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.fx.kinds import argument
from mla_fusion.fx.sizes import sizes_of
from mla_fusion.operators.known import rule_of, rules

Pair = tuple[Any, Any]


def rows_in_step(node: Node) -> Iterator[Pair]:
    """Pairs of sizes of the node's operands that are equal whenever it runs, unless one of them is
    1.
    """
    reader = rule_of(node, "rows", RULES)
    if reader is not None:
        yield from reader(node)


def _written(node: Node) -> Iterator[Pair]:
    """``cache[slots] = rows``, ``cache[blocks, places] = rows``, ``cache[:, places] = rows``: as
    many rows as slots.
    """
    base, indices, values = node.args[:3]
    if not isinstance(indices, (list, tuple)):
        return
    before = next((place for place, one in enumerate(indices) if one is not None), 0)
    given, rank, rows = indices[before:], len(sizes_of(base)), len(sizes_of(values))
    slots = max((len(sizes_of(one)) for one in given), default=0)
    if slots and None not in given and rows == slots + rank - len(given):
        for one in given:
            ends = sizes_of(values)[before : before + slots]
            yield from zip(reversed(sizes_of(one)), reversed(ends), strict=False)


def _scattered(node: Node) -> Iterator[Pair]:
    """``npu_scatter_nd_update(cache, slots, rows)``: as many rows as slots."""
    _, slots, rows = (sizes_of(side) for side in node.args[:3])
    yield from zip(slots[:-1], rows, strict=False)


def _scattered_pairs(node: Node) -> Iterator[Pair]:
    """``npu_scatter_pa_kv_cache(key rows, value rows, .., slots)``: as many of either as slots."""
    for rows in node.args[:2]:
        yield from zip(sizes_of(node.args[4]), sizes_of(rows), strict=False)


def _rotated(node: Node) -> Iterator[Pair]:
    """x, cos and sin of a rotation, axis by axis from the last."""
    x, *tables = (sizes_of(side) for side in node.args[:3])
    for table in tables:
        yield from zip(reversed(x), reversed(table), strict=False)


def _kv_operator(node: Node) -> Iterator[Pair]:
    """The latent, its tables and its slots: a row of each for a token. A cache is as wide as its
    rows.
    """
    latent, gamma, cos, sin, index, kr_cache, kv_cache = (sizes_of(side) for side in node.args[:7])
    yield from zip(kr_cache[3:], cos[-1:], strict=False)
    yield from zip(kv_cache[3:], gamma[-1:], strict=False)
    for table in (cos, sin):
        yield from zip(reversed(latent[:-1]), reversed(table[:-1]), strict=False)
    if len(index) == 1 and latent:
        yield index[0], latent[0]


def _blocks(node: Node) -> Iterator[Pair]:
    """mxfp8: of each row of x two scales for every 64 columns."""
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    scales, x = sizes_of(argument(node, "pertoken_scale")), value.shape
    if len(scales) == len(x) + 1 and value.dtype == torch.float8_e4m3fn:
        yield from zip(scales, (*x[:-1], -(-x[-1] // 64), 2), strict=True)


RULES = rules(_written, _scattered, _scattered_pairs, _blocks, _rotated, _kv_operator)
