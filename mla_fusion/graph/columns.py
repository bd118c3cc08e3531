"""Columns of a matrix as views: equal groups of columns (one a head), each of a few runs.

``graph/lower.py`` asks for them. A list of column numbers becomes slices and reshapes, if possible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_MOST_RUNS = 4


class Run(NamedTuple):
    """``size`` neighbouring columns from ``first`` on.

    is_paired  the columns alternate between the first and the second half of the run
    """

    first: int
    size: int
    is_paired: bool


class Groups(NamedTuple):
    """``number`` equal groups of columns.

    start   the first column of the first group
    stride  how many columns lie between the starts of neighbouring groups
    runs    the columns of a group, counted from its start
    """

    start: int
    number: int
    stride: int
    runs: tuple[Run, ...]


@lru_cache(maxsize=256)  # equal layers have the same columns
def groups_of(columns: tuple[int, ...], width: int) -> Groups | None:
    """The columns of a matrix with ``width`` columns, as groups. None if they are not of this
    form.
    """
    for count in range(len(columns), 0, -1):
        size, remainder = divmod(len(columns), count)
        stride = columns[size] - columns[0] if count > 1 and not remainder else width
        if remainder or stride < size or count * stride > width:
            continue
        group_columns = columns[:size]
        start = min(*group_columns, width - count * stride)
        if max(group_columns) >= start + stride:
            continue
        if all(
            column == group_columns[k % size] + k // size * stride
            for k, column in enumerate(columns)
        ):
            runs = _runs([column - start for column in group_columns])
            if len(runs) <= _MOST_RUNS:
                return Groups(start, count, stride, runs)
    return None


def _runs(columns: list[int]) -> tuple[Run, ...]:
    """Splits columns into runs; stops after ``_MOST_RUNS`` + 1 runs."""
    runs, place = list[Run](), 0
    while place < len(columns) and len(runs) <= _MOST_RUNS:
        paired_size = _paired_size(columns, place)
        size = paired_size or 1
        while not paired_size and columns[place + size : place + size + 1] == [
            columns[place] + size
        ]:
            if _paired_size(columns, place + size):
                break
            size += 1
        runs.append(Run(columns[place], size, bool(paired_size)))
        place += size
    return tuple(runs)


def _paired_size(columns: list[int], place: int) -> int:
    """How many columns from ``place`` on alternate between two halves; 0 if they do not."""
    first, *second = columns[place : place + 2]
    half = second[0] - first if second else 0
    if half < 2 or place + 2 * half > len(columns):
        return 0
    pairs = [first + offset for k in range(half) for offset in (k, half + k)]
    return 2 * half if columns[place : place + 2 * half] == pairs else 0
