"""Which of the exhaustive tests a submission runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import shards
from tests.catalogue.entry import ENTRIES, FILES


def test_eight_submissions_run_all_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for number in range(shards.SUBMISSION, shards.SUBMISSION + 8):
        monkeypatch.setattr(shards, "SUBMISSION", number)
        found.add(shards.recent()[0])
    assert found == set(range(shards.SHARES))


def test_a_changed_test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed since the number was raised, committed or not."""

    def commit(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / "tests" / f"{name}.py").write_text(text)
        shards._git("add", ".")
        shards._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a step")

    monkeypatch.setattr(shards, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    shards._git("init", "-q")
    commit(shards="SUBMISSION = 1\n", test_old="1", test_new="1")
    commit(test_old="2")
    commit(shards="SUBMISSION = 2\n")
    commit(test_new="2")
    (tmp_path / "tests" / "shards.py").write_text("SUBMISSION = 2\n# more\n")
    assert {file.name for file in shards.recent()[1]} == {"shards.py", "test_new.py"}


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
