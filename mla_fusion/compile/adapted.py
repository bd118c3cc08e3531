"""Wraps a compiled graph: prepares the caller's arguments before each call.

Weights are packed once, and caches are viewed in the kernel's shape. If nothing has changed since
the last call, this costs a few comparisons for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from mla_fusion.compat import FakeTensor
from mla_fusion.graph.pools import Part
from mla_fusion.report import store
from mla_fusion.report.report import Report
from mla_fusion.weights.cache import Packed
from mla_fusion.weights.current import Weights, items


class SlotError(ValueError):
    """A slot that the kernel must not be given; the message names the slot, its token and the
    cache.
    """


# a size, or the place of an argument and its axis of that size
SizeOrigin = int | tuple[int, int]


@dataclass(frozen=True)
class SlotCheck:
    """Checks the slots of one kernel call.

    program    computes the slots, [T] or [B, S], from the arguments at ``positions``; None if the
               single argument there holds the slots
    positions  places among the caller's arguments
    caches     for each cache: its name, a function from the caller's arguments to the cache, and
               the width of a row
    skips      True if model and kernel leave out tokens whose slot is negative
    places     for each argument that holds places in blocks: its name, its place among the
               caller's arguments, what is added to each, the size of a block, and how many places
               from there on lie in the block
    """

    program: GraphModule | None
    positions: tuple[int, ...]
    caches: tuple[tuple[str, Callable[[Sequence[Any]], Tensor], int], ...]
    skips: bool
    places: tuple[tuple[str, int, int, SizeOrigin, SizeOrigin], ...]

    def __call__(self, args: Sequence[Any]) -> None:
        """Raises SlotError for a wrong slot. Waits for the device, because it reads the slots."""
        sources = [args[position] for position in self.positions]
        if any(isinstance(source, FakeTensor) for source in sources):
            return  # fake tensors hold no slots
        with torch.no_grad():
            slots = sources[0] if self.program is None else self.program(*sources)
            slots = slots.reshape(-1).cpu()
        for name, position, first, *sizes in self.places:
            size, count = (
                origin if isinstance(origin, int) else args[origin[0]].shape[origin[1]]
                for origin in sizes
            )
            ahead, numbers = first + count - 1, args[position]
            for place in numbers[_are_outside(numbers, size - ahead)].tolist():
                places = f"places {place} to {place + ahead}" if ahead else f"place {place}"
                raise SlotError(f"{name} holds {places}, outside a block of {size} rows")
        tokens = torch.arange(len(slots), device=slots.device)
        if self.skips:
            tokens = tokens[slots >= 0]
        for name, cache, width in self.caches:
            _check_slots(slots[tokens], tokens, name, cache(args).numel() // width)


def _are_outside(numbers: Tensor, count: int) -> Tensor:
    """Returns, for each number, True if it is not from 0 to ``count`` - 1."""
    return (numbers < 0) | (numbers >= count)


def _check_slots(slots: Tensor, tokens: Tensor, name: str, rows: int) -> None:
    """Raises SlotError if a slot is no row of the cache, or if two tokens have one slot.

    tokens  the number of the token of each slot
    rows    how many rows the cache has
    """
    outside = _are_outside(slots, rows).nonzero()
    if len(outside):
        place = int(outside[0])
        raise SlotError(
            f"slot {int(slots[place])} of token {int(tokens[place])} lies outside {name}, which "
            f"has {rows} rows"
        )
    ordered, order = slots.sort(stable=True)
    repeated = (ordered[1:] == ordered[:-1]).nonzero()
    if len(repeated):
        place = int(repeated[0])
        first, second = tokens[order[place : place + 2]].tolist()
        raise SlotError(
            f"slot {int(ordered[place])} is given to token {first} and to token {second} of one "
            f"write to {name}, which has {rows} rows"
        )


@dataclass(frozen=True)
class Viewed:
    """Views a cache, or a part of a pool of caches, in the kernel's shape. Copies nothing.

    position  the place of the cache, or of the pool, among the caller's arguments
    shape     the kernel's shape; None: the cache keeps its own shape
    part      the part of the pool; None: all of it
    """

    position: int
    shape: tuple[int, ...] | None
    part: Part | None

    def __call__(self, args: Sequence[Any]) -> Tensor:
        """Returns the view. Raises RuntimeError if strides of the cache do not allow it."""
        cache = args[self.position]
        if self.part is not None:
            cache = self.part.of(cache)
        return cache if self.shape is None else cache.view(self.shape)


# an input of the compiled graph: the place of the caller's argument, or what makes it of arguments
Adaptor = int | Packed | Viewed


class Adapted:
    """Calls a compiled graph with the arguments that the caller's graph takes."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        adaptors: Sequence[Adaptor],
        report: Report,
        checks: Sequence[SlotCheck],
    ) -> None:
        self.compiled, self.checks = compiled, checks
        self.weights = Weights([item for item in adaptors if isinstance(item, Packed)])
        # the report, until a first call has shown how many bytes packed weights add
        self._open_report = report if self.weights.wanted else None
        self._viewed = [item for item in adaptors if isinstance(item, Viewed)]
        computed = [*self.weights.wanted, *self._viewed]
        # computed inputs stand behind the caller's arguments, so their places count from the end
        places = {id(item): place - len(computed) for place, item in enumerate(computed)}
        self._pick = items(
            [item if isinstance(item, int) else places[id(item)] for item in adaptors]
        )

    def __call__(self, *args: Any) -> Any:
        """Returns the results of the compiled graph. Raises SlotError for a wrong slot."""
        for check in self.checks:
            check(args)
        return self.compiled(*self.inputs(args))

    def inputs(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the inputs of the compiled graph."""
        available = *args, *self.weights.of(args), *[viewed(args) for viewed in self._viewed]
        if self._open_report is not None:
            self._report_added_bytes(self._open_report, args)
        return self._pick(available)

    def _report_added_bytes(self, report: Report, args: Sequence[Any]) -> None:
        """Corrects the report's added bytes. Only a call shows which weights are tied."""
        entries = self.weights.entries(args)
        if entries is None:  # weights of fake or wrapped tensors are not kept
            return
        self._open_report = None
        added = sum(entry.bytes for entry in {*entries})
        if added != report.bytes_added:
            report.bytes_added = added
            store.save_report(report)
