"""`mf.meta` against the vendor's own host code: verdicts on both paths, results, tiling keys."""

from __future__ import annotations

from collections import Counter

import pytest
from mla_fusion.meta.prolog import PROLOGS

from mla_fusion import meta
from tests.meta.stricter import STRICTER, stricter
from tests.meta.vendor_rows import PATHS, Row, rows

JUDGED = [row for row in rows() if not row.crashed]


def class_of(row: Row, refusal: meta.ContractError) -> str:
    """The class of calls that are refused on purpose; a call in none, or in several, fails."""
    classes = [item.name for item in stricter(row.op, code=refusal.code, **row.where)]
    if len(classes) > 1:  # past 32 bits only the lower ones are read
        large = any(isinstance(v, int) and abs(v) >= 2**31 for v in row.data["attributes"].values())
        classes = [name for name in classes if (name == "modes-past-32-bits") == large]
    assert len(classes) == 1, f"{row}\n{refusal}: {classes}"
    return classes[0]


@pytest.mark.parametrize("path", PATHS)
def test_check_says_what_the_vendor_says(path: str) -> None:
    agreed, classes, loose = 0, Counter[str](), []
    for row in JUDGED:
        refusal = row.refusal(path)
        if (refusal is None) == row.taken(path):
            agreed += 1
        elif refusal is None:
            loose.append(str(row))
        else:
            classes[class_of(row, refusal)] += 1
    print(f"{path}: {agreed} of {len(JUDGED)} agree, stricter on purpose: {dict(classes)}")
    assert not loose, "taken although the vendor refuses:\n" + "\n".join(loose)
    assert agreed + classes.total() == len(JUDGED) and agreed > 0.9 * len(JUDGED)


def test_what_a_graph_takes_a_call_by_hand_takes() -> None:
    assert not [row for row in JUDGED if row.taken("graph") and not row.taken("eager")]
    assert not [
        str(row)
        for row in JUDGED
        if row.refusal("graph") is None and row.refusal("eager") is not None
    ]


def test_results_are_those_that_the_vendor_infers() -> None:
    compared = 0
    for row in JUDGED:
        if row.taken("graph"):
            wanted = row.results()
            found = meta.infer(row.op, cann=row.where["cann"], path="graph", **row.call())
            given = dict(zip(PROLOGS[row.op].results, found, strict=True))
            assert given == {name: wanted[name] for name in given}, row
            compared += 1
    assert compared > 400


def test_tiling_keys_are_those_that_the_vendor_computes() -> None:
    compared = 0
    for row in JUDGED:
        key = row.data["tiling_key"]
        if key is not None and row.refusal("graph") is None:
            found = meta.explain_call(row.op, path="graph", **row.where, **row.call()).tiling_key
            assert found.value == key, f"{row}\n{found} and not {key:#x}"
            compared += 1
    assert compared > 400


def test_the_classes_are_named_once_and_each_has_a_reason() -> None:
    assert len({item.name for item in STRICTER}) == len(STRICTER)
    assert all(item.codes and item.scopes and item.refused and item.reason for item in STRICTER)


def test_where_the_check_crashes_the_operator_is_refused() -> None:
    crashed = [row for row in rows() if row.crashed]
    assert {(row.op, row.where["soc"], row.where["cann"]) for row in crashed} <= {
        ("npu_mla_prolog", "A5", "9.0"),
        ("npu_mla_prolog_v2", "A5", "9.0"),
    }
    assert all(meta.limits(row.op, **row.where).absent for row in crashed)
