"""A compiled graph behind its boundary: what is done to the caller's arguments before each call.

Weights are packed once and caches viewed. A step at which nothing has changed costs a few comparisons a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion.compat import storage_id, version_of
from mla_fusion.compile.slots import SlotCheck
from mla_fusion.fx.held import Exact
from mla_fusion.fx.pool_parts import Part
from mla_fusion.page import live
from mla_fusion.report.report import Report
from mla_fusion.weights import cache
from mla_fusion.weights.fingerprint import fingerprint
from mla_fusion.weights.share import Inverse


@dataclass(frozen=True)
class Same:
    """The caller's argument as it is."""

    position: int


@dataclass(frozen=True)
class Packed:
    """A weight made of some of the caller's arguments: tensors, and numbers that its sizes depend on.

    inverse     how the one argument is read out of the packed weight, where it may become a view of it
    trusted     whether version counters are taken at their word
    exact       which numbers of the one argument it must hold
    """

    program: GraphModule
    signature: str
    positions: tuple[int, ...]
    inverse: Inverse | None = None
    trusted: bool = False
    exact: Exact | None = None
    packing: cache.Packing = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        packing = cache.Packing(self.program, self.signature, self.inverse, self.trusted, self.exact)
        object.__setattr__(self, "packing", packing)

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        packed = self.entry(args).packed
        assert packed is not None
        return packed

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


class _Known:
    """The packed weights of one set of parameters, and what must still hold for them to be current."""

    def __init__(self, packed: Sequence[tuple[int, Packed, cache.Entry]], args: Sequence[Any]) -> None:
        self.entries = tuple((place, entry) for place, _, entry in packed)
        self._tensors: dict[tuple[int, int | None], tuple[int, int, int, int | None]] = {}
        self._numbers: dict[int, Any] = {}
        contents: dict[int, torch.Tensor] = {}
        for _, adaptor, entry in packed:
            sources = iter(entry.sources)
            for position in adaptor.positions:
                if not isinstance(args[position], torch.Tensor):
                    self._numbers[position] = args[position]
                    continue
                known = next(sources)
                check = (position, known.storage, known.pointer, known.version)
                self._tensors[position, known.version] = check
                if known.content is not None:
                    contents[position] = known.content
        self._checks = tuple(self._tensors.values())
        self._counts = tuple(self._numbers.items())
        self._compared = tuple(contents)
        self._contents = torch.cat([content.cpu() for content in contents.values()]) if contents else None

    @property
    def is_whole(self) -> bool:
        """Whether none of its weights is void."""
        return all(entry.packed is not None for _, entry in self.entries)

    def insert(self, inputs: list[Any]) -> bool:
        """Put the weights among the inputs; False where one is void by now."""
        for place, entry in self.entries:
            packed = inputs[place] = entry.packed
            if packed is None:
                return False
        return True

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the arguments are those that the weights were packed of, as they were."""
        try:
            for position, storage, pointer, version in self._checks:
                value = args[position]
                if (
                    storage_id(value) != storage
                    or value.data_ptr() != pointer
                    or (version is not None and version_of(value) != version)
                ):
                    return False
        except (RuntimeError, TypeError):  # no version counter; no tensor
            return False
        for position, number in self._counts:
            if args[position] != number:
                return False
        if self._contents is None:
            return True
        found = torch.cat([fingerprint(args[position]) for position in self._compared])
        return torch.equal(found.cpu(), self._contents)  # the one wait for a device


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
        self._viewed = [(place, item) for place, item in enumerate(self.adaptors) if isinstance(item, Viewed)]
        self._positions = [item.position if isinstance(item, Same) else None for item in self.adaptors]
        sources = (position for _, item in self._packed for position in item.positions)
        self._first = next(sources, None)
        self._known: dict[object, _Known] = {}  # of each set of parameters that the graph is called with

    def __call__(self, *args: Any) -> Any:
        for check in self.checks:
            check(args)
        return self.compiled(*self.inputs(args))

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of the compiled graph."""
        inputs = [None if position is None else args[position] for position in self._positions]
        if self._packed:
            known = self._known.get(self._key(args))
            if known is None or not known.holds(args):
                known = self._prepare(args)
            while not known.insert(inputs):  # another thread has found a weight changed meanwhile
                known = self._prepare(args)
        for place, viewed in self._viewed:
            inputs[place] = viewed(args)
        return inputs

    def _key(self, args: Sequence[Any]) -> object:
        """Tells apart sets of parameters, for a graph that serves several layers."""
        first = args[self._first] if self._first is not None else None
        return storage_id(first) if isinstance(first, torch.Tensor) else first

    def _prepare(self, args: Sequence[Any]) -> _Known:
        """Pack what is not packed, or not any more."""
        cache.sweep()
        self._known = {key: known for key, known in self._known.items() if known.is_whole}
        packed = [(place, adaptor, adaptor.entry(args)) for place, adaptor in self._packed]
        for _, adaptor, _ in packed:
            adaptor.packing.sweep()
        known = self._known[self._key(args)] = _Known(packed, args)
        if self._unsettled is not None:
            self._settle(self._unsettled, known)
        return known

    def _settle(self, report: Report, known: _Known) -> None:
        """What was added shows in the first call: tied weights look like any other while compiling."""
        self._unsettled = None
        added = sum(entry.bytes for entry in {entry for _, entry in known.entries})
        if added != report.bytes_added:
            report.bytes_added = added
            live.save(report)
