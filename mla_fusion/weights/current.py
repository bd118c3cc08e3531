"""Checks at each step that packed weights are those of the parameters that the step is called with.

The host compares the address and the version counter of each parameter: it reads no byte of a
weight, and waits for no device. With ``Config(updates="rounds")`` it also looks at a share of the
bytes, at some of the steps (:mod:`mla_fusion.weights.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from mla_fusion.compat import storage_id, version_of
from mla_fusion.modes import is_capturing, outside_modes
from mla_fusion.weights import cache
from mla_fusion.weights.cache import Entry, Packed
from mla_fusion.weights.rounds import Rounds, Watched, warn_of_changes


def items(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that takes the arguments at these positions."""
    if len(positions) == 1:
        return lambda args: (args[positions[0]],)
    return itemgetter(*positions) if positions else lambda args: ()


class Weights:
    """The packed weights of one graph, remembered for each set of parameters."""

    def __init__(self, wanted: Sequence[Packed]) -> None:
        self.wanted = tuple(wanted)
        self._sources = [position for item in wanted for position in item.positions]
        self._sets: dict[object, Current] = {}
        self._entries = set[Entry]()  # expired entries too: they are packed in place

    def of(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Returns the weights packed of these arguments, in the order of ``wanted``."""
        if not self.wanted:
            return ()
        current = self._sets.get(self._key(args))
        packed = current.packed if current is not None and current.holds(args) else None
        if packed is None and not cache.are_plain([args[position] for position in self._sources]):
            return tuple(item(args) for item in self.wanted)
        while packed is None:  # another thread may find a weight changed in between
            packed = self._prepare(args)
        return packed

    def entries(self, args: Sequence[Any]) -> tuple[Entry, ...] | None:
        """Returns the entries of these arguments' weights, None if the weights are not kept."""
        current = self._sets.get(self._key(args))
        return current.entries if current is not None else None

    def _key(self, args: Sequence[Any]) -> object:
        """Returns a key for these arguments: a graph may serve several layers.

        The identity of a parameter is its key. So another memory is a change, and the weights of a
        memory to which the parameter returns are compared in full (an average that is exchanged for
        the weights and back).
        """
        first = args[self._sources[0]] if self._sources else None
        if type(first) is Parameter:
            return id(first)
        try:
            return storage_id(first) if isinstance(first, Tensor) else first
        except RuntimeError:  # a transform's wrapper has no memory
            return None

    def _prepare(self, args: Sequence[Any]) -> tuple[Tensor, ...] | None:
        """Packs what is not packed, or has changed. Returns None if it changes meanwhile."""
        cache.sweep()
        key = self._key(args)
        previous = self._sets.get(key)
        sets = list(self._sets.items())  # other threads add theirs
        self._sets = {key: current for key, current in sets if current.packed is not None}
        in_use = previous.entries if previous is not None else ()
        uses = [(item, item.of(item.sources(args), in_use)) for item in self.wanted]
        self._sets[key] = current = Current(uses, args, previous)
        self._entries.update(current.entries)
        void = [entry for entry in list(self._entries) if entry.memory is None]
        self._entries.difference_update(void)
        return current.packed


class Current:
    """The packed weights of one set of parameters.

    uses      each packing with its entry
    previous  the packed weights before a change; the rounds continue
    packed    the weights; None if a weight is not current
    """

    def __init__(
        self, uses: Sequence[tuple[Packed, Entry]], args: Sequence[Any], previous: Current | None
    ) -> None:
        self.entries = tuple(entry for _, entry in uses)
        self._uses = uses
        self._numbers: dict[int, Any] = {}
        by_version: dict[tuple[int, int | None], Watched] = {}
        for packed, entry in uses:
            tensors = iter(entry.sources)
            for position, name in zip(packed.positions, packed.names, strict=True):
                if isinstance(args[position], Tensor):
                    each = Watched(position, next(tensors), name)
                    by_version.setdefault((position, each.source.version), each)
                else:
                    self._numbers[position] = args[position]
        watched = by_version.values()
        counted = [each for each in watched if each.source.version is not None]
        self._tensors_of = items([each.position for each in watched])
        self._pointers = [each.source.pointer for each in watched]
        self._counted_of = items([each.position for each in counted])
        self._versions = [each.source.version for each in counted]
        self._compared = [each for each in watched if len(each.source.content)]
        self._in_full = any(packed.updates == "every call" for packed, _ in uses)
        self._rounds: Rounds | None = None
        if self._compared and not self._in_full:
            self._rounds = Rounds(
                self._compared, previous._rounds if previous is not None else None
            )
        for entry in self.entries:
            entry.users.add(self)  # before the weight is read: it may expire in between
        packed_now = tuple(entry.packed for entry in self.entries if entry.packed is not None)
        self.packed: tuple[Tensor, ...] | None = packed_now
        if len(packed_now) < len(uses) or any(entry.packed is None for entry in self.entries):
            self.packed = None

    def forget(self) -> None:
        self.packed = None

    def holds(self, args: Sequence[Any]) -> bool:
        """Returns True if the weights were packed of these arguments, and these are unchanged."""
        try:  # maps: the loop over hundreds of weights runs in C
            if list(map(Tensor.data_ptr, self._tensors_of(args))) != self._pointers:
                return False
            if list(map(version_of, self._counted_of(args))) != self._versions:
                return False
        except (RuntimeError, TypeError):  # fake, or made under inference mode; no tensor
            return False
        if any(args[position] != number for position, number in self._numbers.items()):
            return False
        if self._rounds is None:
            return not (self._in_full and self._changed(args))
        noticed = self._rounds.step(args)
        if noticed is None:
            return True
        # An optimizer or a flat buffer changes many tensors, so all are compared, unless a device
        # captures a graph.
        changed = {noticed.position: noticed}
        if not is_capturing(args[noticed.position].device):
            changed |= {each.position: each for each in self._changed(args)}
        for packed, entry in self._uses:
            if not changed.keys().isdisjoint(packed.positions):
                entry.expire()  # every graph packs it again
        warn_of_changes([*changed.values()], self._rounds.steps)
        return False

    def _changed(self, args: Sequence[Any]) -> list[Watched]:
        """Returns the sources whose content has changed. Waits for their device."""
        with outside_modes():
            return [
                each
                for each in self._compared
                if not each.source.is_still(args[each.position], True)
            ]
