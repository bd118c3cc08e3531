"""A sample of what benchmarks/families.py runs in full: no attack is fused wrongly, and every
control fuses.

A failure is named by its family, the attack, the place it stands at, the regime of the compilation
and the spelling.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

from mla_fusion.commit import verify
from mla_fusion.plan import planner
from tests.exhaustive import one_in
from tests.soundness import campaign
from tests.soundness.families import FAMILIES
from tests.soundness.judge import judge
from tests.soundness.member import Member, Verdict

SEED = 2026
EACH = 6  # members of each family


def _samples() -> list[list[Member]]:
    """Members of every family, those through torch.compile aside: each of these takes seconds."""
    found = []
    for family in FAMILIES.values():
        quick = (member for member in family.sample(SEED) if member.regime != "dynamo")
        found.append(list(itertools.islice(quick, EACH)))
    return found


def _one_control_each() -> list[Member]:
    """Every control of every family, at one of its places, regimes and spellings."""
    chosen: dict[tuple[str, str], Member] = {}
    for member in campaign.controls():
        chosen.setdefault((member.family, member.attack), member)
    return list(chosen.values())


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in campaign.LOGGERS}
    campaign.quiet()
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _each() -> list[object]:
    """Of some families one each time, the others with `make test-all`."""
    samples = [sample for sample in _samples() if sample]
    first, others = (
        [sample[0] for sample in samples],
        [member for sample in samples for member in sample[1:]],
    )
    more = [pytest.param(member, marks=pytest.mark.exhaustive) for member in others]
    return [*one_in(1, first), *more]


@pytest.mark.parametrize("member", _each(), ids=str)
def test_no_attack_is_fused_wrongly(member: Member) -> None:
    outcome = judge(member)
    assert outcome.verdict not in (Verdict.WRONG, Verdict.RAISED), outcome.detail
    assert not outcome.detail.startswith("the judge raised"), outcome.detail


@pytest.mark.parametrize("without", one_in(1, campaign.OPINIONS))
def test_each_opinion_alone_is_enough(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "prove", planner.prove)  # so that both are put back
    monkeypatch.setattr(verify, "compare", verify.compare)
    names = tuple(name for name in FAMILIES if name.startswith(("choice", "composed", "tokens")))
    members = campaign.members(len(names), SEED, names)
    wrong = [
        outcome
        for outcome in campaign.judged(members, without=without)
        if outcome.verdict is Verdict.WRONG
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "member", one_in(4, [m for m in _one_control_each() if m.regime != "dynamo"]), ids=str
)
def test_a_control_fuses(member: Member) -> None:
    outcome = judge(member)
    assert outcome.verdict in (Verdict.FUSED, Verdict.STAGED), (
        f"{outcome.verdict.value}: {outcome.detail}"
    )


def test_members_are_many_distinct_and_the_same_each_time() -> None:
    members = campaign.members(1500, SEED)
    assert len(set(members)) == 1500
    assert members == campaign.members(1500, SEED)
    assert len(FAMILIES) >= 30
    assert {member.family for member in members} >= {
        name for name, family in FAMILIES.items() if family.attacks
    }
