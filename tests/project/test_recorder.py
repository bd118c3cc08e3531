"""The recorder says the same of the same code, and names what differs."""

from __future__ import annotations

import copy

from tests.catalogue import select
from tests.recorder import differences, records


def test_a_record_is_the_same_again_and_a_change_is_named() -> None:
    entry = select("symbolic", "whole")[0]
    before, after = dict(records(entry)), dict(records(entry))
    assert list(before) == [entry.name, f"{entry.name}, symbolic"]
    assert not list(differences(before, after))
    changed = copy.deepcopy(after)
    changed[entry.name]["graph"][0] = "output"
    changed["another"] = {}
    first, second = differences(before, changed)
    assert first.startswith(f"{entry.name}: .graph[0]: ") and first.endswith("became 'output'")
    assert second == "another: only after"
