"""Which repairs make a hand-written call right: each is tried, and so are two and three together.

The values that a call can alter come apart: rows of the latent cache, rows of the key's cache, and everything else. One
after the other is made right, by the fewest repairs that touch it, on top of those found before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from mla_fusion.by_hand.calls import Call, Watch
from mla_fusion.by_hand.repair import KR, KV, QUERY, Repair
from mla_fusion.by_hand.repairs import candidates
from mla_fusion.by_hand.roles import roles_of
from mla_fusion.by_hand.values import Values, errors, values_of

_REFUSED = 1e3  # stands for the error of a call that does not run
_FEW = 30  # candidates up to which three are tried together
_SMALL = 2e-6  # the mean square of a latent at which an epsilon of 1e-6 weighs half as much as the row


@dataclass
class Subject:
    """A hand-written function beside the one that it should equal, on some draws of the inputs.

    calls    of a run as written
    memory   the names of that run's arguments by where they lay
    tries    the most runs
    only     the number of draws that are looked at now, None: all
    """

    fused: Callable[..., Any]
    draws: dict[str, Sequence[Any]]
    wanted: dict[str, Values]
    tolerance: float
    calls: Sequence[Call]
    memory: Mapping[int, str]
    tries: int
    runs: int = 0
    only: int | None = None
    _known: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict)

    def errors(self, repairs: Sequence[Repair], wanted: Sequence[str] = ()) -> dict[str, float]:
        """Of each value, the largest over the draws; infinite for all where the repaired call does not run.

        ``wanted``: the first draw in which one of these values is wrong ends it.
        """
        found: dict[str, float] = {}
        for name in list(self.draws)[: self.only]:
            key = name, *sorted(str(id(item)) for item in repairs)
            if key not in self._known:
                self._known[key] = self._measured(name, repairs)
            for value, error in self._known[key].items():
                found[value] = max(found.get(value, 0.0), error)
            if wanted and not self.is_right(found, wanted):
                break
        return found

    def _measured(self, draw: str, repairs: Sequence[Repair]) -> dict[str, float]:
        watch = Watch([item.change for item in repairs], [item.after for item in repairs if item.after])
        self.runs += 1
        want = self.wanted[draw]
        try:
            return errors(want, values_of(self.fused, self.draws[draw], watch))
        except Exception:  # a mode, a shape or a slot that the operator refuses
            return dict.fromkeys(errors(want, Values({}, {})), float("inf"))

    def is_right(self, found: Mapping[str, float], names: Iterable[str] | None = None) -> bool:
        return all(found.get(name, float("inf")) <= self.tolerance for name in (names if names is not None else found))

    def wrong(self, found: Mapping[str, float]) -> list[str]:
        return [name for name, error in found.items() if not error <= self.tolerance]


def search(subject: Subject, options: Sequence[Repair]) -> tuple[list[Repair], dict[str, float]]:
    """The repairs found, and the errors that are left with them."""
    chosen: list[Repair] = []
    for count in range(1, len(subject.draws) + 1):
        subject.only = count
        # An epsilon is nothing beside rows of usual size: it has no part in what is wrong with them.
        last = count == len(subject.draws)
        fitting = [item for item in options if last or item.code != "epsilon"]
        for names, touched in _in_order(subject, subject.errors(chosen)):
            if not subject.is_right(subject.errors(chosen), names):
                chosen += _fewest(subject, chosen, [item for item in fitting if item.touches & touched], names)
    subject.only = None
    chosen = _without_the_idle(subject, chosen)
    return chosen, subject.errors(chosen)


def _in_order(subject: Subject, found: Mapping[str, float]) -> Iterator[tuple[list[str], frozenset[str]]]:
    """The latent cache, the key's cache, then all: what is less entangled first."""
    parts = _caches(subject)
    for name in (KV, KR):
        held = [value for value in found if parts.get(value) == name]
        if held:
            yield held, frozenset({name})
    yield list(found), frozenset({QUERY, KV, KR})


def _caches(subject: Subject) -> dict[str, str]:
    """Which of the compared values is which cache, by the memory that the calls are given."""
    found: dict[str, str] = {}
    for call in subject.calls:
        roles = roles_of(call.short)
        for role, part in ((roles.kv_cache, KV), (roles.kr_cache, KR)):
            cache = call.arguments.get(role)
            if isinstance(cache, Tensor) and cache.numel():
                name = subject.memory.get(cache.untyped_storage().data_ptr(), "")
                found[name] = part if found.get(name, part) == part else ""
    return found


def _fewest(subject: Subject, chosen: list[Repair], options: list[Repair], names: list[str]) -> list[Repair]:
    """The fewest of the options that make these values right; where none do, the one that helps most, or nothing."""
    start = _total(subject.errors(chosen), names)
    alone = [(item, _total(subject.errors([*chosen, item], names), names)) for item in options]
    if start < _REFUSED:
        alone = [(item, total) for item, total in alone if total < _REFUSED]
    singles = [item for item, _ in sorted(alone, key=lambda pair: pair[1])]
    for count in (1, 2, 3):
        pool = [item for item, _ in alone] if count == 1 else singles if count == 2 else singles[:_FEW]
        best: tuple[float, list[Repair]] | None = None
        for group in combinations(pool, count):
            if subject.runs >= subject.tries:
                break
            if len({item.argument for item in group}) < count:
                continue
            found = subject.errors([*chosen, *group], names)
            if subject.is_right(found, names):
                total = _total(found, list(found))
                if best is None or total < best[0] / 2:  # of those that differ by rounding, the first
                    best = total, list(group)
        if best is not None:
            return best[1]
    if singles and _total(subject.errors([*chosen, singles[0]]), names) < 0.7 * start:
        return [singles[0], *_fewest_again(subject, [*chosen, singles[0]], options, names)]
    return []


def _fewest_again(subject: Subject, chosen: list[Repair], options: list[Repair], names: list[str]) -> list[Repair]:
    if len(chosen) > 4 or subject.runs >= subject.tries:
        return []
    return _fewest(subject, chosen, [item for item in options if item not in chosen], names)


def _total(found: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(min(found.get(name, _REFUSED), _REFUSED) for name in names)


def _without_the_idle(subject: Subject, chosen: list[Repair]) -> list[Repair]:
    """Without repairs that make no value right: the others do it, or nothing does."""
    reached = subject.errors(chosen)
    for item in list(chosen):
        rest = [other for other in chosen if other is not item]
        found = subject.errors(rest)
        if set(subject.wrong(found)) <= set(subject.wrong(reached)):
            chosen = rest
    return chosen


def options_of(calls: Sequence[Call], vectors: list[tuple[str, Tensor]], epsilons: list[float]) -> list[Repair]:
    """The repairs of every call together, then, of several calls, those of each."""
    if not calls:
        return []
    found = candidates(calls[0], vectors, epsilons)
    if len(calls) > 1:
        found += [item.at(call.place) for call in calls for item in candidates(call, vectors, epsilons)]
    return found


def draws_of(calls: Sequence[Call], inputs: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The inputs as given; and, where x is one of them, so small that an epsilon counts."""
    draws: dict[str, Sequence[Any]] = {"the inputs as given": inputs}
    factor = _factor(calls)
    if factor is not None:
        width, times = factor
        small = [
            value * times
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.shape[-1] == width
            else value
            for value in inputs
        ]
        if any(a is not b for a, b in zip(small, inputs, strict=True)):
            draws["x so small that an epsilon counts"] = small
    return draws


def _factor(calls: Sequence[Call]) -> tuple[int, float] | None:
    """The width of x, and what makes a latent's mean square about an epsilon."""
    for call in calls:
        roles = roles_of(call.short)
        x, weight = call.arguments.get(roles.x), call.arguments.get(roles.down_query or roles.down)
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2 or roles.transposed:
            continue
        if x.dtype == torch.int8 or weight.dtype == torch.int8:
            continue
        latent = x.double().flatten(0, -2) @ weight.double()
        square = float(latent.square().mean())
        if square > 0:
            return int(x.shape[-1]), (_SMALL / square) ** 0.5
    return None
