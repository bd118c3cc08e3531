"""Sizes that operators hold equal: as many rows as slots, as many rows of a table as tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.fx.steps import rows_in_step
from tests.fx.tracing import floats, integers, trace

npu = torch.ops.npu


def pairs(fn: Callable[..., Tensor], *args: Tensor) -> set[frozenset[int]]:
    return {frozenset(pair) for node in trace(fn, *args).graph.nodes for pair in rows_in_step(node)}


def test_rows_written_at_slots() -> None:
    found = pairs(lambda cache, slots, rows: cache.index_put((slots,), rows), floats(9, 4), integers(5), floats(5, 4))
    assert found == {frozenset({5})}


def test_one_row_for_all_slots_says_nothing() -> None:
    assert (
        pairs(lambda cache, slots, row: cache.index_put((slots,), row), floats(9, 4), integers(5), floats(4)) == set()
    )


@pytest.mark.parametrize("operator", [npu.npu_interleave_rope, npu.npu_rotary_mul])
def test_tables_of_a_rotation(operator: Callable[..., Tensor]) -> None:
    x, table = floats(3, 2, 1, 64).bfloat16(), floats(3, 1, 1, 64).bfloat16()
    found = pairs(operator, x, table, table)
    assert {frozenset({64}), frozenset({3}), frozenset({2, 1})} <= found


def test_other_operators_say_nothing() -> None:
    assert pairs(lambda a, b: torch.cat([a + b, a]) @ b.t(), floats(4, 3), floats(4, 3)) == set()
