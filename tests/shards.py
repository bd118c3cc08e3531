"""The exhaustive tests in eight shares, of which a submission runs the one whose turn it is.

Whoever begins work that is to be submitted raises ``SUBMISSION`` by one, in the first commit: so
eight submissions in a row run all shares. Tests whose file has changed since, and entries of the
catalogue whose file has, run in any case.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

SUBMISSION = 19
SHARES = 8
ROOT = Path(__file__).parents[1]


def share_of(test: str) -> int:
    """The share that a test's id is in. It does not depend on other tests."""
    return zlib.crc32(test.encode()) % SHARES


def recent() -> tuple[int, frozenset[Path]]:
    """The share whose turn it is, and the files that commits since the number was raised, and the
    working tree, change.

    Raises RuntimeError where the history is not there: not a checkout, or a shallow one.
    """
    if _git("rev-parse", "--is-shallow-repository") != "false":
        raise RuntimeError("this checkout is shallow: when the number was raised is not known")
    raised = _git("log", "-1", "--format=%H", "-G^SUBMISSION = ", "--", "tests/shards.py")
    changed = _git("diff", "--name-only", f"{raised}^" if raised else "HEAD").split("\n")
    return SUBMISSION % SHARES, frozenset(ROOT / name for name in changed if name)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
