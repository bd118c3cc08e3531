"""Which of the exhaustive tests a submission runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import shards
from tests.catalogue.entry import ENTRIES, FILES

HOUR = 3600


def test_each_bout_of_work_has_the_next_share() -> None:
    dates = [hours * HOUR + minutes * 60 for hours in range(0, 100, 10) for minutes in (0, 5, 19)]
    found = [shards.newest_bout(dates[: 3 * count]) for count in range(1, 11)]
    assert found == [(bout, 3) for bout in range(10)]


def test_commits_in_a_row_are_one_bout() -> None:
    assert shards.newest_bout([0, *range(90 * HOUR, 91 * HOUR, 60)]) == (1, 60)


def test_shares_are_of_about_one_size() -> None:
    sizes = [0] * shards.SHARES
    for number in range(8000):
        sizes[shards.share_of(f"tests/test_a.py::test_b[{number}]")] += 1
    assert min(sizes) > 800


def test_this_checkout_has_shares() -> None:
    share, changed = shards.recent()
    assert share in range(shards.SHARES)
    assert all(file.is_absolute() for file in changed)


def test_no_history_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shards, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="git"):
        shards.recent()


def test_the_file_of_each_entry_is_known() -> None:
    assert FILES.keys() == ENTRIES.keys()
    folder = Path(shards.__file__).parent / "catalogue"
    assert {file.parent for file in FILES.values()} == {folder}
    assert len(set(FILES.values())) > 20
