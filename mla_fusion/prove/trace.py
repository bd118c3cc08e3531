"""What is evaluated at a point, written down: each value once, with what it is made of. A
certificate is made of it.

An entry is ``[operation, operands, ..]``, operands by their numbers. Movement is a place in the
operand's flat order, and strides along sizes from there: what a tensor of memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]
Entry = list[Any]
VERSION = 2  # of the form of certificates
_MOST = 1 << 16  # steps of an axis that has no stride


class Trace:
    """Values are objects; one that was made by no recorded operation has no number."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._numbers: dict[str, int] = {}  # by the entry as text
        self._of: dict[int, int] = {}  # by the value's id
        self._views: dict[int, tuple[int, Tensor]] = {}  # of what, and how it lies in that
        self._kept: list[Any] = []  # no id is given anew

    def number(self, value: Any) -> int | None:
        return self._of.get(id(value))

    def enter(self, made: Any, operation: str, operands: Sequence[Any], *rest: Any) -> None:
        numbers = [number for operand in operands if (number := self.number(operand)) is not None]
        if self.number(made) is None and len(numbers) == len(operands):
            self._of[id(made)] = self._entered([operation, numbers, *rest])
            self._kept.append(made)

    def _entered(self, entry: Entry) -> int:
        number = self._numbers.setdefault(str(entry), len(self.entries))
        if number == len(self.entries):
            self.entries.append(entry)
        return number

    def same(self, made: Any, value: Any) -> None:
        """The same elements, of which other things are known."""
        if self.number(value) is not None:
            self._of[id(made)] = self._of[id(value)]
            self._kept.append(made)
            if id(value) in self._views:
                self._views[id(made)] = self._views[id(value)]

    def moved(self, made: Any, value: Any, move: Move) -> None:
        number = self.number(value)
        if number is None or self.number(made) is not None:
            return
        of, view = self._views.get(id(value)) or (number, _flat(value.shape).view(value.shape))
        found = move(view)
        if found is view or (found._base is not None and found._base is view._base):
            shape = list(found.shape)
            entry = ["move", [of], shape, found.storage_offset(), shape, list(found.stride())]
            self._views[id(made)] = of, found
        else:
            places = move(torch.arange(prod(value.shape)).view(value.shape))
            fit = fitted(places)
            if fit is None:
                return
            entry = ["move", [number], list(places.shape), *fit]
        self._of[id(made)] = self._entered(entry)
        self._kept.append(made)

    def integers(self, made: Any, values: Tensor) -> None:
        fit = fitted(values)
        if fit is not None:
            self.enter(made, "integers", (), list(values.shape), *fit)

    def certificate(self, wanted: Sequence[int]) -> tuple[list[Entry], dict[int, int]]:
        """The entries that these are made of, and their new numbers."""
        used = set(wanted)
        for number in range(len(self.entries) - 1, -1, -1):
            if number in used:
                used.update(self.entries[number][1])
        numbers = {number: place for place, number in enumerate(sorted(used))}
        entries = [self.entries[number] for number in numbers]
        return [
            [entry[0], [numbers[of] for of in entry[1]], *entry[2:]] for entry in entries
        ], numbers


def _flat(shape: Sequence[int]) -> Tensor:
    return torch.empty(prod(shape), dtype=torch.int64, device="meta")


def fitted(places: Tensor) -> tuple[int, list[int], list[Any]] | None:
    """Integers as the first, sizes, and strides along them. Of an axis without a stride: a list of
    all its steps.

    None for a list that is too long.
    """
    flat, sizes, strides = places.reshape(-1), list[int](), list[Any]()
    while flat.numel() > 1:
        steps = flat[1:] - flat[:-1]
        breaks = (steps != steps[0]).nonzero().reshape(-1) + 1
        run = gcd(flat.numel(), *breaks.tolist()) if breaks.numel() else flat.numel()
        if run == 1:
            run = _irregular(flat, places.shape, prod(sizes))
        if run > _MOST and breaks.numel():
            return None
        sizes.insert(0, run)
        is_even = bool((steps[: run - 1] == steps[0]).all())
        strides.insert(0, int(steps[0]) if is_even else (flat[:run] - flat[0]).tolist())
        flat = flat[::run]
    return (int(flat[0]) if flat.numel() else 0), sizes, strides


def _irregular(flat: Tensor, shape: Sequence[int], behind: int) -> int:
    """How many numbers are repeated, each time from another first one; all of them where none
    are.
    """
    for axis in range(len(shape) - 1, 0, -1):
        run, rest = divmod(prod(shape[axis:]), behind)
        if run > 1 and not rest and flat.numel() % run == 0:
            rows = flat.view(-1, run)
            if torch.equal(rows - rows[:, :1], (rows[:1] - rows[0, 0]).expand_as(rows)):
                return run
    return flat.numel()
