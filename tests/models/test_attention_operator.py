"""Plain attention and the NPU's adapter, over the operator's CPU kernel, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mla_fusion.meta import ContractError
from torch import Tensor

import mla_fusion as mf
from mla_fusion.models.attention import mla_paged_attention, npu
from mla_fusion.reference import npu_mla_prolog_v3
from tests.attention_calls import SCALE, Latents, error, nz
from tests.samples import SMALL, sample_call


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    mf.offline.activate()  # torch_npu defines the operator; here it gets a CPU kernel


def arguments(latents: Latents) -> dict[str, Any]:
    """Of `mla_paged_attention`."""
    pools = (latents.c_kv, latents.k_pe)
    caches = [nz(pool) if latents.form == "NZ" else pool.unsqueeze(2) for pool in pools]
    scales = (
        {"query_scale": latents.query_scale, "kv_scale": latents.kv_scale} if latents.int8 else {}
    )
    return {
        "query": latents.query,
        "query_rope": latents.query_rope,
        "kv_cache": caches[0],
        "kr_cache": caches[1],
        "block_tables": latents.table,
        "seq_lens": list(latents.lengths),
        "scale": SCALE,
        "query_lens": None if max(latents.new) == 1 else list(latents.new),
        "return_lse": True,
        **scales,
    }


CASES = {
    "decode": Latents(),
    "several": Latents(new=(3, 1, 16, 2)),
    "float16": Latents(dtype=torch.float16),
    "blocks of 48": Latents(block=48),
    "NZ": Latents(form="NZ", block=128, new=(2, 1, 2, 1)),
    "12 heads": Latents(heads=12, new=(2, 1, 1, 1)),
    "int8": Latents(dtype=torch.int8, block=128),
    "int8, NZ, 12 heads, several": Latents(
        dtype=torch.int8, block=128, form="NZ", heads=12, new=(2, 1, 3, 1)
    ),
}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_adapter_and_plain_path_are_as_near_to_float64(name: str, heads_first: bool) -> None:
    latents = CASES[name]
    exact, exact_lse = latents.exact()
    given = arguments(latents)
    plain, plain_lse = mla_paged_attention(**given, out_layout="NTD" if heads_first else "TND")
    fused, fused_lse = npu.attend(**given, heads_first=heads_first)
    assert plain.shape == fused.shape and plain.dtype == fused.dtype == latents.float
    by_token = [out.transpose(0, 1) if heads_first else out for out in (plain, fused)]
    plain_error, fused_error = (error(out, exact) for out in by_token)
    print(f"{name}: plain {plain_error:.2e}, operator {fused_error:.2e}")
    assert plain_error < 2**-8
    assert fused_error <= 1.1 * plain_error
    assert error(plain_lse, exact_lse) < 1e-6 and error(fused_lse, exact_lse) < 1e-6


@pytest.mark.parametrize("out_layout", ["TND", "NTD"])
def test_padded_heads_are_cut_or_kept(out_layout: str) -> None:
    given = arguments(Latents(heads=8))
    every = mla_paged_attention(**given, out_layout=out_layout)
    some = mla_paged_attention(**given, heads=3, out_layout=out_layout)
    by_head = 1 if out_layout == "TND" else 0
    assert torch.equal(some[0], every[0].narrow(by_head, 0, 3))
    assert torch.equal(some[1], every[1][:, :3])


def test_lengths_in_tensors_and_an_empty_sequence() -> None:
    given = arguments(Latents())
    for heads_first in (False, True):
        out, lse = npu.attend(
            **given | {"seq_lens": torch.tensor([37, 0, 60, 16])}, heads_first=heads_first
        )
        out = out.transpose(0, 1) if heads_first else out
        assert not out[1].any() and (lse[1] == float("-inf")).all()
        assert out[0].any() and lse[0].isfinite().all()


def test_int8_results_of_the_prologue_go_in_as_they_are() -> None:
    """Its query, query_rope and dequant_scale_q_nope stand for its query without int8 caches."""
    dims = SMALL | {"Dr": 64, "Hckv": 512, "BlockNum": 2, "BlockSize": 128}
    call = sample_call(weight_quant_mode=2, kv_cache_quant_mode=1, lead=(3,), dims=dims)
    query, query_rope, query_scale, *_ = npu_mla_prolog_v3(**call)
    kv_scale = 1 / call["quant_scale_ckv"].reshape(1)
    out, lse = mla_paged_attention(
        *(query, query_rope, call["kv_cache"], call["kr_cache"]),
        torch.arange(2).expand(3, -1),
        [256] * 3,
        scale=SCALE,
        query_scale=query_scale,
        kv_scale=kv_scale,
        return_lse=True,
    )
    factor = query_scale.reshape(3, 4, 1).double()
    nope, rope = query.double() * factor, query_rope.double() * factor * kv_scale
    c_kv = call["kv_cache"].reshape(-1, 512).double() * kv_scale
    scores = SCALE * (nope @ c_kv.T + rope @ call["kr_cache"].reshape(-1, 64).double().T)
    assert error(lse, scores.logsumexp(-1)) < 1e-6
    assert error(out, scores.softmax(-1) @ c_kv) < 2**-8
    plain = {"kv_cache_quant_mode": 0, "query_quant_mode": 0, "quant_scale_ckv": None}
    unquantised, unscaled, *_ = npu_mla_prolog_v3(
        **call | plain | {"kv_cache": call["kv_cache"].bfloat16()}
    )
    assert error(nope, unquantised.double()) < 1 / 127
    assert error(rope, unscaled.double()) < 2**-7


@pytest.mark.parametrize("kv_cache_quant_mode", [0, 1])
def test_nz_caches_of_the_prologue_are_views_away(kv_cache_quant_mode: int) -> None:
    dims = SMALL | {"Dr": 64, "Hckv": 512, "BlockNum": 2, "BlockSize": 128}
    outs = []
    for mode in ("PA_BSND", "PA_NZ"):
        call = sample_call(
            weight_quant_mode=2,
            kv_cache_quant_mode=kv_cache_quant_mode,
            cache_mode=mode,
            lead=(3,),
            dims=dims,
        ) | {"cache_index": torch.arange(3)}
        caches = [call[name].zero_() for name in ("kv_cache", "kr_cache")]
        query, query_rope, query_scale, *_ = npu_mla_prolog_v3(**call)
        if mode == "PA_NZ":
            elements = [32 // cache.element_size() for cache in caches]
            caches = [
                cache.view(-1, 1, cache.shape[-1] // c0, 128, c0)
                for cache, c0 in zip(caches, elements, strict=True)
            ]
        scales = {"query_scale": query_scale, "kv_scale": torch.tensor([0.1])}
        outs.append(
            mla_paged_attention(
                *(query, query_rope, *caches, torch.zeros(3, 1, dtype=torch.int32), [3] * 3),
                scale=SCALE,
                **(scales if kv_cache_quant_mode else {}),
            )
        )
    assert outs[0].any()
    assert error(outs[1], outs[0].double()) < 2**-8


REFUSED: dict[str, dict[str, Any]] = {
    "attention.heads": {"heads": 3},
    "attention.out_layout": {"out_layout": "BSND"},
    "attention.query_scale": {"query_scale": torch.ones(4, 2)},
    "attention.kv_scale": {"kv_scale": torch.ones(1)},
    "attention.kv_cache": {"kv_cache": torch.zeros(17, 16, 1, 512, dtype=torch.int8)},
    "attention.kr_cache": {"kr_cache": torch.zeros(17, 1, 4, 16, 16, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused_wherever_it_runs(code: str) -> None:
    with pytest.raises(ContractError) as refused:
        mla_paged_attention(**arguments(Latents()) | REFUSED[code])
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("attention.query_scale", {"query_scale": None}),
        ("attention.query_scale", {"query_scale": torch.ones(4, 3)}),
        ("attention.kv_scale", {"kv_scale": torch.ones(512)}),
        ("attention.kv_scale", {"kv_scale": torch.ones(1).half()}),
    ],
)
def test_scales_that_do_not_fit(code: str, change: dict[str, Tensor | None]) -> None:
    with pytest.raises(ContractError) as refused:
        mla_paged_attention(**arguments(Latents(dtype=torch.int8)) | change)
    assert refused.value.code == code
