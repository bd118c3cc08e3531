"""Tallies of facts and rules, kept only while somebody measures."""

from __future__ import annotations

import pytest

from mla_fusion.fx.measured import measured, measuring


@measured
def answer(found: list[int]) -> list[int]:
    if found == [13]:
        raise ValueError
    return found


NAME = f"{__name__}.answer"


def test_calls_hits_and_refusals() -> None:
    with measuring() as tallies:
        answer([1])
        answer([])
        with pytest.raises(ValueError):
            answer([13])
    tally = tallies[NAME]
    assert (tally.calls, tally.hits) == (3, 2) and tally.seconds > 0


def test_nothing_is_kept_outside() -> None:
    with measuring() as tallies:
        pass
    answer([1])
    assert tallies == {}


def test_measurements_do_not_mix() -> None:
    with measuring() as outer:
        answer([1])
        with measuring() as inner:
            answer([1])
    assert (outer[NAME].calls, inner[NAME].calls) == (1, 1)
