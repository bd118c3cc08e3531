"""A compiled graph behind its boundary: what is done to the caller's arguments before each call.

Weights are packed once and caches viewed. A step at which nothing has changed costs a few
comparisons a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_fusion.compile.slots import SlotCheck
from mla_fusion.fx.pool_parts import Part
from mla_fusion.report import store
from mla_fusion.report.report import Report
from mla_fusion.weights.cache import Packed
from mla_fusion.weights.current import Weights, items


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
        self._same = items([item.position for item in self.adaptors if isinstance(item, Same)])
        self._viewed = [item for item in self.adaptors if isinstance(item, Viewed)]
        kinds = [Same, Packed, Viewed]
        order = sorted(range(len(self.adaptors)), key=lambda i: kinds.index(type(self.adaptors[i])))
        self._arrange = None  # what is put together by kind stands in the graph's order
        if order != sorted(order):
            self._arrange = items(sorted(range(len(order)), key=order.__getitem__))

    def __call__(self, *args: Any) -> Any:
        for check in self.checks:
            check(args)
        return self.compiled(*self.inputs(args))

    def inputs(self, args: Sequence[Any]) -> Sequence[Any]:
        """The inputs of the compiled graph."""
        made = (
            *self._same(args),
            *self.weights.of(args),
            *[viewed(args) for viewed in self._viewed],
        )
        if self._unsettled is not None:
            self._settle(self._unsettled, args)
        return made if self._arrange is None else self._arrange(made)

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
            store.save(report)
