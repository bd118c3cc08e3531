"""Cache writes and head repeats of unfused graphs, onto GE operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion import converters, releases
from mla_fusion.tools.lowering import LoweringError
from tests.catalogue import base, prologues
from tests.exhaustive import one_in

UNTOUCHED = mf.Config(enable=False)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    mf.offline.activate()
    with converters.unfused_registered() as owners:
        assert set(owners.values()) == {"mla_fusion"}
        yield


def lowered(call: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> mf.Lowering:
    return mf.lower(call, *args, config=UNTOUCHED, dynamic=dynamic)


def inputs(graph: Any, kind: str) -> list[list[str]]:
    """The operator types that feed each operator of a kind."""
    types = {op.name: op.type for op in graph.op}
    return [
        [types[name.rpartition(":")[0]] for name in op.input] for op in graph.op if op.type == kind
    ]


PLAIN = ("PagedRotateHalf", "EvenOdd", "BlockOffset", "Neox")


@pytest.mark.parametrize(("name", "dynamic"), one_in(3, itertools.product(PLAIN, (False, True))))
def test_unfused_prologues_compile(name: str, dynamic: bool) -> None:
    args = base.paged_args()
    with torch._dynamo.config.patch(specialize_float=True):
        result = lowered(getattr(prologues, name)(), *args, dynamic=dynamic)
    assert result.ge_ops["ScatterNdUpdate"] == 2 and result.ge_ops["MlaPrologV3"] == 0


def test_rows_are_written_into_the_cache_itself() -> None:
    def write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        cache.index_copy_(0, slots, rows)

    result = lowered(write, torch.zeros(16, 4), torch.arange(3), torch.ones(3, 4))
    assert inputs(result.ge_graph, "ScatterNdUpdate") == [["Data", "Reshape", "Data"]]
    assert result.ge_ops["TensorMove"] == result.ge_ops["Assign"] == 0


def test_one_index_counts_from_the_end_as_in_torch() -> None:
    def write(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        cache[slots] = rows
        return cache

    result = lowered(write, torch.zeros(16, 4), torch.arange(3), torch.ones(3, 4))
    assert result.ge_ops["FloorMod"] == 1 and result.ge_ops["BroadcastTo"] == 0
    assert inputs(result.ge_graph, "FloorMod") == [["Data", "Const"]]


@pytest.mark.parametrize("dynamic", [False, True])
def test_two_indices_are_stacked_and_values_broadcast(dynamic: bool) -> None:
    def write(cache: Tensor, block: Tensor, offset: Tensor, row: Tensor) -> Tensor:
        cache[block, offset] = row
        return cache

    index = torch.arange(3)
    result = lowered(
        write, torch.zeros(4, 16, 8), index, index.clone(), torch.ones(8), dynamic=dynamic
    )
    assert (
        result.ge_ops["Pack"] >= 1,
        result.ge_ops["FloorMod"],
        result.ge_ops["BroadcastTo"],
    ) == (True, 2, 1)
    assert result.ge_ops["ScatterNdUpdate"] == 1


def test_index_copy_along_another_axis() -> None:
    def write(cache: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return cache.index_copy(1, positions, rows)

    result = lowered(write, torch.zeros(2, 16, 4), torch.arange(3), torch.ones(2, 3, 4))
    (scatter,) = (op for op in result.ge_graph.op if op.type == "ScatterElements")
    assert scatter.attr["axis"].i == 1


@pytest.mark.skipif(
    releases.numbers(torch.__version__) < (2, 10, 0), reason="before torch 2.10 it is traced apart"
)
@pytest.mark.parametrize(("dim", "axis"), [(1, 1), (-1, 2), (None, 0)])
def test_heads_are_repeated(dim: int | None, axis: int) -> None:
    def repeat(x: Tensor) -> Tensor:
        return torch.ops.aten.repeat_interleave.self_int(x, 3, dim)

    result = lowered(repeat, torch.zeros(2, 5, 4))
    (node,) = (op for op in result.ge_graph.op if op.type == "RepeatInterleave")
    assert node.attr["axis"].i == axis and result.ge_ops["Reshape"] == (dim is None)


@pytest.mark.parametrize(
    ("indices", "accumulate", "why"),
    [
        ([torch.arange(2)], True, "accumulate=True"),
        ([None, torch.arange(2)], False, "behind a full slice"),
        ([torch.arange(2)] * 3, False, "3 index tensors"),
        ([torch.arange(2), torch.arange(1)], False, "different shapes"),
    ],
)
def test_what_scatter_cannot_write_is_refused(
    indices: list[Any], accumulate: bool, why: str
) -> None:
    def write(cache: Tensor, row: Tensor) -> Tensor:
        given = [None if index is None else index + 0 for index in indices]
        return torch.ops.aten.index_put.default(cache, given, row, accumulate)

    with pytest.raises(LoweringError, match=why):
        lowered(write, torch.zeros(4, 4, 4, 2), torch.ones(()))
