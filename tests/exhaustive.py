"""Which cases of a table run each time, and which with `make test-all` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# By how much fewer cases of every table run each time: it sets how long `make test` takes.
FEWER = 10


def one_in(count: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Cases for ``parametrize``: of ``FEWER * count`` in a row one runs each time, all of them with
    `make test-all`.

    ``first`` tells tests over one table apart, so that each case is seen by some of them each time.
    """
    found = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(
            case
            if number % (FEWER * count) == first
            else pytest.param(*values, marks=pytest.mark.exhaustive)
        )
    return found


def pairs(firsts: Iterable[Any], seconds: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``: every value runs each time, every pair with `make test-all`."""
    firsts, seconds = list(firsts), list(seconds)
    longer = max(len(firsts), len(seconds))
    chosen = {(turn % len(firsts), turn % len(seconds)) for turn in range(longer)}
    return [
        pytest.param(
            first, second, marks=[] if (row, column) in chosen else [pytest.mark.exhaustive]
        )
        for row, first in enumerate(firsts)
        for column, second in enumerate(seconds)
    ]
