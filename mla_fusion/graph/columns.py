"""Columns that views take: equal groups of them (one a head), each of a few runs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_MOST_RUNS = 4


class Run(NamedTuple):
    """``size`` columns from ``first`` on; ``is_paired``: their halves, taken in turn."""

    first: int
    size: int
    is_paired: bool


class Groups(NamedTuple):
    """``number`` groups, ``stride`` columns apart from ``start`` on, with runs inside a group."""

    start: int
    number: int
    stride: int
    runs: tuple[Run, ...]


@lru_cache(maxsize=256)  # equal layers ask the same
def groups_of(columns: tuple[int, ...], width: int) -> Groups | None:
    """The columns of a matrix that has ``width`` of them; None where they are not of this form."""
    for count in range(len(columns), 0, -1):
        size, rest = divmod(len(columns), count)
        stride = columns[size] - columns[0] if count > 1 and not rest else width
        if rest or stride < size or count * stride > width:
            continue
        inside = columns[:size]
        start = min(*inside, width - count * stride)
        if max(inside) >= start + stride:
            continue
        if all(one == inside[k % size] + k // size * stride for k, one in enumerate(columns)):
            runs = _runs([one - start for one in inside])
            if len(runs) <= _MOST_RUNS:
                return Groups(start, count, stride, runs)
    return None


def _runs(columns: list[int]) -> tuple[Run, ...]:
    """As many as are looked at."""
    found, at = list[Run](), 0
    while at < len(columns) and len(found) <= _MOST_RUNS:
        paired = _paired(columns, at)
        size = paired or 1
        while not paired and columns[at + size : at + size + 1] == [columns[at] + size]:
            if _paired(columns, at + size):
                break
            size += 1
        found.append(Run(columns[at], size, bool(paired)))
        at += size
    return tuple(found)


def _paired(columns: list[int], at: int) -> int:
    """How many columns from there on are two halves, taken in turn."""
    first, *second = columns[at : at + 2]
    half = second[0] - first if second else 0
    if half < 2 or at + 2 * half > len(columns):
        return 0
    pairs = [first + one for k in range(half) for one in (k, half + k)]
    return 2 * half if columns[at : at + 2 * half] == pairs else 0
