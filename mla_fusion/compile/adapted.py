"""A compiled graph behind its boundary: what is done to the caller's arguments before each call.

Weights are packed once and caches viewed. A step at which nothing has changed costs a few comparisons a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion.compat import storage_id
from mla_fusion.compile.slots import SlotCheck
from mla_fusion.fx.held import Exact
from mla_fusion.fx.pool_parts import Part
from mla_fusion.page import live
from mla_fusion.report.report import Report
from mla_fusion.weights import cache
from mla_fusion.weights.current import Current, Use
from mla_fusion.weights.share import Inverse


@dataclass(frozen=True)
class Same:
    """The caller's argument as it is."""

    position: int


@dataclass(frozen=True)
class Packed:
    """A weight made of some of the caller's arguments: tensors, and numbers that its sizes depend on.

    inverse     how the one argument is read out of the packed weight, where it may become a view of it
    names       of the arguments in the user's model
    updates     as in Config
    exact       which numbers of the one argument it must hold
    """

    program: GraphModule
    signature: str
    positions: tuple[int, ...]
    names: tuple[str, ...]
    inverse: Inverse | None = None
    updates: str = "rounds"
    exact: Exact | None = None
    packing: cache.Packing = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        packing = cache.Packing(self.program, self.signature, self.inverse, self.updates, self.exact)
        object.__setattr__(self, "packing", packing)

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        return self.packing.weight(self._sources(args))

    def entry(self, args: Sequence[Any]) -> cache.Entry:
        return self.packing.of(self._sources(args))

    def bytes(self, args: Sequence[Any]) -> int:
        """What it takes beside these arguments, once it has been made of them."""
        return self.packing.bytes(self._sources(args))

    def _sources(self, args: Sequence[Any]) -> list[Any]:
        return [args[position] for position in self.positions]


@dataclass(frozen=True)
class Viewed:
    """A cache, or a part of a pool of them, seen in the kernel's shape: the caller's memory, no copy.

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
        unsettled: Report | None = None,
        checks: Sequence[SlotCheck] = (),
    ) -> None:
        self.compiled, self.adaptors, self.checks = compiled, tuple(adaptors), tuple(checks)
        self._unsettled = unsettled  # the report whose bytes are known once weights have been packed
        self._packed = [(place, item) for place, item in enumerate(self.adaptors) if isinstance(item, Packed)]
        self._places = [place for place, _ in self._packed]
        self._viewed = [(place, item) for place, item in enumerate(self.adaptors) if isinstance(item, Viewed)]
        self._positions = [item.position if isinstance(item, Same) else None for item in self.adaptors]
        self._sources = [position for _, item in self._packed for position in item.positions]
        self._known: dict[object, Current] = {}  # of each set of parameters that the graph is called with

    def __call__(self, *args: Any) -> Any:
        for check in self.checks:
            check(args)
        return self.compiled(*self.inputs(args))

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of the compiled graph."""
        inputs = [None if position is None else args[position] for position in self._positions]
        if self._packed:
            self._insert_packed(inputs, args)
        for place, viewed in self._viewed:
            inputs[place] = viewed(args)
        return inputs

    def _insert_packed(self, inputs: list[Any], args: Sequence[Any]) -> None:
        known = self._known.get(self._key(args))
        if known is None or not known.holds(args):
            if not cache.are_plain([args[position] for position in self._sources]):
                for place, adaptor in self._packed:
                    inputs[place] = adaptor(args)
                return
            known = self._prepare(args)
        while not self._insert(known, inputs):  # another thread has found a weight changed meanwhile
            known = self._prepare(args)

    def _insert(self, known: Current, inputs: list[Any]) -> bool:
        """Put the weights among the inputs; False where one is not current any more."""
        for place, entry in zip(self._places, known.entries, strict=True):
            packed = inputs[place] = entry.packed
            if packed is None:
                return False
        return True

    def _key(self, args: Sequence[Any]) -> object:
        """Tells apart sets of parameters, for a graph that serves several layers."""
        first = args[self._sources[0]] if self._sources else None
        try:
            return storage_id(first) if isinstance(first, torch.Tensor) else first
        except RuntimeError:  # a transform's wrapper has no memory
            return None

    def _prepare(self, args: Sequence[Any]) -> Current:
        """Pack what is not packed, or not any more."""
        cache.sweep()
        before = self._known.get(self._key(args))
        self._known = {key: known for key, known in self._known.items() if known.is_current}
        packed = [Use(adaptor.entry(args), adaptor.positions, adaptor.names) for _, adaptor in self._packed]
        for _, adaptor in self._packed:
            adaptor.packing.sweep()
        known = self._known[self._key(args)] = Current(packed, args, before)
        if self._unsettled is not None:
            self._settle(self._unsettled, known)
        return known

    def _settle(self, report: Report, known: Current) -> None:
        """What was added shows in the first call: tied weights look like any other while compiling."""
        self._unsettled = None
        added = sum(entry.bytes for entry in {*known.entries})
        if added != report.bytes_added:
            report.bytes_added = added
            live.save(report)
