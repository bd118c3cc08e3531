"""The boundary: weights packed once, caches viewed, the caller's tensors written."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile import torchair_bridge
from tests.catalogue import base, prologues
from tests.harness import assert_as_exact, clones, compiled, run_fused


@pytest.mark.parametrize("rank", [2, 3])
def test_cache_of_another_shape_is_viewed(rank: int) -> None:
    torch.manual_seed(0)
    model, args = prologues.PagedRotateHalf(), prologues.flat_cache_args(rank)
    given = clones(args)
    fused = run_fused(model, given)
    assert mf.reports()[-1].fused[0].placement == "in place"
    assert_as_exact(model, args, fused)


@pytest.mark.parametrize("rank", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_viewed_cache_is_written_in_place_by_npugraph_ex(rank: int) -> None:
    lowered = mf.lower(
        prologues.PagedRotateHalf(), *prologues.flat_cache_args(rank), mode="npugraph_ex"
    )
    (call,) = [
        n for n in lowered.fx_after.graph.nodes if str(n.target) == "npu.npu_mla_prolog_v3.default"
    ]
    assert [node.op for node in call.args[9:11]] == ["placeholder", "placeholder"]
    assert not any("copy_" in op or "clone" in op for op in lowered.fx_ops if "_to_copy" not in op)


class PoolOfRows(prologues.NpuOperators):
    """SGLang: the fused cache operator is handed views of pools that hold rows."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_pool: Tensor, kr_pool: Tensor, slots: Tensor
    ) -> Tensor:
        kv_cache, kr_cache = (
            pool.view(-1, base.BLOCK_SIZE, 1, pool.shape[-1]) for pool in (kv_pool, kr_pool)
        )
        return super().forward(x, cos, sin, kv_cache, kr_cache, slots)


@pytest.mark.parametrize("dynamic", [False, True])
def test_pools_are_viewed_for_the_fused_cache_operator(dynamic: bool) -> None:
    torch.manual_seed(0)
    x, cos, sin, *caches, slots = base.paged_args()
    args = (x, cos, sin, *(cache.view(-1, 1, cache.shape[-1]) for cache in caches), slots)
    model, given = PoolOfRows(), clones(args)
    fused = compiled(model, given, mf.backend(), dynamic=dynamic)
    assert [f.placement for f in mf.reports()[-1].fused] == ["in place"], str(mf.reports()[-1])
    assert_as_exact(model, args, fused)
    if not dynamic:
        lowered = mf.lower(model, *args)
        assert (
            lowered.ge_ops["MlaPrologV3"] == 1
            and not lowered.ge_ops["TensorMove"] + lowered.ge_ops["Assign"]
        )


def test_layers_that_share_weights_share_the_packed_ones() -> None:
    torch.manual_seed(0)
    model = prologues.Layers(count=2)
    model.layers[1] = model.layers[0]
    run_fused(model, clones(prologues.layers_args(count=2)))
    shared = mf.reports()[-1].bytes_added
    run_fused(prologues.Layers(count=2), clones(prologues.layers_args(count=2)))
    assert mf.reports()[-1].bytes_added == 2 * shared


def test_hook_in_torchair() -> None:
    """The pass through torchair's own pre-pass hook: one kernel, weights packed in the graph."""
    lowered = mf.lower(
        prologues.PagedRotateHalf(), *base.paged_args(), mode="npugraph_ex", hook=True
    )
    assert lowered.fx_ops["npu.npu_mla_prolog_v3.default"] == 1
    assert lowered.report is not None and len(lowered.report.fused) == 1


def test_hook_packs_weights_from_nothing_but_frozen_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torchair's ``frozen_parameter`` parameters are constants in GE: packing folds away."""
    kept: list[Any] = []
    compile_graph = torchair_bridge.compile_graph

    def keep(*args: Any) -> Any:
        kept.append(compile_graph(*args))
        return kept[-1]

    monkeypatch.setattr(torchair_bridge, "compile_graph", keep)
    # half-layout RoPE: columns are permuted, so there is much to pack
    mf.lower(prologues.Neox(), *base.paged_args(), hook=True)
    (made,) = kept
    frozen = import_module("torchair._ge_concrete_graph.graph_pass").get_frozen_flag(
        made.runner._input_info_list
    )
    operators = {op.name: op for op in made.proto.op}

    def data_above(name: str) -> set[int]:
        op = operators[name.rpartition(":")[0]]
        if op.type == "Data":
            return {op.attr["index"].i}
        return {index for source in op.input if source for index in data_above(source)}

    (kernel,) = (op for op in made.proto.op if op.type == "MlaPrologV3")
    token_x, *weights = (data_above(name) for name in kernel.input[:5])
    for above in weights:
        assert above and all(frozen[index] for index in above)
    assert not any(frozen[index] for index in token_x)
    assert any(operators[name.rpartition(":")[0]].type != "Data" for name in kernel.input[1:5])
