"""Columns of a matrix as views: equal groups of columns (one a head), each of a few runs.

``graph/lower.py`` asks for them. A list of column numbers becomes slices and reshapes, if possible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_MOST_RUNS = 4


class Run(NamedTuple):
    """``size`` neighbouring columns from ``first`` on, as an array of ``rows`` rows, transposed.

    One row is the columns in order. Two rows are columns that alternate between two halves; rows of
    two are the even columns, then the odd ones.
    """

    first: int
    size: int
    rows: int


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
        run = _transposed_run(columns, place)
        if run is None:
            size = 1
            while columns[place + size : place + size + 1] == [columns[place] + size]:
                if _transposed_run(columns, place + size) is not None:
                    break
                size += 1
            run = Run(columns[place], size, 1)
        runs.append(run)
        place += run.size
    return tuple(runs)


def _transposed_run(columns: list[int], place: int) -> Run | None:
    """The run of several rows that begins at a place. None if there is none."""
    first, *second = columns[place : place + 2]
    step = second[0] - first if second else 0
    if step < 2:
        return None
    rows = 2
    while columns[place + rows : place + rows + 1] == [first + rows * step]:
        rows += 1
    run = [first + row * step + column for column in range(step) for row in range(rows)]
    is_run = columns[place : place + len(run)] == run
    return Run(first, len(run), rows) if is_run else None
