"""The examples for serving stacks: the graphs they make, and what they print."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mla_fusion as mf
from tests.exhaustive import one_in

FOLDER = Path(__file__).parents[2] / "examples" / "serving"
STOPPED = "stopped before running the compiled graph"
SAID = {
    "cann_recipes.py": [STOPPED, "fused 1, left 0", "1 MlaPrologV3"],
    "npugraph_ex.py": [STOPPED, "fused 1, left 0", "1 npu.npu_mla_prolog_v3.default"],
    "vllm_ascend.py": [
        "open: mla_fusion: fused 1, left 0",
        "opaque: mla_fusion: fused 0, left 0",
        "eager 0.0e+00",
    ],
}


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("layer")
    del sys.modules["layer"]


def test_every_example_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {*SAID, "layer.py"}


@pytest.mark.parametrize("name", one_in(2, sorted(SAID), first=1))
def test_example_runs(
    name: str, layer: ModuleType, tmp_path: Path, monkeypatch: Any, capsys: Any, caplog: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    printed = capsys.readouterr()
    for words in SAID[name]:
        assert words in printed.out
    if name == "vllm_ascend.py":
        assert "1 x vllm::mla_forward holds the whole attention" in caplog.text


@pytest.mark.parametrize("hook", one_in(1, [False, True]))
def test_ge_graph_of_the_layer_is_two_kernels(layer: ModuleType, hook: bool) -> None:
    """cann-recipes' operators through hook and backend: one graph, caches in place."""
    model, arguments = layer.example()
    lowered = mf.lower(model, *arguments, hook=hook)
    assert lowered.ge_ops["MlaPrologV3"] == lowered.ge_ops["FusedInferAttentionScore"] == 1
    gone = {
        "RmsNorm",
        "InterleaveRope",
        "KvRmsNormRopeCache",
        "TransposeBatchMatMul",
        "TensorMove",
        "Assign",
        "Cast",
    }
    assert not gone & set(lowered.ge_ops)
    assert [fusion.placement for fusion in lowered.report.fused] == ["in place"]


def test_cann_recipes_own_attention_over_nz_caches(layer: ModuleType) -> None:
    """Its decode layer as it stands there: RoPE in [1, N, T, Dr], PA_NZ caches, viewed in five axes
    by attention.
    """
    mf.offline.activate()
    import torchair
    from layer import BLOCK_SIZE, BLOCKS, DR, EPSILON, HCKV, D, N

    class Decode(layer.Attention):
        def forward(self, x, cos, sin, slots, block_tables, seq_lens, kv_cache, kr_cache):
            npu = torch.ops.npu
            c_q, _ = npu.npu_rms_norm(x @ self.w_dq, self.gamma_cq, EPSILON)
            q_nope, q_pe = (c_q @ self.w_uq_qr).view(-1, N, D + DR).split([D, DR], dim=-1)
            perms = {"perm_x1": (1, 0, 2), "perm_x2": (0, 1, 2), "perm_y": (1, 0, 2)}
            query = npu.npu_transpose_batchmatmul(q_nope, self.w_uk, **perms).view(-1, 1, N, HCKV)
            tables = (cos.view(1, 1, -1, DR), sin.view(1, 1, -1, DR))
            q_pe = npu.npu_interleave_rope(q_pe.unsqueeze(0).transpose(1, 2), *tables)
            query_rope = q_pe.view(1, N, -1, DR).transpose(1, 2).view(-1, 1, N, DR)
            latent = (x @ self.w_dkv_kr).view(-1, 1, 1, HCKV + DR)
            tables = (cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR))
            npu.npu_kv_rmsnorm_rope_cache_v2(
                latent,
                self.gamma_ckv,
                *tables,
                slots,
                kr_cache,
                kv_cache,
                epsilon=EPSILON,
                cache_mode="PA_NZ",
            )
            key = kv_cache.view(BLOCKS, 1, HCKV // 16, BLOCK_SIZE, 16)
            key_rope = kr_cache.view(BLOCKS, 1, DR // 16, BLOCK_SIZE, 16)
            context, _ = torchair.ops.npu_fused_infer_attention_score_v2(
                query,
                key,
                key,
                query_rope=query_rope,
                key_rope=key_rope,
                num_query_heads=N,
                num_key_value_heads=1,
                softmax_scale=0.07,
                input_layout="BSND",
                block_table=block_tables,
                block_size=BLOCK_SIZE,
                actual_seq_kvlen=seq_lens,
            )
            values = torch.bmm(context.view(-1, N, HCKV).transpose(0, 1), self.w_uv).transpose(0, 1)
            return values.reshape(x.shape[0], -1) @ self.w_o

    _, arguments = layer.example()
    lowered = mf.lower(Decode(), *arguments, hook=True)
    (fusion,) = lowered.report.fused
    assert (fusion.cache_mode, fusion.placement) == ("PA_NZ", "in place")
    assert lowered.ge_ops["MlaPrologV3"] == lowered.ge_ops["FusedInferAttentionScore"] == 1
    assert not {"TensorMove", "Assign", "KvRmsNormRopeCache", "InterleaveRope"} & set(
        lowered.ge_ops
    )


def test_npugraph_ex_writes_in_place(layer: ModuleType) -> None:
    model, arguments = layer.example()
    lowered = mf.lower(
        model, *arguments[:5], arguments[5].tolist(), *arguments[6:], mode="npugraph_ex", hook=True
    )
    assert lowered.fx_ops["npu.npu_mla_prolog_v3.default"] == 1
    assert lowered.fx_ops["aten.copy_.default"] == 0
    (call,) = [
        node
        for node in lowered.fx_after.graph.nodes
        if str(node.target) == "npu.npu_mla_prolog_v3.default"
    ]
    assert [call.args[position].op for position in (9, 10)] == ["placeholder", "placeholder"]


def test_layer_computes_attention(layer: ModuleType) -> None:
    """The example's operators are emulated on CPU; its output is that of float64 attention."""
    model, (x, cos, sin, slots, tables, lens, kv_cache, kr_cache) = layer.example()
    with torch.no_grad():
        found = model(x, cos, sin, slots, tables, lens, kv_cache, kr_cache)
        query, query_rope = (
            t.double() for t in model.prologue(x, cos, sin, slots, kv_cache, kr_cache)
        )
    for token, length in enumerate(lens.tolist()):
        c_kv, k_pe = (
            cache[tables[token]].flatten(0, 2)[:length].double() for cache in (kv_cache, kr_cache)
        )
        scores = (query[token] @ c_kv.T + query_rope[token] @ k_pe.T) * (layer.D + layer.DR) ** -0.5
        context = torch.softmax(scores, dim=-1) @ c_kv
        values = torch.einsum("nc,ncv->nv", context, model.w_uv.double()).flatten()
        wanted = values @ model.w_o.double()
        assert (found[token] - wanted).norm() / wanted.norm() < 1e-2
