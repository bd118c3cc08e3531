"""Are packed weights those of the parameters that a step is called with? Asked at each step.

Address and version counter of each parameter are compared, on the host: no byte of a weight is
read, and nothing waits for a device. Under ``Config(updates="rounds")`` one share of the bytes is
looked at besides, at one step of several (:mod:`mla_fusion.weights.rounds`).
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
    """Gives ``args`` at these positions."""
    if len(positions) == 1:
        return lambda args: (args[positions[0]],)
    return itemgetter(*positions) if positions else lambda args: ()


class Weights:
    """The packed weights that one graph takes, remembered for each set of parameters."""

    def __init__(self, wanted: Sequence[Packed]) -> None:
        self.wanted = tuple(wanted)
        self._sources = [position for item in wanted for position in item.positions]
        self._known: dict[object, Current] = {}
        self._keys: dict[int, object] = {}  # by parameter: what it was found at

    def of(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The weights packed of these arguments, in the order in which they are wanted."""
        if not self.wanted:
            return ()
        key = self._key(args)
        first = args[self._sources[0]] if self._sources else None
        if type(first) is Parameter and self._keys.get(id(first)) != key:
            self._move(id(first), key)
        known = self._known.get(key)
        packed = known.packed if known is not None and known.holds(args) else None
        if packed is None:
            if not cache.are_plain([args[position] for position in self._sources]):
                return tuple(item(args) for item in self.wanted)
            while packed is None:  # another thread has found a weight changed meanwhile
                packed = self._prepare(args)
        return packed

    def entries(self, args: Sequence[Any]) -> tuple[Entry, ...] | None:
        """Where the weights of these arguments are kept; None if they are not."""
        known = self._known.get(self._key(args))
        return known.entries if known is not None else None

    def _key(self, args: Sequence[Any]) -> object:
        """Tells apart sets of parameters, for a graph that serves several layers."""
        first = args[self._sources[0]] if self._sources else None
        try:
            return storage_id(first) if isinstance(first, Tensor) else first
        except RuntimeError:  # a transform's wrapper has no memory
            return None

    def _move(self, parameter: int, key: object) -> None:
        """The memory that a parameter leaves is not watched any more, so what was packed of it is
        compared should it come back (an average that is exchanged for the weights and back).
        """
        if parameter in self._keys:
            self._known.pop(self._keys[parameter], None)
        self._keys[parameter] = key

    def _prepare(self, args: Sequence[Any]) -> tuple[Tensor, ...] | None:
        """Pack what is not packed, or not any more."""
        cache.sweep()
        before = self._known.get(self._key(args))
        self._known = {key: known for key, known in self._known.items() if known.packed is not None}
        in_use = before.entries if before is not None else ()
        uses = [(item, item.of(item.sources(args), in_use)) for item in self.wanted]
        for item in self.wanted:
            item.sweep()
        known = self._known[self._key(args)] = Current(uses, args, before)
        keys = self._keys.copy().items()
        self._keys = {parameter: key for parameter, key in keys if key in self._known}
        return known.packed


class Current:
    """The packed weights of one set of parameters, and what must still hold for them to be current.

    packed  the weights, None as soon as one of them is not current
    before  the same, before something was packed anew
    """

    def __init__(
        self,
        uses: Sequence[tuple[Packed, Entry]],
        args: Sequence[Any],
        before: Current | None,
    ) -> None:
        self.entries = tuple(entry for _, entry in uses)
        self._numbers: dict[int, Any] = {}
        sources: dict[tuple[int, int | None], Watched] = {}
        for packed, entry in uses:
            tensors = iter(entry.sources)
            for position, name in zip(packed.positions, packed.names, strict=True):
                if not isinstance(args[position], Tensor):
                    self._numbers[position] = args[position]
                    continue
                watched = Watched(position, next(tensors), name)
                sources.setdefault((position, watched.source.version), watched)
        self._uses = tuple(uses)
        counted = {at: each.source for at, each in sources.items() if at[1] is not None}
        self._of = items([position for position, _ in sources])
        self._pointers = [each.source.pointer for each in sources.values()]
        self._counted = items([position for position, _ in counted])
        self._versions = [source.version for source in counted.values()]
        self._watched = tuple(each for each in sources.values() if len(each.source.content))
        self._in_full = any(entry.updates == "every call" for entry in self.entries)
        self._rounds = None
        if not self._in_full and self._watched:
            self._rounds = Rounds(self._watched, before._rounds if before is not None else None)
        for entry in self.entries:
            entry.users.add(self)  # before the weight is read: it may expire in between
        whole = tuple(entry.packed for entry in self.entries if entry.packed is not None)
        self.packed: tuple[Tensor, ...] | None = whole if len(whole) == len(self.entries) else None
        if any(entry.packed is None for entry in self.entries):
            self.packed = None

    def forget(self) -> None:
        self.packed = None

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the arguments are those that the weights were packed of, as they were."""
        try:  # maps: the loop over hundreds of weights runs in C
            tensors = self._of(args)
            if list(map(Tensor.data_ptr, tensors)) != self._pointers:
                return False
            if list(map(version_of, self._counted(args))) != self._versions:
                return False
        except (RuntimeError, TypeError):  # fake, or made under inference mode; no tensor
            return False
        for position, number in self._numbers.items():
            if args[position] != number:
                return False
        changed = self._rounds.step(args) if self._rounds is not None else None
        if self._rounds is not None and changed is not None:
            # of changes that torch does not count one seldom comes alone (an optimizer, a flat
            # buffer): all are compared, for which a device must not be capturing a graph
            waits = not is_capturing(args[changed.position].device)
            others = [each for each in self._changed(args) if each is not changed] if waits else []
            positions = {each.position for each in (changed, *others)}
            for packed, entry in self._uses:  # in whatever graph, is to be packed again
                if not positions.isdisjoint(packed.positions):
                    entry.expire()
            warn_of_changes([changed, *others], self._rounds.steps)
            return False
        return not (self._in_full and self._changed(args))

    def _changed(self, args: Sequence[Any]) -> list[Watched]:
        """All whose content is another one. Waits for their device."""
        with outside_modes():
            return [
                each
                for each in self._watched
                if not each.source.is_still(args[each.position], "every call")
            ]
