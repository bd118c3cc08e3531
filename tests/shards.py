"""The exhaustive tests in eight shares, of which a submission runs the one whose turn it is.

The history is numbered by bouts of work: a bout ends where no commit follows for 20 minutes, as
while a submission is tested. The newest bout ``n`` stands for share ``n % 8``. Tests whose file has
changed in it, and entries of the catalogue whose file has, run in any case.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path

SHARES = 8
PAUSE = 20 * 60  # seconds
ROOT = Path(__file__).parents[1]


def share_of(test: str) -> int:
    """The share that a test's id is in. It does not depend on other tests."""
    return zlib.crc32(test.encode()) % SHARES


def newest_bout(dates: Iterable[int]) -> tuple[int, int]:
    """Its number, and how many commits it has, of a history with these commit dates in seconds."""
    history = sorted(dates)
    bouts = [0, *accumulate(later - date > PAUSE for date, later in pairwise(history))]
    return bouts[-1], bouts.count(bouts[-1])


def recent() -> tuple[int, frozenset[Path]]:
    """The share of this checkout's newest bout, and the files that it and the working tree change.

    Raises RuntimeError where the history is not there: not a checkout, or a shallow one.
    """
    if _git("rev-parse", "--is-shallow-repository") != "false":
        raise RuntimeError("this checkout is shallow: shares are counted from the first commit")
    dates = [int(date) for date in _git("log", "--first-parent", "--format=%ct").split()]
    bout, commits = newest_bout(dates)
    base = f"HEAD~{commits}" if commits < len(dates) else EMPTY_TREE
    changed = _git("diff", "--name-only", base).split("\n")
    return bout % SHARES, frozenset(ROOT / name for name in changed if name)


EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's name of a tree without files


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
