"""What a call makes of its arguments, read once for all operators of a form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from mla_fusion.operators.known import (
    Form,
    argument,
    is_getitem,
    operator_of,
    shape_of,
    value_of,
    word,
)

# writers that put a run back: what would take it from there
SCATTERS = {"slice_scatter": "slice", "select_scatter": "select"}


@dataclass(frozen=True)
class Run:
    """A run of places along one axis of a value: what a slice, or a result of a split, takes of it,
    or what a scatter puts there.

    by     the operator that takes the like
    whole  the value
    part   what stands in the run
    start  its first place, as it is given: below zero from the end, or a node
    count  how many places
    end    where a slice is told to end; None: it takes all that follow
    """

    by: str
    whole: Node
    part: Node
    axis: int
    start: Any
    count: Any
    step: Any = 1
    end: Any = None

    @property
    def drops(self) -> bool:
        """Has the part no such axis?"""
        return drops(self.by)

    @property
    def size(self) -> Any:
        """Of the whole."""
        return shape_of(self.whole)[self.axis]

    @property
    def places(self) -> tuple[int, int] | None:
        """Where it begins and ends; None where they are no known run."""
        start, count, size = self.start, self.count, self.size
        if self.step != 1 or not all(isinstance(number, int) for number in (start, count, size)):
            return None
        low = min(max(start + size if start < 0 else start, 0), size)
        return low, low + count


def drops(by: str) -> bool:
    """Does an operator of the form take one place of an axis, and leave the axis out?"""
    return by.startswith(("select", "unbind"))


def run_of(node: Node) -> Run | None:
    """The run that a node takes, or puts back; None of any other node, or of a whole split."""
    taker = node.args[0] if is_getitem(node) else node
    row = operator_of(taker).row if isinstance(taker, Node) else None
    if row is None or not (row.form is Form.RUN or row.word in SCATTERS):
        return None
    assert isinstance(taker, Node)
    by, whole, part = SCATTERS.get(row.word, row.word), taker.args[0], node
    axis, held = argument(taker, "dim", 0), value_of(node)
    if not isinstance(whole, Node) or not isinstance(axis, int) or isinstance(held, (list, tuple)):
        return None
    axis %= len(shape_of(whole))
    if by != row.word:
        part = node.args[1]  # type: ignore[assignment]
    if is_getitem(node):
        place: Any = node.args[1]
        counts = [1 if drops(by) else result.shape[axis] for result in taker.meta["val"]]
        return Run(by, whole, part, axis, sum(counts[:place]), counts[place])
    start = argument(taker, "index" if drops(by) else "start") or 0
    count = 1 if drops(by) else shape_of(part)[axis]
    step, end = argument(taker, "step", 1), argument(taker, "end")
    return Run(by, whole, part, axis, start, count, step, end)


def order_of(node: Node) -> list[int] | None:
    """Of a permutation, which axis of its source each axis is; None of any other node."""
    if operator_of(node).row.form is not Form.PERMUTE:
        return None
    source, *given = node.args
    assert isinstance(source, Node)
    order = list(range(len(shape_of(source))))
    dims = argument(node, "dims")
    if dims is not None:
        return [order[axis] for axis in dims]
    if len(order) > 1:
        a, b = given or (0, 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return order


def join_of(node: Node, by: str = "cat") -> tuple[int, Sequence[Any]] | None:
    """The axis along which a node puts values side by side, and these; None of any other node.
    ``by`` "stack": each at one place of a new axis.
    """
    if word(node) != by:
        return None
    parts, held = node.args[0], value_of(node)
    if not isinstance(parts, (list, tuple)) or not isinstance(held, Tensor):
        return None
    return argument(node, "dim", 0) % held.dim(), parts
