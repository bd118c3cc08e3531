"""Certificates: the checker accepts those of the pass, and refuses them changed in one place that
matters.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import subprocess
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch

import mla_fusion as mf
from mla_fusion.prove import check, field, trace
from tests.catalogue import ENTRIES
from tests.exhaustive import one_in
from tests.harness import traced_graph

from .mutants import MUTATED, mutants


@cache
def text_of(name: str) -> str:
    entry = ENTRIES[name]
    torch.manual_seed(0)
    return mf.explain(
        traced_graph(entry.model(), *entry.args()), entry.config(verify="off"), boundary=True
    ).to_json()


def report_of(name: str) -> Any:
    return json.loads(text_of(name))


def outcomes(report: Any, **options: Any) -> list[Any]:
    return [found for _, found in check.checked(report, **options)]


@pytest.mark.parametrize("name", one_in(1, MUTATED))
def test_what_is_changed_is_refused(name: str) -> None:
    report = report_of(name)
    assert all(isinstance(one, check.Accepted) for one in outcomes(report, seed="1"))
    for what, changed in mutants(report, random.Random(0), 8):
        assert isinstance(outcomes(changed, seed="1")[0], check.Refused), what


def changed(name: str = "PagedSqrtNorm") -> tuple[Any, Any]:
    report = copy.deepcopy(report_of(name))
    return report, report["certificates"][0]


def refusal(report: Any) -> str:
    (found,) = outcomes(report)
    assert isinstance(found, check.Refused) and "\n" not in str(found)
    return str(found)


def test_a_value_is_not_made_of_a_result() -> None:
    report, certificate = changed()
    result = next(at for at, entry in enumerate(certificate["values"]) if entry[0] == "result")
    certificate["values"].append(["neg", [result]])
    assert "computed from a result" in refusal(report)
    certificate["values"][-1] = ["move", [result], [1], 0, [1], [1]]
    certificate["claims"][0]["value"] = len(certificate["values"]) - 1
    assert "not claimed of a value" in refusal(report)


@pytest.mark.parametrize("result", ["query", "query_rope"])
def test_a_result_is_not_multiplied_by_more_than_a_number_for_each_token(result: str) -> None:
    report, certificate = changed("QueryByPosition")
    values = certificate["values"]
    (times,) = (
        entry[1] for entry in values if entry[0] == "mul" and values[entry[1][0]][-1] == "query"
    )
    place = next(
        at for at, entry in enumerate(values) if entry[0] == "result" and entry[-1] == result
    )
    values.append(["mul", [place, place if result == "query" else times[1]]])
    assert "computed from a result" in refusal(report)


def test_a_value_is_made_of_those_before_it() -> None:
    report, certificate = changed()
    certificate["values"][5] = ["add", [6, 5]]
    assert "is no number from 0 to 4" in refusal(report)


@pytest.mark.parametrize(
    "entry",
    [
        ["leaf", [], [1 << 20, 1 << 20], "x"],
        ["integers", [], [1 << 30], 0, [1 << 30], [1]],
        ["exec", [], "print(1)"],
        ["__init__", [], "x"],
        ["number", [], "1e999999999", None],
        ["number", [], "1/0", None],
        ["move", [0], [4], -1, [4], [1]],
        ["move", [0], [1 << 40], 0, [1 << 40], [0]],
        ["leaf", [], [True], "x"],
        ["leaf"],
        None,
        {},
    ],
)
def test_what_is_no_value_is_refused(entry: Any) -> None:
    report, certificate = changed()
    certificate["values"].insert(1, entry)
    assert refusal(report)


def test_too_many_elements_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    report, certificate = changed()
    monkeypatch.setattr(check, "MOST", 1 << 12)
    certificate["values"] = [["leaf", [], [1 << 10], str(place)] for place in range(64)]
    assert "too many elements" in refusal(report)


@pytest.mark.parametrize("key", ["version", "arguments", "exact", "claims", "values"])
def test_without_a_part_it_is_refused(key: str) -> None:
    report, certificate = changed()
    del certificate[key]
    assert refusal(report)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("certificate", 7),
        ("certificate", None),
        ("operator", "npu_mm"),
        ("replaced", {"a": "query"}),
        ("dims", {}),
        ("attributes", {}),
        ("assumptions", None),
    ],
)
def test_a_certificate_of_another_fusion_is_refused(key: str, value: Any) -> None:
    report, _ = changed()
    report["fused"][0][key] = value
    assert refusal(report)


def test_what_the_report_says_of_the_call_is_what_is_proved() -> None:
    report, certificate = changed()
    report["fused"][0]["attributes"]["rmsnorm_epsilon_cq"] = 1e-5
    assert "1/1000000 is not the number 1e-05" in refusal(report)
    certificate["exact"]["rmsnorm_epsilon_cq"] = ["number", "1/100000"]
    assert "is not what the kernel gives" in refusal(report)
    report, certificate = changed()
    report["fused"][0]["attributes"]["rmsnorm_epsilon_cq"] = 1e-21
    certificate["exact"]["rmsnorm_epsilon_cq"] = ["number", "0"]
    assert "0 is not the number" in refusal(report), "it assumes nothing of rows next to a floor"
    report, _ = changed()
    report["fused"][0]["dims"]["N"] += 1
    assert "N is another" in refusal(report)


def test_a_fusion_without_a_certificate_is_refused() -> None:
    report, _ = changed()
    report["fused"][0]["certificate"] = None
    assert "no certificate" in refusal(report)


def test_layers_of_one_structure_share_one() -> None:
    report = report_of("UnboundLayers")
    assert len(report["fused"]) > 1
    assert {item["certificate"] for item in report["fused"]} == {0} and len(
        report["certificates"]
    ) == 1


def times(certificate: Any, *factors: Any) -> None:
    """Claims another value: that which was claimed, times all these."""
    values, claim = certificate["values"], certificate["claims"][0]
    for factor in factors:
        values += [factor, ["mul", [claim["value"], len(values)]]]
        claim["value"] = len(values) - 1


def test_roots_of_squares_are_no_numbers() -> None:
    """``sqrt(s * s)`` is s or -s: a product of many such signs is 0 at nearly each point."""
    report, certificate = changed()
    values, claim = certificate["values"], certificate["claims"][0]
    place = len(values)
    values += [["leaf", [], [1], "s"], ["mul", [place, place]], ["sqrt", [place + 1]]]
    values += [["neg", [place]], ["add", [place + 2, place + 3]], ["add", [place + 2, place]]]
    values += [["mul", [place + 4, place + 5]], ["add", [claim["value"], place + 6]]]
    claim["value"] = len(values) - 1
    assert "is not what the kernel gives" in refusal(report)


def test_a_single_element_is_moved() -> None:
    check.Point("1")
    moved = check.Point.move(None, check.elements([7, 8]), [], 1, [], [])  # type: ignore[arg-type]
    assert type(moved) is check.Num and moved.shape == () and moved == 8


def test_roots_of_numbers_have_a_sign() -> None:
    report, certificate = changed()
    two = ["root", [], "2", 2**0.5]
    times(certificate, two, two, ["number", [], "-1/2", -0.5])
    assert "is not what the kernel gives" in refusal(report)
    certificate["values"][-2] = ["number", [], "1/2", 0.5]
    assert isinstance(outcomes(report)[0], check.Accepted)
    report, certificate = changed()
    times(certificate, ["root", [], "4", 2.0], ["number", [], "-1/2", -0.5])
    assert "is not what the kernel gives" in refusal(report)


@pytest.mark.parametrize("root", [str((1 << 36) + 1), "6469693230", "6469693230/31"])
def test_roots_of_large_numbers_are_refused(root: str) -> None:
    """Each prime in them halves the primes that are drawn."""
    report, certificate = changed()
    times(certificate, ["root", [], root, None])
    assert "a root of too large" in refusal(report) or "of too many" in refusal(report)


def test_what_the_kernel_takes_a_root_of_may_be_a_square() -> None:
    """Of rows ``t - e / (4 * t)`` it takes that of ``(t + e / (4 * t)) ** 2``, of any sign."""
    report, certificate = changed("PagedLite")
    (place,) = (
        at for at, entry in enumerate(certificate["values"]) if entry[:3] == ["leaf", [], [8, 576]]
    )
    new: list[Any] = [["leaf", [], [8, 1], "t"], ["inverse", [0]]]
    new += [["number", [], "-1/4000000", None], ["mul", [1, 2]], ["add", [0, 3]], ["neg", [3]]]
    new += [["add", [0, 5]], ["integers", [], [512], 1, [512], [0]], ["mul", [4, 7]]]
    new += [["leaf", [], [8, 64], "k"], ["join", [8, 9], 1]]

    def put(index: int) -> int:
        return 10 if index == place else index + len(new)

    values = certificate["values"] = new + [
        [op, list(map(put, operands)), *rest] for op, operands, *rest in certificate["values"]
    ]
    for claim in certificate["claims"]:
        claim.update({side: put(claim[side]) for side in ("value", "is")})
    certificate["arguments"] = {
        name: put(index) for name, index in certificate["arguments"].items()
    }
    assert isinstance(outcomes(report)[0], check.Accepted)
    root = next(at for at, entry in enumerate(values) if entry[0] == "sqrt")
    at = len(values)
    values += [["move", [root], [8, 1], 0, [8, 1], [1, 1]], ["inverse", [6]], ["mul", [at, at + 1]]]
    values += [["number", [], "1", 1.0], ["add", [at + 2, at + 3]]]  # 2, or 0
    signs = [len(values) + row for row in range(8)]
    values += [["move", [at + 4], [1], row, [1], [1]] for row in range(8)]
    product = signs[0]
    for sign in signs[1:]:
        values.append(["mul", [product, sign]])
        product = len(values) - 1
    for claim in certificate["claims"]:
        if claim["output"] == "kv_cache":
            values.append(["add", [claim["value"], product]])
            claim["value"] = len(values) - 1
    assert "is not what the kernel gives" in refusal(report)


def test_caches_are_claimed_as_the_kernel_writes_them() -> None:
    report, certificate = changed()
    for claim in certificate["claims"]:
        if claim["output"] == "kv_cache":
            for side in ("value", "is"):
                turned = [[8, 512], 7 * 512, [8, 512], [-512, 1]]
                certificate["values"].append(["move", [claim[side]], *turned])
                claim[side] = len(certificate["values"]) - 1
    assert "in another order" in refusal(report)


@pytest.mark.parametrize("move", [[[1], 0, [1], [1]], [[8192], 0, [8192], [0]]])
def test_results_are_claimed_whole(move: Any) -> None:
    report, certificate = changed()
    (claim,) = (claim for claim in certificate["claims"] if claim["output"] == "query")
    for side in ("value", "is"):
        certificate["values"].append(["move", [claim[side]], *move])
        claim[side] = len(certificate["values"]) - 1
    assert "in part" in refusal(report)


def test_a_number_for_each_head_is_none_for_each_token() -> None:
    report, certificate = changed()
    values = certificate["values"]
    at = len(values)
    values += [["leaf", [], [2, 1, 1], "f"], ["result", [], [2, 8, 512], "query"]]
    values.append(["mul", [at + 1, at]])
    assert "computed from a result" in refusal(report)


@pytest.mark.parametrize(
    "attribute",
    [
        ("rmsnorm_epsilon_cq", float("inf")),
        ("query_quant_mode", 1),
        ("ckvkr_repo_mode", 1),
        ("something_else", 1),
    ],
)
def test_other_attributes_are_refused(attribute: tuple[str, Any]) -> None:
    report, _ = changed()
    report["fused"][0]["attributes"].update([attribute])
    assert refusal(report)


def test_a_function_has_a_name() -> None:
    report, certificate = changed()
    certificate["values"].append(["function", [0, 0]])
    assert refusal(report)


def test_denominators_and_sums_have_heights() -> None:
    one, two = (5, 7), (3, 11)
    assert check.height_of("add", None, (), (one, two)) == (17, 18)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entries",
    one_in(
        1,
        [
            [["leaf", [], [1 << 25], "x"]],
            [["leaf", [], [1 << 22], "x"]] * 60,
            [["leaf", [], [512, 4096], "x"], ["leaf", [], [4096, 512], "y"], ["matmul", [0, 1]]]
            * 9,
            [["leaf", [], [1 << 20], "x"], *[["function", [0] * 200, "f"]] * 40],
        ],
    ),
)
def test_much_work_is_refused(entries: Any) -> None:
    report, certificate = changed()
    certificate["values"] = entries
    assert "too" in refusal(report)


def test_it_shares_nothing_with_the_pass(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text_of("PagedSqrtNorm"))
    lines = f"""
import runpy, sys
sys.argv = ["check.py", {str(tmp_path / "report.json")!r}]
try:
    runpy.run_path({check.__file__!r}, run_name="__main__")
except SystemExit as done:
    assert not done.code, done.code
assert not {{"torch", "mla_fusion"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "accepted" in done.stdout, done.stderr
    assert check.VERSION == trace.VERSION


def prime_of(seed: str) -> int:
    check.Point(seed)
    return check.Num.prime


def test_each_point_has_a_prime_of_its_own() -> None:
    """In a field, a number and that number plus the prime are one."""
    primes = [prime_of(str(seed)) for seed in range(64)]
    assert len(set(primes)) == 64 and field.P not in primes
    assert all(sympy.isprime(prime) and prime % 4 == 3 and prime >> 30 == 1 for prime in primes)
    report, certificate = changed()
    for entry in certificate["values"]:
        if entry[0] == "number":
            entry[2:] = [str(Fraction(entry[2]) + primes[0]), None]
    assert "is not what the kernel gives" in refusal(report)


def test_numbers_that_are_0_for_many_primes_are_refused() -> None:
    """A product of so many primes that each of them divides it would be 0 at every point."""
    report, certificate = changed()
    values, claim = certificate["values"], certificate["claims"][0]
    values.append(["number", [], "1" + "0" * 300, None])
    for _ in range(28):
        values.append(["mul", [len(values) - 1, len(values) - 1]])
    values.append(["mul", [claim["value"], len(values) - 1]])
    values.append(["inverse", [len(values) - 2]])
    values.append(["mul", [len(values) - 2, len(values) - 1]])
    claim["value"] = len(values) - 1
    assert "too high a degree" in refusal(report)


def test_roots_of_products_are_products_of_roots() -> None:
    check.Point("1", [2, 3, 5])
    a, b = check.elements([[2, 12, 4, 9], [8, 75, 25, 1]])
    assert np.array_equal((a * b).root(), a.root() * b.root())
    assert np.array_equal(a.root() * a.root(), a)
    assert (a.root()[2], a.root()[3]) == (2, 3)
    assert check.factors(1536) == {2, 3} and check.factors(7168 * 31) == {2, 7, 31}


def test_a_quotient_by_0_is_refused() -> None:
    report, certificate = changed()
    values, claim = certificate["values"], certificate["claims"][0]
    values += [["number", [], "0", 0.0], ["inverse", [len(values)]]]
    values += [["add", [claim["value"], len(values) - 1]]]
    claim["value"] = len(values) - 1
    assert refusal(report) == "a quotient by 0"


def test_it_is_short_enough_to_be_read() -> None:
    """In lines that hold code: those of words alone aside."""
    text = Path(check.__file__).read_text()
    words = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    code = [line for at, line in lines if at not in words and line.split("#")[0].strip()]
    assert len(code) < 500
