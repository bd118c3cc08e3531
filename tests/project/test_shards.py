"""Which cases of tables, and which exhaustive tests, a submission runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import shards
from tests.catalogue.entry import ENTRIES, FILES


class Item:
    """What is asked of a test that pytest has collected."""

    def __init__(self, file: str, name: str, keywords: tuple[str, ...] = ()) -> None:
        self.path, self.nodeid = shards.ROOT / file, f"{file}::{name}"
        self.keywords = keywords
        if "[" in name:
            self.callspec = SimpleNamespace(params={"case": name})


TABLE = [Item("tests/fusion/test_a.py", f"test_a[{case}]") for case in range(10)]
PAIR = [Item("tests/fusion/test_a.py", f"test_b[{case}]") for case in range(2)]
CHEAP = [Item("tests/meta/test_a.py", f"test_a[{case}]") for case in range(10)]
ALONE = [Item("tests/fusion/test_a.py", "test_c")]
EXHAUSTIVE = [
    Item("tests/fusion/test_d.py", f"test_d[{case}]", keywords=("exhaustive",))
    for case in range(50)
]


def run(items: list[Item]) -> list[Item]:
    """Those of the items that this submission runs, in order."""
    found = shards.of_submission(cast(Any, items))
    return [item for item in items if item in found]


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "recent", frozenset)


@pytest.mark.usefixtures("unchanged")
def test_three_submissions_run_each_case_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, found = [], list[Item]()
    for number in range(shards.SUBMISSION, shards.SUBMISSION + 3):
        monkeypatch.setattr(shards, "SUBMISSION", number)
        assert run(PAIR) and run(CHEAP) == CHEAP and run(ALONE) == ALONE
        sizes.append(len(run(TABLE)))
        found += run([*TABLE, *PAIR])
    assert sorted(sizes) == [3, 3, 4] and {*found} == {*TABLE, *PAIR}


@pytest.mark.usefixtures("unchanged")
def test_eight_submissions_run_all_exhaustive_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Item]()
    for number in range(shards.SUBMISSION, shards.SUBMISSION + 8):
        monkeypatch.setattr(shards, "SUBMISSION", number)
        found += run(EXHAUSTIVE)
    assert len(found) == len(EXHAUSTIVE) and {*found} == {*EXHAUSTIVE}


def test_all_tests_of_a_changed_file_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "recent", lambda: frozenset({TABLE[0].path, EXHAUSTIVE[0].path}))
    assert run([*TABLE, *EXHAUSTIVE]) == [*TABLE, *EXHAUSTIVE]


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
    assert {file.name for file in shards.recent()} == {"shards.py", "test_new.py"}


def test_shares_are_of_about_one_size() -> None:
    sizes = [0] * shards.SHARES
    for number in range(8000):
        sizes[shards._share_of(f"tests/test_a.py::test_b[{number}]")] += 1
    assert min(sizes) > 800


def test_without_history_exhaustive_tests_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_git", lambda *_: "true")  # as of a shallow checkout
    with pytest.raises(RuntimeError, match="shallow"):
        run(EXHAUSTIVE)
    assert run(PAIR)


def test_no_checkout_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shards, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="git"):
        shards.recent()


def test_the_file_of_each_entry_is_known() -> None:
    assert FILES.keys() == ENTRIES.keys()
    folder = Path(shards.__file__).parent / "catalogue"
    assert {file.parent for file in FILES.values()} == {folder}
    assert len(set(FILES.values())) > 20
