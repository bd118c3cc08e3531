"""Columns of a weight as a list of numbers, and the few graph operations that take them.

A packing step is data: which columns of which matrix, in which order. ``runs`` finds the shortest
way to say it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Block:
    """``groups`` equal groups, ``stride`` columns apart: in each, ``width`` columns from
    ``offset``.

    paired   the group's columns are the halves [0, w/2) and [w/2, w) taken in turn: the half layout
             of a rotation brought to the interleaved pairs that the kernel reads
    """

    groups: int
    stride: int
    offset: int
    width: int
    paired: bool = False


@lru_cache(maxsize=256)  # equal layers ask the same
def describe(columns: tuple[int, ...], groups: int) -> Block | None:
    """The columns as equal groups (one a head), or None where they are not."""
    width, rest = divmod(len(columns), groups)
    if rest or not width:
        return None
    rows = [columns[i * width : (i + 1) * width] for i in range(groups)]
    base = min(rows[0])
    inside = tuple(column - base for column in rows[0])
    in_order = tuple(range(width))
    half = width // 2
    paired = tuple(value for i in range(half) for value in (i, half + i))
    if inside not in (in_order, paired):
        return None
    stride = min(rows[1]) - base if groups > 1 else width
    if stride < width:  # heads in reverse, or overlapping
        return None
    for group, row in enumerate(rows):
        if tuple(column - base - group * stride for column in row) != inside:
            return None
    return Block(groups, stride, base, width, inside != in_order)
