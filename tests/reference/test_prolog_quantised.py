"""The A2/A3 quantised prologue against a scalar-minded second implementation in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mla_fusion import meta, reference
from tests.samples import SMALL, sample_call

F32 = np.float32
A23 = [(1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)]


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=F32)).to(torch.bfloat16).float().numpy()


def rint8(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(np.nan_to_num(x, nan=0.0)), -128, 127).astype(np.int8)


def norm(x: np.ndarray, gamma: np.ndarray, eps: float) -> np.ndarray:
    mean = (x.astype(F32) ** 2).sum(-1, keepdims=True, dtype=F32) * F32(1 / x.shape[-1])
    return (x / np.sqrt(mean + F32(eps)) * gamma).astype(F32)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    even, odd = x[..., 0::2], x[..., 1::2]
    first = even * cos[..., :half] - odd * sin[..., :half]
    second = odd * cos[..., half:] + even * sin[..., half:]
    return bf16(np.concatenate((first, second), -1))


def second_opinion(call: dict[str, Any]) -> dict[str, np.ndarray]:
    a = {k: v.float().numpy() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    wq, kv = call["weight_quant_mode"], call["kv_cache_quant_mode"]
    n, d, hckv = a["weight_uk"].shape
    x, cos, sin = a["token_x"], a["rope_cos"], a["rope_sin"]

    def down(name: str) -> np.ndarray:
        product = (x.astype(np.float64) @ a[f"weight_{name}"].astype(np.float64)).astype(F32)
        if wq == 1:
            return bf16(product)
        return product * a["dequant_scale_x"] * a[f"dequant_scale_w_{name}"]

    v = norm(down("dq"), a["rmsnorm_gamma_cq"], call["rmsnorm_epsilon_cq"])
    v = v * a["smooth_scales_cq"] if "smooth_scales_cq" in a else v
    peak = np.abs(v).max(-1, keepdims=True)
    c_q, c_q_scale = rint8(v * (F32(127) / peak)), peak / F32(127)
    heads = (c_q.astype(np.float64) @ a["weight_uq_qr"].astype(np.float64)).astype(F32)
    heads = (heads * c_q_scale * a["dequant_scale_w_uq_qr"]).reshape(len(x), n, -1)
    query = bf16(np.einsum("tnd,ndk->tnk", bf16(heads[..., :d]).astype(np.float64), a["weight_uk"]))
    out = {
        "c_q": c_q,
        "c_q_scale": c_q_scale,
        "query_rope": rope(heads[..., d:], cos[:, None], sin[:, None]),
    }
    if kv == 1:
        peak = np.abs(query).max(-1, keepdims=True)
        out["query_scale"] = peak / F32(127)
        half = (query * (F32(127) / peak)).astype(np.float16).astype(F32)
        query = np.clip(np.sign(half) * np.floor(np.abs(half) + F32(0.5)), -128, 127)
        out["query_rope"] = bf16(out["query_rope"] * (a["quant_scale_ckv"][0] / out["query_scale"]))
    out["query"] = query
    both = down("dkv_kr")
    ckv = norm(both[:, :hckv], a["rmsnorm_gamma_ckv"], call["rmsnorm_epsilon_ckv"])
    kr = rope(both[:, hckv:], cos, sin)
    if kv == 0:
        ckv = bf16(ckv)
    elif kv in (1, 2):
        ckv = rint8(ckv * a["quant_scale_ckv"])
    if kv == 2:
        kr = rint8(kr * a["quant_scale_ckr"])
    if kv == 3:
        tiles = ckv.reshape(len(x), -1, call["tile_size"])
        limit = np.abs(tiles).max(-1, keepdims=True) * a["k_nope_clip_alpha"]
        scale = limit * F32(1 / 127)
        quantised = rint8(np.clip(tiles, -limit, limit) * (F32(1) / scale)).reshape(len(x), -1)
        kr_bytes = torch.from_numpy(kr).to(torch.bfloat16).view(torch.int8).numpy()
        ckv = np.concatenate((quantised, kr_bytes, scale[..., 0].astype(F32).view(np.int8)), -1)
        out["scale"] = scale[..., 0]
    return out | {"ckv": ckv, "kr": kr}


def call_of(wq: int, kv: int, **options: Any) -> dict[str, Any]:
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, lead=(9,), **options)
    return call | {"rmsnorm_epsilon_cq": 1e-6, "rmsnorm_epsilon_ckv": 1e-5, "query_norm_flag": True}


def off_by(found: torch.Tensor, wanted: np.ndarray) -> tuple[float, float]:
    """(largest difference, share of elements that differ) of integers."""
    difference = np.abs(found.float().numpy() - wanted.astype(F32))
    return float(difference.max()), float((difference > 0).mean())


def close(found: torch.Tensor, wanted: np.ndarray, ulp: float = 2.0) -> bool:
    unit = np.abs(wanted).max(-1, keepdims=True) * 2.0**-8
    return bool((np.abs(found.float().numpy() - wanted) <= ulp * unit).all())


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("wq", "kv"), A23)
def test_against_a_second_implementation(wq: int, kv: int, smooth: bool) -> None:
    call = call_of(wq, kv, smooth=smooth)
    wanted = second_opinion(call)
    query, query_rope, query_scale, c_q, c_q_scale, kv_out, kr_out = (
        reference.npu_mla_prolog_v3_functional(**call)
    )
    assert (
        c_q.dtype == torch.int8
        and off_by(c_q, wanted["c_q"])[0] <= 1
        and off_by(c_q, wanted["c_q"])[1] < 0.01
    )
    np.testing.assert_allclose(
        c_q_scale.numpy(), wanted["c_q_scale"], rtol=2e-2 if wq == 1 else 1e-5
    )
    assert close(query_rope, wanted["query_rope"], 4.0)
    if kv == 1:
        assert query.dtype == torch.int8 and off_by(query, wanted["query"])[0] <= 2
        np.testing.assert_allclose(query_scale.numpy(), wanted["query_scale"], rtol=1e-2)
    else:
        assert query_scale.shape == (0,) and close(query, wanted["query"], 4.0)
    rows = kv_out.flatten(0, 2)[call["cache_index"]]
    if kv == 0:
        assert close(rows, wanted["ckv"])
    elif kv == 3:
        hckv, rope_end = SMALL["Hckv"], SMALL["Hckv"] + 2 * SMALL["Dr"]
        assert rows.shape[-1] == rope_end + 4 and kr_out.numel() == 0
        assert off_by(rows[:, :hckv], wanted["ckv"][:, :hckv])[0] <= 1
        assert close(rows[:, hckv:rope_end].contiguous().view(torch.bfloat16), wanted["kr"])
        scales = rows[:, rope_end:].contiguous().view(torch.float32).numpy()
        np.testing.assert_allclose(scales, wanted["scale"], rtol=1e-2)
    else:
        assert rows.dtype == torch.int8 and off_by(rows, wanted["ckv"])[0] <= 1
    if kv != 3:
        kr_rows = kr_out.flatten(0, 2)[call["cache_index"]]
        assert off_by(kr_rows, wanted["kr"])[0] <= 1 if kv == 2 else close(kr_rows, wanted["kr"])


def test_an_all_zero_token_quantises_to_zero() -> None:
    call = call_of(2, 1)
    call["token_x"][3] = 0
    query, query_rope, query_scale, c_q, c_q_scale, kv, _ = reference.npu_mla_prolog_v3_functional(
        **call
    )
    assert (
        not c_q[3].any() and c_q_scale[3] == 0 and not query[3].any() and not query_scale[3].any()
    )
    assert query_rope[3].isnan().all(), "0 * (scale / 0): what the device computes"
    assert not kv.flatten(0, 2)[call["cache_index"][3]].any()


def test_tiles_of_128_have_their_own_scale_and_the_row_is_656_bytes() -> None:
    dims = SMALL | {"Hckv": 512, "Dr": 64, "He": 128, "Hcq": 64}
    call = call_of(1, 3, dims=dims)
    rows = reference.npu_mla_prolog_v3_functional(**call)[5].flatten(0, 2)[call["cache_index"]]
    plain = call | {"kv_cache": torch.zeros(6, 16, 1, 512, dtype=torch.bfloat16)}
    plain |= {"kr_cache": torch.zeros(6, 16, 1, 64, dtype=torch.bfloat16), "kv_cache_quant_mode": 0}
    plain |= {"ckvkr_repo_mode": 0, "quant_scale_repo_mode": 0}
    del plain["k_nope_clip_alpha"]
    exact = reference.npu_mla_prolog_v3_functional(**plain)
    ckv = exact[5].flatten(0, 2)[call["cache_index"]].float().view(9, 4, 128)
    scale = rows[:, 640:].contiguous().view(torch.float32)
    assert rows.shape == (9, 656) and scale.shape == (9, 4)
    limit = ckv.abs().amax(-1) * call["k_nope_clip_alpha"]
    torch.testing.assert_close(scale, limit / 127, rtol=1e-2, atol=0)
    restored = rows[:, :512].view(9, 4, 128).float() * scale[..., None]
    assert (
        (restored - ckv.clamp(-limit[..., None], limit[..., None])).abs() <= 1.2 * scale[..., None]
    ).all()
    assert torch.equal(
        rows[:, 512:640].contiguous().view(torch.bfloat16),
        exact[6].flatten(0, 2)[call["cache_index"]],
    )


def test_int8_matmul_is_exact() -> None:
    from mla_fusion.reference.quantize import int8_matmul

    a = torch.full((2, 7168), -128, dtype=torch.int8)
    assert torch.equal(int8_matmul(a, a.T), torch.full((2, 2), 128 * 128 * 7168, dtype=torch.int32))


def versions_1_2(call: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v
        for k, v in call.items()
        if k in meta.signature("npu_mla_prolog_v2")[1] or isinstance(v, torch.Tensor)
    }


@pytest.mark.parametrize(("wq", "kv"), [(0, 0), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_v2_is_v3_with_the_scenario_read_off_the_dtypes(wq: int, kv: int) -> None:
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv)
    wanted = reference.npu_mla_prolog_v3_functional(**call)
    older = versions_1_2(call)
    if kv == 1:  # v2's host check wants a row, its kernel reads one float
        older["quant_scale_ckv"] = call["quant_scale_ckv"].expand(1, SMALL["Hckv"]).contiguous()
    query, query_rope, kv_cache, kr_cache, query_scale = reference.npu_mla_prolog_v2(**older)
    for a, b in zip(
        (query, query_rope, kv_cache, kr_cache), (*wanted[:2], *wanted[5:]), strict=True
    ):
        assert torch.equal(a, b)
    assert torch.equal(query_scale, wanted[2]) if kv == 1 else query_scale.shape == (1,)
    assert (
        torch.equal(older["kv_cache"], kv_cache)
        and older["kv_cache"].data_ptr() != kv_cache.data_ptr()
    )


def test_v1_returns_four_results() -> None:
    call = versions_1_2(sample_call())
    wanted = reference.npu_mla_prolog_v3_functional(**call)
    required, _ = meta.signature("npu_mla_prolog")
    found = torch.ops.npu.npu_mla_prolog(*(call[name] for name in required))
    for a, b in zip(found, (*wanted[:2], *wanted[5:]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(call["kv_cache"], wanted[5])
