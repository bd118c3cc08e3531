"""The table of codes: every one is provoked by a test, and has a meaning and a remedy."""

from __future__ import annotations

from pathlib import Path

from mla_fusion.report.rejection import CODES

TESTS = Path(__file__).parents[1]
PROVOKED_IN = ("catalogue", "propose", "plan", "commit", "entry", "report")


def test_every_code_is_provoked() -> None:
    """A code that no test provokes is a promise nobody keeps."""
    source = "".join(
        path.read_text() for room in PROVOKED_IN for path in sorted((TESTS / room).glob("*.py"))
    )
    assert [code for code in CODES if f'"{code}' not in source] == []


def test_every_code_says_what_it_means_and_what_to_do() -> None:
    assert [
        code for code, (meaning, remedy) in CODES.items() if not (meaning.endswith(".") and remedy)
    ] == []
