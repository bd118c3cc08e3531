"""The ladder of targets: a prologue that one of them does not take is offered to the next of
``Config.targets``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mla_fusion.config import TARGETS, Config
from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.match import halves
from mla_fusion.match.candidate import Candidate, KeyHalf
from mla_fusion.match.finder import Found
from mla_fusion.match.near_miss import NearMiss
from mla_fusion.report.rejection import Refuse


@dataclass(frozen=True)
class Rung:
    """What to plan for a target; a near miss has nothing to plan, and a reason."""

    target: str
    item: Found


_FOLLOWED = {"quant.static": "preprocess"}  # codes whose remedy is to ask for another whole target

Fit = Callable[[Rung, Refuse | None], Refuse | None]
Reject = Callable[[Found, Refuse, Iterable[Refuse]], None]


def descend(item: Found, config: Config, fit: Fit, reject: Reject) -> None:
    """Fit the first rung that takes the item. ``fit`` is told why the one above it did not take the
    item.
    """
    whole, below = _whole(item, config), _halves(item) if "key" in config.offers else ()
    above: Refuse | None = None
    others: list[Refuse] = []
    for rung in whole:
        why = fit(rung, above)
        if why is None:
            return
        if above is None or _FOLLOWED.get(above.code) == rung.target:
            above = why  # what that code's remedy says is done: this is the reason now
        else:
            others.append(why)
        if config.skips(why.code) or why.code in ("skip", "pass.failed"):  # it is to be left alone
            below = ()
            break
    if not whole and not below:
        above = Refuse(
            "target.unlisted", f"Config.targets is {', '.join(config.targets)}", item.nodes[:1]
        )
    failed = [(half, why) for half in below if (why := fit(Rung("key", half), above)) is not None]
    if above is not None and len(failed) == len(below):
        reject(item, above, [*others, *(why for _, why in failed)])
    else:
        for half, why in failed:
            reject(half, why, ())


def _whole(item: Found, config: Config) -> list[Rung]:
    """The rungs of a whole prologue that are asked for."""
    if isinstance(item, NearMiss):
        asked = not item.halves or config.offers != {"key"}
        return [Rung("v3", item)] if asked else []
    if not isinstance(item, Candidate):
        return []
    kind = "absorbed" if isinstance(item.query.absorb, AbsorbFact) else "unabsorbed"
    return [Rung(name, item) for name in config.targets if kind in TARGETS[name]]


def _halves(item: Found) -> tuple[KeyHalf, ...]:
    if isinstance(item, NearMiss):
        return item.halves
    if not isinstance(item, Candidate):
        return (item,)
    return halves.of_whole(item)
