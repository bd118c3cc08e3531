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


COUNTS: dict[str, tuple[Table, Table]] = {
    "difference": (lambda p: (p * 101).float() - (p * 100).float(), torch.Tensor.float),
    "and back": (lambda p: p.float() + 2.0**24 - 2.0**24, torch.Tensor.float),
    "int32": (lambda p: (p.int() * 8000).double() / 8000, torch.Tensor.double),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_a_dtype_has_not(name: str) -> None:
    report = report_of(at_positions(*COUNTS[name]))
    assert not report.fused and report.rejected


@pytest.mark.parametrize("factor", [4000, 33])
def test_what_positions_are_taken_to_be_is_said(factor: int) -> None:
    """They are below 2**19, where a dtype has not their products with a number otherwise."""
    dtype = torch.int32 if factor == 4000 else torch.float32
    less = factor // 33 * 3 + 1
    (fusion,) = report_of(
        at_positions(lambda p: (p.to(dtype) * less).double() / less, torch.Tensor.double)
    ).fused
    assert any("holds numbers below 2**19" in line for line in fusion.assumptions)


@pytest.mark.parametrize(
    "make", [torch.Tensor.float, torch.Tensor.double, lambda p: (p * 2).float() / 2]
)
def test_counts_that_a_dtype_has(make: Table) -> None:
    assert report_of(at_positions(make, make)).fused


def other_row(table: Tensor) -> Tensor:
    return torch.cat([torch.full_like(table[:1], 0.5), table[1:]])


def test_tables_that_differ_in_a_row() -> None:
    report = report_of(by_tables(itself, other_row))
    assert [item.code for item in report.rejected] == ["rope.tables_differ"]


@pytest.mark.parametrize("other", [itself, torch.clone, lambda table: table.neg().neg()])
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
