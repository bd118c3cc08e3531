"""Layers of one pool are written in place by the kernel, and no pool is copied."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compile.adapted import SlotError
from tests.catalogue.base import Base, paged_args
from tests.catalogue.pools import (
    LAYERS,
    BlocksOfLayers,
    CountedFromTheEnd,
    LayersOfAPool,
    LayersOfSlices,
    UnboundLayers,
    pool_args,
)
from tests.harness import outcome, run_fused, traced_graph

MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("kind", "dynamic"),
    [
        (LayersOfAPool, False),
        (BlocksOfLayers, False),
        pytest.param(LayersOfAPool, True, marks=MORE),
        pytest.param(UnboundLayers, False, marks=MORE),
        pytest.param(UnboundLayers, True, marks=MORE),
        pytest.param(LayersOfSlices, True, marks=MORE),
        pytest.param(CountedFromTheEnd, False, marks=MORE),
    ],
)
def test_as_lowered_no_pool_is_copied(kind: type[LayersOfAPool], dynamic: bool) -> None:
    with torch._dynamo.config.patch(specialize_float=True):
        ge = mf.lower(kind(), *pool_args(), mode="ge", dynamic=dynamic)
        ex = mf.lower(kind(), *pool_args(), mode="npugraph_ex", dynamic=dynamic)
    assert ge.ge_ops["MlaPrologV3"] == LAYERS
    assert (
        not {"TensorMove", "Assign", "Slice", "ScatterUpdate", "Select", "ConcatV2"}
        & ge.ge_ops.keys()
    )
    calls = [
        node
        for node in ex.fx_after.graph.nodes
        if str(node.target) == "npu.npu_mla_prolog_v3.default"
    ]
    caches = [cache for call in calls for cache in call.args[9:11]]
    assert len(caches) == 2 * LAYERS == len(set(caches)) and {cache.op for cache in caches} == {
        "placeholder"
    }
    assert not any(
        "scatter" in name or "copy_" in name or "clone" in name
        for name in ex.fx_ops
        if "_to_" not in name
    )


@pytest.mark.parametrize("pooled", [False, True])
def test_a_cache_that_lies_in_wider_rows_is_staged(pooled: bool) -> None:
    """Rows that the kernel writes to such a cache do not arrive."""
    torch.manual_seed(0)
    x, cos, sin, kv_pool, *_, slots = pool_args() if pooled else paged_args()
    caches = (torch.randn(*kv_pool.shape[:-1], 576).bfloat16()[..., :width] for width in (512, 64))
    model, args = LayersOfAPool() if pooled else Base(), (x, cos, sin, *caches, slots)
    report = mf.explain(traced_graph(model, *args), boundary=True)
    assert set(outcome(report)) == {"staged"} and "strides" in report.fused[0].placement


def test_slots_are_checked_against_their_layer() -> None:
    torch.manual_seed(0)
    *rest, slots = pool_args()
    slots[0] = rest[3][0].numel() // rest[3].shape[-1]  # the first row of the next layer
    with pytest.raises(SlotError, match="has 64 rows"):
        run_fused(LayersOfAPool(), (*rest, slots), mf.Config(slots="checked"))


class FirstRows(torch.nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x[: other.shape[0]] + other


def test_looking_for_parts_guards_no_size() -> None:
    gm = traced_graph(FirstRows(), torch.randn(8, 4), torch.randn(5, 4), dynamic=True)
    sizes = [node.meta["val"].shape[0] for node in gm.graph.find_nodes(op="placeholder")]
    before = len(sizes[0].node.shape_env.guards)
    mf.explain(gm, boundary=True)
    assert len(sizes[0].node.shape_env.guards) == before
