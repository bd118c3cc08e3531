"""Which repairs make a hand-written call right: each is tried, and so are two and three together.

The values that a call can alter come apart: rows of the latent cache, rows of the key's cache, and
everything else. One after the other is made right, by the fewest repairs that touch it, on top of
those found before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from operator import itemgetter
from time import perf_counter

import torch

from mla_fusion.tools.by_hand import memory
from mla_fusion.tools.by_hand.calls import Call, Repair, Target, Watch
from mla_fusion.tools.by_hand.draws import Draw
from mla_fusion.tools.by_hand.outcome import Errors
from mla_fusion.tools.by_hand.repairs import Parameters, candidates
from mla_fusion.tools.by_hand.roles import ALL, KR, KV, Touched
from mla_fusion.tools.by_hand.values import Values, errors, values_of

_REFUSED = 1e3  # stands for the error of a call that does not run
_FEW = 30  # candidates up to which three are tried together
_MOST = 4  # repairs beside which no further one is looked for

Repairs = list[Repair]


@dataclass
class Subject:
    """A hand-written function beside the one that it should equal, on some draws of the inputs.

    wanted   the reference's values in each draw
    limits   of each value, the error that is rounding
    calls    of a run as written
    places   the names of what that run could write, by where it lay
    names    the reference's names of what ``fused`` holds
    tiles    the caches of int8 tiles among the values
    tries    the most runs; ``until``: when to stop, as perf_counter has it
    only     the number of draws that are looked at now, None: all
    """

    fused: Target
    draws: Sequence[Draw]
    wanted: Sequence[Values]
    limits: Errors
    calls: Sequence[Call]
    places: Mapping[int, str]
    names: Mapping[str, str]
    tiles: Mapping[str, tuple[int, int]]
    tries: int
    until: float
    runs: int = 0
    only: int | None = None
    _known: dict[tuple[int, ...], Errors] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.runs >= self.tries or perf_counter() > self.until

    def errors(self, repairs: Sequence[Repair], wanted: Sequence[str] = ()) -> Errors:
        """Of each value, the largest over the draws; infinite for all where the repaired call does
        not run.

        ``wanted``: the first draw in which one of these values is wrong ends it.
        """
        found: Errors = {}
        for place in range(len(self.draws))[: self.only]:
            key = place, *sorted(map(id, repairs))
            if key not in self._known:
                self._known[key] = self._measured(place, repairs)
            for value, error in self._known[key].items():
                found[value] = max(found.get(value, 0.0), error)
            if wanted and self.wrong(found, wanted):
                break
        return found

    def _measured(self, place: int, repairs: Sequence[Repair]) -> Errors:
        draw, want = self.draws[place], self.wanted[place]
        watch = Watch(draw.change, repairs)
        self.runs += 1
        try:
            return errors(want, values_of(self.fused, draw.inputs, watch, self.names), self.tiles)
        except Exception:  # a mode, a shape or a slot that the operator refuses
            return {
                name: float("inf")
                for name, value in want.held.items()
                if name not in want.before or not torch.equal(value, want.before[name])
            }

    def wrong(self, found: Errors, names: Iterable[str] | None = None) -> list[str]:
        """Of these values, or of all, those that are off by more than rounding."""
        asked = found if names is None else names
        return [name for name in asked if not found.get(name, float("inf")) <= self.limits[name]]


def search(subject: Subject, options: Sequence[Repair]) -> tuple[Repairs, Errors]:
    """The repairs found, and the errors that are left with them."""
    chosen: Repairs = []
    for count in range(1, len(subject.draws) + 1):
        subject.only = count
        # An epsilon is nothing beside rows of usual size: it has no part in what is wrong with
        # them.
        last = count == len(subject.draws)
        fitting = [item for item in options if last or item.code != "epsilon"]
        for names, touched in _in_order(subject, subject.errors(chosen)):
            if subject.wrong(subject.errors(chosen), names):
                chosen += _fewest(
                    subject, chosen, [item for item in fitting if item.touches & touched], names
                )
    subject.only = None
    chosen = _without_the_idle(subject, chosen)
    return chosen, subject.errors(chosen)


def _in_order(subject: Subject, found: Errors) -> Iterator[tuple[list[str], Touched]]:
    """The latent cache, the key's cache, then all: what is less entangled first."""
    parts: dict[str, Touched] = {}
    for call in subject.calls:
        for _, cache, part in call.caches():
            name = subject.places.get(memory.place(cache), "")
            parts[name] = part if parts.get(name, part) == part else frozenset()
    for part in (KV, KR):
        held = [value for value in found if parts.get(value) == part]
        if held:
            yield held, part
    yield list(found), ALL


def _fewest(subject: Subject, chosen: Repairs, options: Repairs, names: list[str]) -> Repairs:
    """The fewest of the options that make these values right; where none do, the one that helps
    most and what then helps beside it, or nothing.
    """
    start = _total(subject.errors(chosen), names)
    alone = [(_total(subject.errors([*chosen, item], names), names), item) for item in options]
    if start < _REFUSED:
        alone = [(total, item) for total, item in alone if total < _REFUSED]
    singles = [item for _, item in sorted(alone, key=itemgetter(0))]
    for count, pool in enumerate(([item for _, item in alone], singles, singles[:_FEW]), 1):
        best: tuple[float, Repairs] | None = None
        for group in combinations(pool, count):
            if subject.is_over:
                break
            if len({item.argument for item in group}) < count:
                continue
            found = subject.errors([*chosen, *group], names)
            total = _total(found, list(found))
            # of those that differ by rounding, the first
            if not subject.wrong(found, names) and (best is None or total < best[0] / 2):
                best = total, list(group)
        if best is not None:
            return best[1]
    if not singles or _total(subject.errors([*chosen, singles[0]]), names) >= 0.7 * start:
        return []
    first = singles[0]
    if len(chosen) >= _MOST or subject.is_over:
        return [first]
    return [
        first,
        *_fewest(subject, [*chosen, first], [item for item in options if item is not first], names),
    ]


def _total(found: Errors, names: Iterable[str]) -> float:
    return sum(min(found.get(name, _REFUSED), _REFUSED) for name in names)


def _without_the_idle(subject: Subject, chosen: Repairs) -> Repairs:
    """Without repairs that make no value right: the others do it, or nothing does."""
    reached = subject.errors(chosen)
    for item in list(chosen):
        rest = [other for other in chosen if other is not item]
        found = subject.errors(rest)
        if set(subject.wrong(found)) <= set(subject.wrong(reached)):
            chosen = rest
    return chosen


def options_of(calls: Sequence[Call], parameters: Parameters, epsilons: list[float]) -> Repairs:
    """The repairs of every call together, then, of several calls, those of each."""
    found = candidates(calls[0], parameters, epsilons)
    if len(calls) > 1:
        found += [
            replace(item, place=call.place)
            for call in calls
            for item in candidates(call, parameters, epsilons)
        ]
    return found
