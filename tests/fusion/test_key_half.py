"""The key's half alone, where the whole prologue is not to be had: the ladder, the report, int8
rows, real torchair.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import base, keys, misses_keys, prologues
from tests.catalogue.base import DR, HCKV, D
from tests.harness import outcome, refused, traced_graph

from .ge_graphs import same_wiring

BOTH = mf.Config(targets=("v3", "key"))


def test_the_whole_wins_where_it_is_possible() -> None:
    report = mf.fuse(traced_graph(prologues.Layers(), *prologues.layers_args()), BOTH)
    assert [fusion.target for fusion in report.fused] == ["v3"] * 3
    assert {fusion.operator for fusion in report.fused} == {"npu_mla_prolog_v3"}


def test_the_key_alone_is_taken_on_request() -> None:
    report = mf.fuse(
        traced_graph(prologues.Layers(), *prologues.layers_args()), mf.Config(targets=("key",))
    )
    assert [fusion.target for fusion in report.fused] == ["key"] * 3
    assert {fusion.instead_of for fusion in report.fused} == {""}
    assert len({fusion.picture for fusion in report.fused}) == 1


@pytest.mark.parametrize(
    ("targets", "taken"), [(("v3", "identity", "key"), "identity"), (("v3", "key"), "key")]
)
def test_an_unabsorbed_query(targets: tuple[str, ...], taken: str) -> None:
    class Unabsorbed(base.Base):
        def absorb(self, q_nope: Tensor) -> Tensor:
            return nn.functional.pad(q_nope, (0, HCKV - D))

    report = mf.fuse(traced_graph(Unabsorbed(), *base.paged_args()), mf.Config(targets=targets))
    assert [fusion.target for fusion in report.fused] == [taken]


@pytest.mark.parametrize("targets", [(), ("v4",), ("v3", "v4"), "key", ([],)])
def test_targets_that_there_are_not(targets: Any) -> None:
    with pytest.raises(ValueError, match=r"Config\.targets"):
        mf.Config(targets=targets)


def test_targets_are_in_the_ladders_order() -> None:
    config = mf.Config(targets=("key", "v3", "identity"))
    assert config.targets == ("v3", "identity", "key")
    assert mf.Config() == mf.Config(targets=("v3",))


def test_the_report_says_which_step_down_was_taken() -> None:
    report = mf.fuse(traced_graph(keys.PagedLite(), *base.paged_args()), BOTH)
    (fusion,) = report.fused
    assert fusion.instead_of.startswith("[q_lora.absent]") and fusion.dims["Hckv"] == HCKV
    assert "npu_kv_rmsnorm_rope_cache_v2, in place" in str(report)
    assert "not by the target above: [q_lora.absent]" in str(report)
    (told,) = json.loads(report.to_json())["fused"]
    assert told["target"] == "key" and told["operator"] == "npu_kv_rmsnorm_rope_cache_v2"
    assert any("RMSNorm of 512 columns" in line for line in fusion.proof)
    drawn = {part.role for part in report.pictures[fusion.picture].before.parts}  # type: ignore[index, union-attr]
    assert {"norm", "rope", "write"} <= drawn


def test_a_rejection_says_why_the_half_was_not_taken_either() -> None:
    rejection = refused(traced_graph(misses_keys.WideWeight(), *base.paged_args()), BOTH)
    assert rejection.code == "q_lora.absent"
    assert [text.partition("]")[0] for text in rejection.below] == ["[norm.gamma_dtype"]
    report = mf.explain(traced_graph(misses_keys.WideWeight(), *base.paged_args()), BOTH)
    assert "next target: [norm.gamma_dtype]" in str(report)


def test_what_config_skips_is_left_alone() -> None:
    gm = traced_graph(keys.PagedLite(), *base.paged_args())
    assert refused(gm, mf.Config(targets=("v3", "key"), skip=("q_lora.absent",))).code == "skip"


def test_the_querys_layout_is_the_models() -> None:
    """Config.kr_layout speaks of all readers of the cache; the query that stays here reads
    pairs.
    """
    config = mf.Config(targets=("key",), kr_layout="half")
    report = mf.fuse(traced_graph(keys.ComplexLite(), *prologues.dense_args()), config)
    assert outcome(report) == ("staged",)


def test_staging_forbidden() -> None:
    config = mf.Config(targets=("key",), staging="never")
    assert (
        refused(traced_graph(keys.ComplexLite(), *prologues.dense_args()), config).code
        == "cache.staging_forbidden"
    )


def test_caches_that_the_operator_refuses_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_SIZE", 8)
    report = mf.fuse(
        traced_graph(keys.PagedLite(), *base.paged_args()), mf.Config(targets=("key",))
    )
    assert "the kernel refuses the caches (dims.blocksize)" in report.fused[0].placement


def test_a_latent_that_a2_and_a3_do_not_take() -> None:
    gm = traced_graph(misses_keys.NarrowLatent(), *base.paged_args())
    assert refused(gm, mf.Config(targets=("key",))).code == "contract:dims.c"
    assert outcome(mf.fuse(gm, mf.Config(targets=("key",), soc="A5"))) == ("staged",)


# -- the real torchair


class ByHand(keys.Lite):
    """The operator called by hand, in place of norm, rotation and writes."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        q_nope, q_pe = self.split(self.q_proj(x))
        tables = cos.view(1, 1, -1, DR), sin.view(1, 1, -1, DR)
        q_pe = self.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(
            self.kv_a_proj_with_mqa(x).view(1, 1, -1, HCKV + DR),
            self.kv_a_layernorm.weight,
            *tables,
            slots,
            kr_cache,
            kv_cache,
            epsilon=1e-6,
            cache_mode="PA_BNSD",
        )
        return base.attend(
            self.absorb(q_nope), q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR)
        )


class Plain(keys.Lite):
    def forward(self, *args: Tensor) -> Any:
        return super().forward(*args)[0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_ge_graph_is_the_handwritten_one(dynamic: bool) -> None:
    args = base.paged_args()
    with torch._dynamo.config.patch(specialize_float=True):
        fused = mf.lower(Plain(), *args, mode="ge", dynamic=dynamic, config=BOTH)
        byhand = mf.lower(
            ByHand(), *args, mode="ge", dynamic=dynamic, config=mf.Config(enable=False)
        )
    assert fused.ge_ops == byhand.ge_ops
    assert same_wiring(fused.ge_graph, byhand.ge_graph)
    assert fused.ge_ops["KvRmsNormRopeCache"] == 1
    assert fused.ge_ops["TensorMove"] == fused.ge_ops["Assign"] == 0


def test_npugraph_ex_writes_the_placeholders() -> None:
    args = base.paged_args()
    fused = mf.lower(Plain(), *args, mode="npugraph_ex", config=BOTH)
    byhand = mf.lower(ByHand(), *args, mode="npugraph_ex", config=mf.Config(enable=False))
    assert fused.fx_ops == byhand.fx_ops
    (call,) = (
        n
        for n in fused.fx_after.graph.nodes
        if str(n.target) == "npu.npu_kv_rmsnorm_rope_cache_v2.default"
    )
    assert [cache.op for cache in call.args[5:7]] == ["placeholder", "placeholder"]
