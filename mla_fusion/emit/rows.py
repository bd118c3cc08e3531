"""Tensors with a row for each token: RoPE tables, slots, buffers for new rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.facts.cache_write import Slots
from mla_fusion.facts.dense_write import Span
from mla_fusion.facts.rope import Table, TableRun
from mla_fusion.fx.build import Builder
from mla_fusion.operators.known import shape_of
from mla_fusion.plan.plan import InPlace, Plan

aten = torch.ops.aten


def table(
    b: Builder,
    table: Table,
    shape: Sequence[Any],
    without: float,
    x: Any,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """The full-width table, lead + [Dr]; ``without`` a rotation, of that number."""
    if not table:
        of = "no rotation", without, tuple(map(str, shape)), dtype
        return b.once(
            of, lambda b: b.call(aten.new_full.default, x, b.sizes(shape), without, dtype=dtype)
        )
    *lead, _ = shape
    return b.once(
        ("table", table, tuple(map(str, lead)), dtype),
        lambda b: _build_table(b, table, lead, dtype),
    )


def _build_table(b: Builder, table: Table, lead: Sequence[Any], dtype: torch.dtype) -> Any:
    parts = {run: _run(b, run) for run in dict.fromkeys(table)}
    if len({(run.rows, tuple(map(str, b.shape(part)[:-1]))) for run, part in parts.items()}) > 1:
        spread = {run: _spread(b, part, run.rows, run.count, lead) for run, part in parts.items()}
        return b.cast(b.joined([spread[run] for run in table], -1), dtype)
    value = b.joined([parts[run] for run in table], -1)
    return b.cast(_spread(b, value, table[0].rows, sum(run.count for run in table), lead), dtype)


def _spread(b: Builder, value: Any, rows: str, width: int, lead: Sequence[Any]) -> Any:
    """A row for every token: lead + [width]."""
    if rows == "token":
        return b.reshape(value, (*lead, width))
    first, last = lead[0], lead[-1]  # [B, S]: the planner lets no other tokens share rows
    shared = {"position": (1, last), "sequence": (first, 1), "one": (1,) * len(lead)}[rows]
    value = b.reshape(value, (*shared, width))
    value = b.call(aten.expand.default, value, b.sizes((*lead, width)))
    return b.contiguous(value)


def _run(b: Builder, run: TableRun) -> Any:
    value = b.value(run.base)
    if run.field:
        if run.base.meta["val"].is_conj():  # by a flag: the memory is not
            value = b.call(aten.resolve_conj.default, value)
        value = b.call(
            aten.select.int, b.call(aten.view_as_real.default, value), -1, int(run.field == "imag")
        )
    width = shape_of(run.base)[-1]
    if (run.start, run.step, run.count) != (0, 1, width):
        stop = run.start + run.step * (run.count - 1) + 1
        value = b.call(aten.slice.Tensor, value, -1, run.start, stop, run.step)
    if run.factor == -1.0:
        return b.call(aten.neg.default, value)
    return value if run.factor == 1.0 else b.call(aten.mul.Tensor, value, run.factor)


def checked_slots(b: Builder, plan: Plan, lead: Sequence[Any], skips: bool = False) -> Any:
    """The slots of caches that are written in place, looked at before the graph runs where somebody
    asks for that.

    ``skips``: negative ones are the model's own, of tokens that are not kept. Slices that are
    assigned need no look.
    """
    assert isinstance(plan.caches, InPlace)
    if plan.caches.slots.span is None:
        b.check_slots(
            lambda b: slots(b, plan, lead), plan.caches.slots.nodes, plan.caches.held, skips
        )
    return slots(b, plan, lead)


def slots(b: Builder, plan: Plan, lead: Sequence[Any]) -> Any:
    assert isinstance(plan.caches, InPlace)
    slots: Slots = plan.caches.slots

    def build(b: Builder) -> Any:
        if slots.span is not None:
            value = _assigned(b, slots.span, plan.device)
        elif slots.index is not None:
            value = b.value(slots.index)
        elif slots.every is not None:
            value = _of_every_sequence(b, slots, plan.device)
        else:
            assert slots.block is not None and slots.offset is not None
            value = b.call(aten.mul.Tensor, b.value(slots.block), b.size(slots.block_size))
            value = b.call(aten.add.Tensor, value, b.value(slots.offset))
        return b.cast(b.reshape(value, lead), torch.int64)

    sizes = tuple(map(str, (slots.block_size, slots.every, *lead)))
    return b.once(("slots", slots.nodes, slots.span, sizes), build)


def _assigned(b: Builder, span: Span, device: torch.device) -> Any:
    """The slots [sequences, length] of rows that the model assigns by slices."""
    first, start = (
        b.call(aten.add.Tensor, _count(b, size, device), b.size(begin))
        for size, begin in ((span.sequences, span.first), (span.length, span.start))
    )
    return _places(b, first, span.rows, start)


def _of_every_sequence(b: Builder, slots: Slots, device: torch.device) -> Any:
    """The slots [sequences, length] of rows at places in each sequence."""
    assert slots.every is not None and slots.offset is not None
    sequences, length = slots.every
    each_its_own = len(shape_of(slots.offset)) > 1
    places = b.reshape(b.value(slots.offset), slots.every if each_its_own else (length,))
    return _places(b, _count(b, sequences, device), slots.block_size, places)


def _count(b: Builder, size: Any, device: torch.device) -> Any:
    return b.call(aten.arange.default, b.size(size), device=device)


def _places(b: Builder, sequences: Any, rows: Any, places: Any) -> Any:
    first = b.call(aten.mul.Tensor, sequences, b.size(rows))
    return b.call(aten.add.Tensor, b.call(aten.unsqueeze.default, first, 1), places)


def written(b: Builder, cache: Any, slots: Any, shape: Sequence[Any], mode: str) -> Any:
    """The new rows, read back from where the kernel wrote them; of a skipped token (slot below 0)
    some other row.
    """
    return b.new_rows(cache, shape, lambda b: _read_back(b, cache, slots, shape, mode))


def _read_back(b: Builder, cache: Any, slots: Any, shape: Sequence[Any], mode: str) -> Any:

    def places(b: Builder) -> Any:
        return b.call(aten.clamp_min.default, b.call(aten.reshape.default, slots, [-1]), 0)

    index, piece = b.once(("places", slots), places), shape[-1]
    if mode == "PA_NZ":  # a row lies in pieces, a block of rows apart
        piece = _NZ_COLUMNS
        index = b.once(
            ("pieces", slots, shape[-1]),
            lambda b: _pieces(b, index, b.shape(cache)[1], shape[-1] // piece),
        )
    flat = b.call(aten.reshape.default, cache, [-1, piece])
    return b.reshape(b.call(aten.index_select.default, flat, 0, index), shape)


_NZ_COLUMNS = 16  # of bfloat16, in a piece of FRACTAL_NZ


def _pieces(b: Builder, rows: Any, block_size: Any, count: int) -> Any:
    """Where the pieces of rows lie in a cache [BlockNum, count, BlockSize, _NZ_COLUMNS]."""
    size = b.size(block_size)
    offset = b.call(aten.remainder.Scalar, rows, size)
    block = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, rows, offset), count)
    first = b.reshape(b.call(aten.add.Tensor, block, offset), (*b.shape(rows), 1))
    steps = b.call(aten.mul.Tensor, b.constant(range(count), rows), size)
    return b.call(aten.reshape.default, b.call(aten.add.Tensor, first, steps), [-1])


def buffer(b: Builder, x: Any, lead: Sequence[Any], width: int) -> Any:
    """Room for the new rows, [B, S, 1, width] or [T, 1, width] in bfloat16; every row is
    written.
    """
    dtype = {} if b.dtype(x) == torch.bfloat16 else {"dtype": torch.bfloat16}
    return b.call(aten.new_empty.default, x, b.sizes((*lead, 1, width), x), **dtype)


def nothing(b: Builder, x: Any) -> Any:
    """The kr_cache of packed rows: no elements."""
    return b.once(
        "no kr_cache", lambda b: b.call(aten.new_empty.default, x, [0], dtype=torch.bfloat16)
    )


def interleave(b: Builder, value: Any) -> Any:
    """Half layout to interleaved pairs: [a0..a31 | b0..b31] -> [a0, b0, a1, b1, ..]. Exact."""
    shape = list(b.shape(value))
    halves = b.reshape(value, (*shape[:-1], 2, shape[-1] // 2))
    return b.reshape(b.transposed(halves), shape)


def multiplied(b: Builder, rows: Any, times: Node) -> Any:
    """Heads [.., N, width] times a number for each token, in the dtype of the heads."""
    factors = b.reshape(b.value(times), [*b.shape(rows)[:-2], 1, 1])
    return b.cast(b.call(aten.mul.Tensor, rows, factors), b.dtype(rows))
