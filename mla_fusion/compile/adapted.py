"""A compiled graph behind its boundary: what is done to the caller's arguments before each call.

Weights are packed once and caches viewed. A step at which nothing has changed costs a few
comparisons a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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


@dataclass(frozen=True)
class SlotCheck:
    """The slots of one kernel call, made of the caller's arguments.

    program     from the arguments at ``positions`` to the slots [T] or [B, S]; None where the one
                argument is they
    caches      of each cache: its name, what makes it of the caller's arguments, and the width of a
                row
    skips       a token whose slot is negative is left out, by the model as by the kernel
    """

    program: GraphModule | None
    positions: tuple[int, ...]
    caches: tuple[tuple[str, Callable[[Sequence[Any]], torch.Tensor], int], ...]
    skips: bool = False

    def __call__(self, args: Sequence[Any]) -> None:
        """Raises SlotError. Waits for a device: slots have to be read."""
        sources = [args[position] for position in self.positions]
        if any(isinstance(source, FakeTensor) for source in sources):
            return  # a dry run: there are no slots
        with torch.no_grad():
            slots = (
                (sources[0] if self.program is None else self.program(*sources)).reshape(-1).cpu()
            )
        if self.skips:
            # each its own, below every cache
            own = -1 - torch.arange(len(slots), device=slots.device)
            slots = torch.where(slots < 0, own, slots)
        for name, cache, width in self.caches:
            _test(slots, cache(args).numel() // width, name, self.skips)


def _test(slots: torch.Tensor, rows: int, name: str, skips: bool) -> None:
    outside = ((slots >= rows) if skips else (slots < 0) | (slots >= rows)).nonzero()
    if len(outside):
        token = int(outside[0])
        raise SlotError(
            f"slot {int(slots[token])} of token {token} lies outside {name}, which has {rows} rows"
        )
    order = slots.argsort(stable=True)
    again = (slots[order][1:] == slots[order][:-1]).nonzero()
    if len(again):
        first, second = order[int(again[0]) :][:2].tolist()
        raise SlotError(
            f"slot {int(slots[first])} is given to token {first} and to token {second} of one "
            f"write to {name}, "
            f"which has {rows} rows"
        )


@dataclass(frozen=True)
class Same:
    """The caller's argument as it is."""

    position: int


@dataclass(frozen=True)
class Viewed:
    """A cache, or a part of a pool of them, seen in the kernel's shape: the caller's memory, no
    copy.

    shape   None: its own. Raises where the cache is not contiguous and would have to be.
    """

    position: int
    shape: tuple[int, ...] | None
    part: Part | None = None

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        cache: torch.Tensor = args[self.position]
        if self.part is not None:
            cache = self.part.of(cache)
        return cache if self.shape is None else cache.view(self.shape)


Adaptor = Same | Packed | Viewed


class Adapted:
    """The compiled graph with the signature that the caller knows."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        adaptors: Sequence[Adaptor],
        report: Report,
        checks: Sequence[SlotCheck] = (),
    ) -> None:
        self.compiled, self.adaptors, self.checks = compiled, tuple(adaptors), tuple(checks)
        # until the bytes that it names are known: once weights have been packed
        self.weights = Weights([item for item in self.adaptors if isinstance(item, Packed)])
        self._unsettled = report if self.weights.wanted else None
        self._viewed = [item for item in self.adaptors if isinstance(item, Viewed)]
        made = [*self.weights.wanted, *self._viewed]
        places = {id(item): place - len(made) for place, item in enumerate(made)}
        # the caller's arguments, and from the end what is made of them
        self._pick = items(
            [item.position if isinstance(item, Same) else places[id(item)] for item in adaptors]
        )

    def __call__(self, *args: Any) -> Any:
        for check in self.checks:
            check(args)
        return self.compiled(*self.inputs(args))

    def inputs(self, args: Sequence[Any]) -> Sequence[Any]:
        """The inputs of the compiled graph."""
        made = *args, *self.weights.of(args), *[viewed(args) for viewed in self._viewed]
        if self._unsettled is not None:
            self._settle(self._unsettled, args)
        return self._pick(made)

    def _settle(self, report: Report, args: Sequence[Any]) -> None:
        """What was added shows in the first call: tied weights look like any other while
        compiling.
        """
        entries = self.weights.entries(args)
        if entries is None:  # of tensors that are not plain nothing was kept
            return
        self._unsettled = None
        added = sum(entry.bytes for entry in {*entries})
        if added != report.bytes_added:
            report.bytes_added = added
            store.save_report(report)
