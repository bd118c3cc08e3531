"""Static W8A8 in npu_mla_preprocess: what the real torchair makes of it, and what only the whole
graph shows.
"""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf
from mla_fusion.tools.lowering import LoweringError
from tests.catalogue import static
from tests.harness import graph_of, outcome, refused, traced_graph

CONFIG = mf.Config(targets=("preprocess",))


def test_a_captured_graph_writes_the_placeholders() -> None:
    """One call, weights packed outside, nothing copied into the caches."""
    torch.manual_seed(0)
    lowered = mf.lower(
        static.StaticFused(), *static.static_args(), mode="npugraph_ex", config=CONFIG
    )
    (call,) = (
        node
        for node in lowered.fx_after.graph.nodes
        if str(node.target) == "atb.npu_mla_preprocess.out"
    )
    caches = [*call.args[13:15], call.kwargs["kv_cache_out0"], call.kwargs["kv_cache_out1"]]
    assert [cache.op for cache in caches] == ["placeholder"] * 4 and caches[:2] == caches[2:]
    assert not any("copy_.default" in name or "clone" in name for name in lowered.fx_ops)


def test_ge_has_no_such_operator() -> None:
    with pytest.raises(LoweringError, match=r"atb\.npu_mla_preprocess\.out"):
        mf.lower(static.StaticFused(), *static.static_args(), mode="ge", config=CONFIG)


def test_weights_on_a_device_are_in_blocks() -> None:
    gm = graph_of(static.StaticW8A8(), *static.static_args(), device="npu")
    assert outcome(mf.fuse(gm, CONFIG)) == ("in place",)
    (call,) = (node for node in gm.graph.nodes if str(node.target) == "atb.npu_mla_preprocess.out")
    assert list(call.args[3].meta["val"].shape) == [1, static.H // 32, 2112, 32]
    assert "npu_format_cast" in str(call.args[3].target)


def test_more_tokens_than_the_operator_takes() -> None:
    rejection = refused(traced_graph(static.StaticByOperators(), *static.static_args(1056)), CONFIG)
    assert rejection.code == "contract:dims.t" and "1..1024" in rejection.message


def test_a_symbolic_number_of_tokens() -> None:
    gm = traced_graph(static.StaticByOperators(), *static.static_args(), dynamic=True)
    rejection = refused(gm, CONFIG)
    assert rejection.code == "contract:dims.t" and "mark it static" in rejection.message


def test_the_operator_is_none_of_a5() -> None:
    gm = traced_graph(static.StaticByOperators(), *static.static_args())
    rejection = refused(gm, mf.Config(targets=("preprocess",), soc="A5"))
    assert rejection.code == "contract:soc"


def test_the_ladder_goes_on_to_the_keys_half() -> None:
    gm = traced_graph(static.OtherEpsilon(), *static.static_args())
    report = mf.fuse(gm, mf.Config(targets=("v3", "preprocess", "key")))
    assert [fusion.target for fusion in report.fused] == ["key"]
    assert report.fused[0].instead_of.startswith("[norm.epsilon]")
