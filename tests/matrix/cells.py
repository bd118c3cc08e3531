"""The columns of the matrix: names, and the tests behind, whose outcome a release can change."""

from __future__ import annotations

_WAYS = "tests/matrix/test_ways.py::"
_ACTIVATE = "tests/compile/offline/test_activate.py::"

IMPORT = {"import": ("tests/project/test_import.py",)}
BACKEND = {"backend on CPU": ("tests/matrix/test_backend.py",)}
_KERNELS = "tests/reference/test_prolog_unquantised.py"

# Of a release that works; the tests of one cell stand together.
WORKS = {
    **IMPORT,
    "doctor": (
        "tests/compile/test_doctor.py::test_survey_is_plain_data_about_this_machine",
        "tests/compile/test_doctor.py::test_survey_says_who_converts_what",
        "tests/compile/test_releases.py::test_what_the_installed_release_is_said_to_bring_is_there",
        "tests/cli/test_cli.py::test_doctor",
    ),
    "activate": (
        f"{_ACTIVATE}test_real_packages_import",
        f"{_ACTIVATE}test_fake_tensors_go_through_the_real_dispatcher",
        f"{_ACTIVATE}test_modules_with_gradients_pass_stream_guards",
        f"{_ACTIVATE}test_no_thread_polls_a_queue",
        f"{_ACTIVATE}test_device_work_is_refused_by_name",
        f"{_ACTIVATE}test_compiled_graph_is_refused_where_it_would_run",
        f"{_ACTIVATE}test_second_call_does_nothing",
        f"{_ACTIVATE}test_interrupt_handler_stays_pythons",
    ),
    "fused": (f"{_WAYS}test_fused",),
    "hook": (f"{_WAYS}test_hook",),
    "dynamic": (f"{_WAYS}test_dynamic",),
    "npugraph_ex": (f"{_WAYS}test_npugraph_ex",),
    "hand call": (f"{_WAYS}test_call_by_hand[in_place]",),
    "functional call": (f"{_WAYS}test_call_by_hand[functional]",),
    "parity": (f"{_WAYS}test_parity_with_the_call_by_hand", f"{_WAYS}test_parity_in_npugraph_ex"),
    **BACKEND,
    "reference": ("tests/reference/test_ops.py", _KERNELS),
    "converters": ("tests/converters",),
}

# Of one that is refused: that it is, and what does not need torchair.
REFUSED = {
    **IMPORT,
    "refused by name": ("tests/matrix/test_refused.py",),
    **BACKEND,
    "reference": (_KERNELS,),
}

# What CI has time for beside the whole suite on 2.13.
QUICK = ("fused", "npugraph_ex", "hand call")


def cells(works: bool, quick: bool = False) -> dict[str, tuple[str, ...]]:
    """Name -> tests."""
    chosen = WORKS if works else REFUSED
    return {
        name: tests for name, tests in chosen.items() if not quick or name in QUICK or not works
    }
