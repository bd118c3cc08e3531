"""The columns of the matrix: what each is called, and the tests behind it."""

from __future__ import annotations

_WAYS = "tests/matrix/test_ways.py::"

IMPORT = {"import": ("tests/project/test_import.py",)}
CPU = {
    "backend on CPU": ("tests/matrix/test_backend.py",),
    "reference": ("tests/reference/test_ops.py", "tests/reference/test_prolog_unquantised.py"),
}

# Of a release that works; the tests of one cell stand together.
WORKS = {
    **IMPORT,
    "doctor": ("tests/compile/test_doctor.py", "tests/compile/test_releases.py"),
    "activate": ("tests/offline",),
    "fused": (f"{_WAYS}test_fused",),
    "hook": (f"{_WAYS}test_hook",),
    "dynamic": (f"{_WAYS}test_dynamic",),
    "npugraph_ex": (f"{_WAYS}test_npugraph_ex",),
    "hand call": (f"{_WAYS}test_call_by_hand[in_place]",),
    "functional call": (f"{_WAYS}test_call_by_hand[functional]",),
    "parity": (f"{_WAYS}test_parity_with_the_call_by_hand", f"{_WAYS}test_parity_in_npugraph_ex"),
    **CPU,
    "converters": ("tests/converters",),
}

# Of one that is refused: that it is, and what does not need torchair.
REFUSED = {**IMPORT, "refused by name": ("tests/matrix/test_refused.py",), **CPU}

# What CI has time for beside the whole suite on 2.13.
QUICK = ("import", "fused", "npugraph_ex", "hand call", "backend on CPU")


def cells(works: bool, quick: bool = False) -> dict[str, tuple[str, ...]]:
    """Name -> tests."""
    chosen = WORKS if works else REFUSED
    return {name: tests for name, tests in chosen.items() if not quick or name in QUICK or not works}
