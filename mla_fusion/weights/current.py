"""Are packed weights those of the parameters that a step is called with? Asked at each step.

Address and version counter of each parameter are compared, on the host: no byte of a weight is read,
and nothing waits for a device. Under ``Config(updates="rounds")`` one share of the bytes is looked at
besides (:mod:`mla_fusion.weights.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from mla_fusion.compat import version_of
from mla_fusion.modes import outside_modes
from mla_fusion.weights.cache import Entry, renewals
from mla_fusion.weights.rounds import Rounds, Watched, warn_once


class Use(NamedTuple):
    """A packed weight, and which arguments it was made of: positions, and names in the user's model."""

    entry: Entry
    positions: tuple[int, ...]
    names: tuple[str, ...]


def _items(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """``args`` at these positions."""
    if len(positions) == 1:
        return lambda args: (args[positions[0]],)
    return itemgetter(*positions) if positions else lambda args: ()


class Current:
    """The packed weights of one set of parameters, and what must still hold for them to be current.

    before  the same, before something was packed anew
    """

    def __init__(self, uses: Sequence[Use], args: Sequence[Any], before: Current | None = None) -> None:
        self.entries = tuple(use.entry for use in uses)
        self._numbers: dict[int, Any] = {}
        sources: dict[tuple[int, int | None], Watched] = {}
        for use in uses:
            tensors = iter(use.entry.sources)
            for position, name in zip(use.positions, use.names, strict=True):
                if not isinstance(args[position], torch.Tensor):
                    self._numbers[position] = args[position]
                    continue
                watched = Watched(position, next(tensors), name)
                sources.setdefault((position, watched.source.version), watched)
        self._uses = tuple(uses)
        counted = {at: each.source for at, each in sources.items() if at[1] is not None}
        self._of = _items([position for position, _ in sources])
        self._pointers = [each.source.pointer for each in sources.values()]
        self._counted = _items([position for position, _ in counted])
        self._versions = [source.version for source in counted.values()]
        self._watched = tuple(each for each in sources.values() if len(each.source.content))
        self._renewals = renewals()
        self._rounds: Rounds | None = None
        self._in_full = any(use.entry.updates == "every call" for use in uses)
        if not self._in_full and self._watched:
            self._rounds = Rounds(self._watched, before._rounds if before is not None else None)

    @property
    def is_current(self) -> bool:
        return all(entry.packed is not None for entry in self.entries)

    def holds(self, args: Sequence[Any], looks: bool = True) -> bool:
        """Whether the arguments are those that the weights were packed of, as they were.

        looks  is a share of the bytes to be looked at too
        """
        if self._renewals != renewals():
            return False
        try:  # maps: the loop over hundreds of weights runs in C
            if list(map(torch.Tensor.data_ptr, self._of(args))) != self._pointers:
                return False
            if list(map(version_of, self._counted(args))) != self._versions:
                return False
        except (RuntimeError, TypeError):  # fake, or made under inference mode; no tensor
            return False
        for position, number in self._numbers.items():
            if args[position] != number:
                return False
        if looks and self._rounds is not None:
            changed = self._rounds.step(args)
            if changed is not None:
                self._void(changed)
                warn_once(changed, self._rounds.steps)
                return False
        return not self._in_full or self._hold_the_same(args)

    def _void(self, changed: Watched) -> None:
        """What was made of the tensor, in whatever graph, is to be packed again."""
        for use in self._uses:
            if changed.position in use.positions:
                use.entry.packed = None

    def _hold_the_same(self, args: Sequence[Any]) -> bool:
        with outside_modes():
            return all(each.source.is_still(args[each.position], "every call") for each in self._watched)
