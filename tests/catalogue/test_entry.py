"""The catalogue itself: unique names, known tags, and every entry selected by some test."""

from __future__ import annotations

import pytest

from mla_fusion.report.rejection import CODES
from tests.catalogue import ENTRIES, IN_PLACE, STAGED, TAGS, base, select
from tests.catalogue.entry import add, entry, words


def test_names_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.catalogue.entry.ENTRIES", dict(ENTRIES))
    (first, *_) = ENTRIES.values()
    with pytest.raises(ValueError, match="two entries"):
        add(first)


@pytest.mark.parametrize(
    "wrong",
    [{"tags": "rope, no such tag"}, {"source": ""}, {"outcome": ()}],
    ids=["tags", "source", "outcome"],
)
def test_an_entry_says_who_writes_it_and_what_becomes_of_it(wrong: dict[str, object]) -> None:
    fields = {"tags": "rope", "source": "somebody", "outcome": (IN_PLACE,), **wrong}
    with pytest.raises(ValueError):
        entry(*fields.pop("outcome"), **fields)(base.Base)  # type: ignore[arg-type, misc]
    assert "Base" not in ENTRIES


def test_select() -> None:
    near, rope = set(select("near miss")), set(select("rope"))
    assert set(select("near miss", "rope")) == near & rope
    assert set(select("rope", without="near miss, operators")) == rope - near - set(
        select("operators")
    )
    assert select() == list(ENTRIES.values())
    with pytest.raises(ValueError, match="no tags"):
        select("ropes")


def test_every_tag_is_used() -> None:
    assert all(select(tag) for tag in TAGS)


def test_an_outcome_is_a_place_for_each_prologue_or_one_code() -> None:
    for item in ENTRIES.values():
        if not set(item.outcome) <= {IN_PLACE, STAGED}:
            (code,) = item.outcome
            assert code.partition(":")[0] in CODES and "near miss" in item.tags, item.name


def test_near_misses_are_of_something() -> None:
    assert [
        item.name
        for item in select("near miss", without="public")
        if ": a near miss of " not in item.source
    ] == []


def test_words() -> None:
    assert words("near miss, rope,") == {"near miss", "rope"}
