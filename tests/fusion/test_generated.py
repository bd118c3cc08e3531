"""A sample of benchmarks/metamorphic.py: every spelling fuses exactly, no mutant is misread."""

from __future__ import annotations

import logging

import pytest

from .generator import campaign
from .generator.judge import Verdict

SEED = 2026


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Changes whose shapes do not fit are passed over, which torch logs as errors."""
    caplog.set_level(logging.CRITICAL, logger="torch._subclasses.fake_tensor")


def test_spellings_fuse_as_exactly() -> None:
    outcomes = list(campaign.spellings(8, SEED))
    assert len({outcome.structure for outcome in outcomes}) == 8
    assert [str(outcome) for outcome in outcomes if outcome.verdict is not Verdict.FUSED] == []


def test_no_mutant_is_fused_wrongly() -> None:
    outcomes = list(campaign.mutants(8, SEED))
    allowed = (Verdict.FUSED, Verdict.DECLINED)
    assert [str(outcome) for outcome in outcomes if outcome.verdict not in allowed] == []
    assert {outcome.verdict for outcome in outcomes} == set(allowed)


def test_no_quantised_mutant_is_fused_wrongly() -> None:
    outcomes = list(campaign.quantised_mutants(6, SEED))
    allowed = (Verdict.FUSED, Verdict.DECLINED)
    assert [str(outcome) for outcome in outcomes if outcome.verdict not in allowed] == []
    assert {outcome.verdict for outcome in outcomes} == set(allowed)
