"""Query and key rotated by tables that no draw tells apart: of positions that are large, of rows
that are not read, of an input and an attribute of one name. Verification is off.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary
from tests.exhaustive import one_in
from tests.soundness import captures
from tests.soundness.inputs import ordinary
from tests.soundness.program import STYLES, Change, prologue

UNVERIFIED = mf.Config(verify="off")
Table = Callable[[Tensor], Tensor]


def report_of(program: Callable[[Any], Any]) -> mf.Report:
    captured = captures.static(program, ordinary(8, 0))
    return fuse_with_boundary(captured.graph, captured.inputs, UNVERIFIED)[0]


def at_positions(of_query: Table, of_key: Table) -> Callable[[Any], Any]:
    """Angles of what either makes of the positions."""

    def program(given: Any) -> Any:
        turns = cycle((of_query, of_key))
        change = Change(("q_positions", "k_positions"), lambda value, _: next(turns)(value))
        return prologue(given, STYLES["angles"], change)

    return program


def by_tables(of_query: Table, of_key: Table) -> Callable[[Any], Any]:
    """What either makes of an input of 32768 rows, read at the positions."""

    def program(given: Any) -> Any:
        of_both = ((make, name) for make in (of_query, of_key) for name in ("all_cos", "all_sin"))
        tables = [make(given[name]) for make, name in of_both]
        turns = cycle([table[given["positions"]] for table in tables])
        change = Change(("q_cos", "q_sin", "k_cos", "k_sin"), lambda *_: next(turns))
        return prologue(given, STYLES["neox"], change)

    return program


def itself(value: Tensor) -> Tensor:
    return value


def narrow(positions: Tensor) -> Tensor:
    """4096 rounds to 4096, and so does 4095."""
    return (positions % 4096).bfloat16()


ROUNDED: dict[str, tuple[Table, Table]] = {
    "clamp": (lambda p: narrow(p).clamp(max=4095).float(), lambda p: narrow(p).float()),
    "minimum": (
        lambda p: torch.minimum(narrow(p), torch.tensor(4095.0)),
        lambda p: narrow(p).float(),
    ),
    "product": (
        lambda p: ((p % 200).bfloat16() * 5).clamp(max=995).float(),
        lambda p: ((p % 200).bfloat16() * 5).float(),
    ),
    "sum": (
        lambda p: ((p % 250).bfloat16() + 10).clamp(max=259).float(),
        lambda p: ((p % 250).bfloat16() + 10).float(),
    ),
}
BESIDE: dict[str, tuple[Table, Table]] = {
    "squared over itself": (itself, lambda t: t * t / t),
    "cubed over its square": (itself, lambda t: t**3 / t**2),
    "times its inverse": (itself, lambda t: t.square() * t.reciprocal()),
    "there and back": (itself, lambda t: (t + 3) - 3),
    "in another order": (itself, lambda t: t * 0.3 / 0.3),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_bound_that_rounding_passes(name: str) -> None:
    assert not report_of(at_positions(*ROUNDED[name])).fused


@pytest.mark.parametrize("bound", [4096, 5000])
def test_a_bound_that_rounding_does_not_pass(bound: int) -> None:
    tables = (lambda p: narrow(p).clamp(max=bound).float(), lambda p: narrow(p).float())
    assert report_of(at_positions(*tables)).fused


@pytest.mark.parametrize(
    "name",
    [
        "in another order",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(BESIDE)[:4]),
    ],
)
def test_tables_that_another_computation_makes(name: str) -> None:
    report = report_of(by_tables(*BESIDE[name]))
    assert [item.code for item in report.rejected] == ["rope.tables_differ"]
    assert report_of(by_tables(*BESIDE[name][1:] * 2)).fused


@pytest.mark.parametrize(
    "make",
    [torch.Tensor.float, torch.Tensor.double, lambda p: (p * 2).float() / 2, lambda p: p * 0.3 + 1],
)
def test_counts_that_a_dtype_has(make: Table) -> None:
    assert report_of(at_positions(make, make)).fused


def other_row(table: Tensor) -> Tensor:
    return torch.cat([torch.full_like(table[:1], 0.5), table[1:]])


def test_tables_that_differ_in_a_row() -> None:
    report = report_of(by_tables(itself, other_row))
    assert [item.code for item in report.rejected] == ["rope.tables_differ"]


@pytest.mark.parametrize("other", one_in(1, [lambda table: table.neg().neg(), itself, torch.clone]))
def test_tables_that_are_equal(other: Table) -> None:
    assert report_of(by_tables(itself, other)).fused


class OneName(nn.Module):
    """The key's tables are attributes that are called as the query's, which are inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("cos", "sin"):
            self.register_buffer(name, ordinary(8, 5)[name])

    def forward(self, cos: Tensor, sin: Tensor, given: dict[str, Tensor]) -> Any:
        turns = cycle([cos, sin, self.cos, self.sin])
        change = Change(("q_cos", "q_sin", "k_cos", "k_sin"), lambda *_: next(turns))
        return prologue(given | {"cos": cos, "sin": sin}, STYLES["neox"], change)


def test_an_input_is_no_attribute_of_its_name() -> None:
    given = ordinary(8, 0)
    args = given.pop("cos"), given.pop("sin"), given
    exported = torch.export.export(OneName(), args, strict=False).run_decompositions({})
    report = mf.explain(exported.module(), UNVERIFIED, boundary=True)
    assert [item.code for item in report.rejected] == ["rope.tables_differ"]
