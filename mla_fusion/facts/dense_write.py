"""Rows that a model assigns by slices, ``cache[:B, start:start + S] = rows``, as slots that follow
from the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from mla_fusion.compat import bounds_of
from mla_fusion.facts.obstacle import Obstacle
from mla_fusion.fx import pools
from mla_fusion.fx.kinds import argument, has_effect, word
from mla_fusion.fx.sizes import is_symbolic, same, same_shape, sizes_of
from mla_fusion.fx.walk import INPUTS, origin, unit_selections
from mla_fusion.operators.known import shape_of, value_of


@dataclass(frozen=True, eq=False)
class Span:
    """Of a cache ``[.., rows, width]`` ``length`` rows from ``start`` on, of ``sequences`` from
    ``first`` on. A symbolic start is an input of the graph.
    """

    first: Any
    start: Any
    rows: Any
    sequences: Any
    length: Any

    def __str__(self) -> str:
        """Equal for equal spans: sizes may be symbolic, which have no hash."""
        return f"{self.first}+{self.sequences}, {self.start}+{self.length} of {self.rows}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True)
class DenseWrite:
    """``inside``: the nodes between the rows and the cache, ``result`` the last."""

    cache: Node
    span: Span
    inside: tuple[Node, ...]

    @property
    def result(self) -> Node:
        return self.inside[-1]


def find(writer: Node, value: Node) -> DenseWrite | Obstacle:
    """The write that ``writer`` begins, the one reader of ``value`` (which may be a copy onto the
    slice already).
    """
    inside: list[Node] = [value] if word(value) == "copy" else []
    starts: dict[int, Any] = {}
    if word(writer) == "copy" and len(writer.users) == 1 and writer.args[1] is value:
        if not same_shape(shape_of(value), shape_of(writer)):
            message = f"{writer.name} is of another shape than {value.name}, which it copies"
            return Obstacle("cache.part_of_row", message)
        inside, value, writer = [writer], writer, next(iter(writer.users))
    if word(writer) != "slice_scatter" or writer.args[1] is not value:
        return Obstacle("cache.writer", f"{writer.name} does not assign {value.name} to a slice")
    inside.append(writer)
    while True:
        scatter = inside[-1]
        base, axis = scatter.args[0], argument(scatter, "dim", 0)
        sizes = sizes_of(base)
        start = _first(argument(scatter, "start") or 0, sizes[axis] if sizes else None)
        is_first = axis not in starts or (isinstance(start, int) and isinstance(starts[axis], int))
        if (
            not isinstance(base, Node)
            or argument(scatter, "step", 1) != 1
            or start is None
            or not is_first
        ):
            message = (
                f"{scatter.name} assigns rows whose first number is computed when the graph runs "
                "or counts from an end that is not fixed, or every nth row"
            )
            return Obstacle("cache.slice_bounds", message)
        starts[axis] = starts.get(axis, 0) + start  # a slice of a slice
        cache = origin(base, unit_selections)
        if cache.op in INPUTS:
            break
        outer = next((user for user in scatter.users if _puts_back(user, scatter, base)), None)
        if outer is None or len(scatter.users) != 1:
            return Obstacle("cache.no_input", *pools.no_input(base))
        inside.append(outer)
    rank, assigned = len(shape_of(base)), shape_of(value)
    row_axis = rank - 2
    if (
        len(assigned) != rank
        or not starts.keys() <= set(range(row_axis + 1))
        or not same(assigned[-1], shape_of(base)[-1])
        or not same(assigned[-1], shape_of(cache)[-1])
    ):
        return Obstacle("cache.part_of_row", f"{inside[-1].name} does not assign whole rows")
    if not all(same(size, 1) for size in shape_of(base)[1:row_axis]):
        message = f"{base.name} of shape {list(shape_of(base))} is not [sequences, rows, width]"
        return Obstacle("cache.rows", message)
    first, sequences = (starts.get(0, 0), assigned[0]) if row_axis else (0, 1)
    start, rows = starts.get(row_axis, 0), shape_of(base)[row_axis]
    return DenseWrite(cache, Span(first, start, rows, sequences, assigned[row_axis]), tuple(inside))


def _first(start: Any, size: Any) -> Any:
    """The start of a slice of an axis, counted from its beginning: a literal, or the value of an
    input that is never negative.
    """
    if isinstance(start, Node):
        start = value_of(start) if start.op in INPUTS else None
        return start if is_symbolic(start) and bounds_of(start)[0] >= 0 else None
    if isinstance(start, int) and start < 0 and isinstance(size, int):
        return max(start + size, 0)
    return start if isinstance(start, int) and start >= 0 else None


def _puts_back(user: Node, scatter: Node, base: Node) -> bool:
    """Is the scattered slice put back where it was taken from?"""
    if word(user) != "slice_scatter" or user.args[1] is not scatter or has_effect(user):
        return False
    names = ("dim", "start", "end", "step")
    taken = [argument(base, name) for name in names] if word(base) == "slice" else None
    return taken == [argument(user, name) for name in names] and base.args[0] is user.args[0]
