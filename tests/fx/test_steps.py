"""Sizes that operators hold equal: as many rows as slots, as many rows of a table as tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mla_fusion.meta.number_formats import E8M0_NUMBER
from torch import Tensor

from mla_fusion.fx.steps import rows_in_step
from tests.fx.tracing import floats, integers, trace

npu = torch.ops.npu


def pairs(fn: Callable[..., Tensor], *args: Tensor) -> set[frozenset[int]]:
    return {frozenset(pair) for node in trace(fn, *args).graph.nodes for pair in rows_in_step(node)}


def test_rows_written_at_slots() -> None:
    found = pairs(
        lambda cache, slots, rows: cache.index_put((slots,), rows),
        floats(9, 4),
        integers(5),
        floats(5, 4),
    )
    assert found == {frozenset({5})}


def test_rows_written_at_places_in_blocks() -> None:
    found = pairs(
        lambda cache, blocks, places, rows: cache.index_put((blocks, places), rows),
        floats(9, 4, 8),
        integers(5),
        integers(1, 5)[0],
        floats(5, 8),
    )
    assert found == {frozenset({5})}


def test_one_row_for_all_slots_says_nothing() -> None:
    assert (
        pairs(
            lambda cache, slots, row: cache.index_put((slots,), row),
            floats(9, 4),
            integers(5),
            floats(4),
        )
        == set()
    )


def test_rows_scattered_by_operators() -> None:
    nd = lambda cache, slots, rows: npu.npu_scatter_nd_update(cache, slots, rows)  # noqa: E731
    assert pairs(nd, floats(9, 4), integers(5, 1), floats(5, 4)) == {frozenset({5})}


def test_scales_of_blocks() -> None:
    x, w = floats(5, 128).to(torch.float8_e4m3fn), floats(128, 64).to(torch.float8_e4m3fn)
    scale, x_scale = (
        torch.zeros(2, 64, 2, dtype=torch.uint8),
        torch.zeros(5, 2, 2, dtype=torch.uint8),
    )
    codes = {
        "scale_dtype": E8M0_NUMBER,
        "pertoken_scale_dtype": E8M0_NUMBER,
        "group_sizes": [1, 1, 32],
        "output_dtype": torch.bfloat16,
    }
    run = lambda *given: npu.npu_quant_matmul(*given[:3], pertoken_scale=given[3], **codes)  # noqa: E731
    assert pairs(run, x, w, scale, x_scale) == {frozenset({5}), frozenset({2})}


@pytest.mark.parametrize("operator", [npu.npu_interleave_rope, npu.npu_rotary_mul])
def test_tables_of_a_rotation(operator: Callable[..., Tensor]) -> None:
    x, table = floats(3, 2, 1, 64).bfloat16(), floats(3, 1, 1, 64).bfloat16()
    found = pairs(operator, x, table, table)
    assert {frozenset({64}), frozenset({3}), frozenset({2, 1})} <= found


def test_caches_of_the_keys_operator_are_as_wide_as_their_rows() -> None:
    kv, gamma, table = (floats(*shape).bfloat16() for shape in ((3, 1, 1, 6), (4,), (3, 1, 1, 2)))
    caches = (floats(5, 7, 1, width).bfloat16() for width in (2, 4))
    (node,) = (
        node
        for node in trace(
            lambda *given: npu.npu_kv_rmsnorm_rope_cache(*given, cache_mode="PA_BNSD")[0],
            *(kv, gamma, table, table, integers(3), *caches),
        ).graph.nodes
        if "rope_cache" in str(node.target)
    )
    assert {(2, 2), (4, 4)} <= set(rows_in_step(node))


def test_other_operators_say_nothing() -> None:
    assert pairs(lambda a, b: torch.cat([a + b, a]) @ b.t(), floats(4, 3), floats(4, 3)) == set()
