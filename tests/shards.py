"""What runs by turns: the cases of tables in three shares, the exhaustive tests in eight.

Most of the time goes to tests that compile a model, and most of those are one rule seen through a
table of cases. So `make test` runs of each table the cases whose turn it is, at least one; three
submissions in a row run all of them. Of the exhaustive tests CI runs one share, eight submissions
in a row run all. Tests whose file has changed since, and entries of the catalogue whose file has,
run in any case. Whoever begins work that is to be submitted raises ``SUBMISSION`` by one, in the
first commit.

`make test-all` runs everything, and so does pytest without ``--submission``.
"""

from __future__ import annotations

import subprocess
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.catalogue.entry import FILES, Entry

SUBMISSION = 21
SHARES = 8
SHARES_OF_TABLES = 3
# the folders of tests whose tables compile a model for each case
COMPILED = frozenset(
    """
    by_hand commit compile dumps emit entry facts fusion inspect match matrix models observe plan
    prove report selftest serving weights
    """.split()
)
ROOT = Path(__file__).parents[1]


def of_submission(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests that this submission runs.

    Raises RuntimeError where exhaustive tests are among them and the history is not there (not a
    checkout, or a shallow one): of these it is not known which have changed.
    """
    found, tables = set[pytest.Item](), defaultdict[str, list[pytest.Item]](list)
    exhaustive = list[pytest.Item]()
    for item in items:
        room = item.path.relative_to(ROOT / "tests").parts[0]
        if "exhaustive" in item.keywords:
            exhaustive.append(item)
        elif room in COMPILED and hasattr(item, "callspec"):
            tables[item.nodeid.partition("[")[0]].append(item)
        else:
            found.add(item)
    try:
        changed = recent()
    except RuntimeError:
        if exhaustive:
            raise
        changed = frozenset()
    for name, cases in tables.items():
        shares = min(SHARES_OF_TABLES, len(cases))
        turn = (SUBMISSION + zlib.crc32(name.encode())) % shares
        found.update(cases[turn::shares])
    found.update(item for item in exhaustive if _share_of(item.nodeid) == SUBMISSION % SHARES)
    found.update(item for item in items if changed and changed.intersection(_files(item)))
    return found


def _share_of(test: str) -> int:
    """The share of the exhaustive tests that it is in. It does not depend on other tests."""
    return zlib.crc32(test.encode()) % SHARES


def _files(item: pytest.Item) -> set[Path | None]:
    """Its own, and those of the catalogue's entries that it is about."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {item.path, *(FILES.get(value.name) for value in values if isinstance(value, Entry))}


def recent() -> frozenset[Path]:
    """The files that commits since the number was raised, and the working tree, change.

    Raises RuntimeError where the history is not there: not a checkout, or a shallow one.
    """
    if _git("rev-parse", "--is-shallow-repository") != "false":
        raise RuntimeError("this checkout is shallow: when the number was raised is not known")
    raised = _git("log", "-1", "--format=%H", "-G^SUBMISSION = ", "--", "tests/shards.py")
    changed = _git("diff", "--name-only", f"{raised}^" if raised else "HEAD").split("\n")
    return frozenset(ROOT / name for name in changed if name)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
