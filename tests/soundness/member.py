"""What a family is made of: attacks and controls, their places, the regimes of compilation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .program import STYLES, Step

# Static token counts; "sym": one graph for any count, by AOT autograd; "dynamo": the same by
# torch.compile.
STATIC = ("T1", "T2", "T8", "T64", "T128")
DYNAMIC = ("sym", "dynamo")
ALL = (*STATIC, "sym", "dynamo")
COMPILED_AT, SERVED = 5, (5, 40, 200)


def tokens_of(regime: str) -> tuple[int, ...]:
    """Token counts that a graph of this regime must serve; it is compiled at the first."""
    return SERVED if regime in DYNAMIC else (int(regime[1:]),)


class Verdict(Enum):
    """What became of a member."""

    REFUSED = "refused"
    MISREAD = "misread"  # the facts held; verification alone refused it
    STAGED = "staged"
    FUSED = "fused"
    WRONG = "WRONG"
    RAISED = "RAISED"
    # the generator's fault: it does not run, or means nothing else than its control
    INVALID = "invalid"


@dataclass(frozen=True)
class Attack:
    """One step; ``places``: alternatives, each one place or several joined by "+"."""

    name: str
    step: Step
    places: tuple[str, ...]
    regimes: tuple[str, ...] = ALL
    styles: tuple[str, ...] = tuple(STYLES)


def attacks(
    steps: Mapping[str, Step],
    places: tuple[str, ...],
    regimes: tuple[str, ...] = ALL,
    styles: tuple[str, ...] = tuple(STYLES),
) -> tuple[Attack, ...]:
    return tuple(Attack(name, step, places, regimes, styles) for name, step in steps.items())


@dataclass(frozen=True)
class Member:
    """One graph, told by names alone: it can be sent to another process."""

    family: str
    attack: str
    place: str
    regime: str
    style: str
    control: bool = False

    def __str__(self) -> str:
        sort = "control " if self.control else ""
        return f"{self.family}: {sort}{self.attack} at {self.place}, {self.regime}, {self.style}"


@dataclass(frozen=True)
class Outcome:
    member: Member
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0


Judge = Callable[[Member], Outcome]


@dataclass(frozen=True)
class Family:
    """Attacks of one kind, and the controls that they are told from.

    random      results depend on the seed
    staged      in place is wrong whatever the numbers say: what was asked of the slots is not shown
    extra       more inputs to expose the attacks by, for the token counts that a graph serves
    judge       how its members are judged, where not by ``judge.judge``
    """

    name: str
    why: str
    attacks: tuple[Attack, ...]
    controls: tuple[Attack, ...] = ()
    random: bool = False
    staged: bool = False
    extra: Callable[[tuple[int, ...]], list[tuple[str, Any]]] | None = field(
        default=None, compare=False
    )
    judge: Judge | None = field(default=None, compare=False)

    def members(self) -> Iterator[Member]:
        yield from self._of(self.attacks, False)

    def control_members(self) -> Iterator[Member]:
        yield from self._of(self.controls, True)

    def _of(self, found: tuple[Attack, ...], control: bool) -> Iterator[Member]:
        for attack in found:
            for place in attack.places:
                for regime in attack.regimes:
                    for style in attack.styles:
                        yield Member(self.name, attack.name, place, regime, style, control)

    def attack(self, member: Member) -> Attack:
        found = self.controls if member.control else self.attacks
        return next(attack for attack in found if attack.name == member.attack)

    def sample(self, seed: int) -> Iterator[Member]:
        """All members of the family, attacks in turn, each at a place, regime and style drawn by
        chance.

        torch.compile takes ten times as long as the rest: its members come last within a turn of
        eight.
        """
        yield from _in_turn(list(self.members()), f"{seed} {self.name}")


def _in_turn(members: list[Member], seed: str) -> Iterator[Member]:
    chance = random.Random(seed)
    by_attack: dict[str, list[Member]] = {}
    for member in members:
        by_attack.setdefault(member.attack, []).append(member)
    for own in by_attack.values():
        chance.shuffle(own)
        fast = [member for member in own if member.regime != "dynamo"]
        slow = [member for member in own if member.regime == "dynamo"]
        for index, member in enumerate(slow):
            fast.insert(min(len(fast), 8 * index + 7), member)
        own[:] = fast
    turns: list[Any] = list(by_attack.values())
    chance.shuffle(turns)
    while turns:
        for own in list(turns):
            yield own.pop(0)
            if not own:
                turns.remove(own)
