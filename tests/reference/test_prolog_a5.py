"""The A5 formats: mxfp8, fp8 and hifloat8, their encodings and the prologue over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_fusion import meta, reference
from mla_fusion.reference import formats, hifloat8
from tests.harness import distance as error
from tests.samples import SMALL, sample_call

A5 = [(wq, kv) for wq in (3, 4, 5) for kv in (0, 1, 3)]


def test_mx_quant_block_exponent() -> None:
    x = torch.zeros(1, 96)
    x[0, 0], x[0, 1], x[0, 64] = 3.0, -0.25, 500.0
    data, scale = formats.mx_quant(x)
    codes = scale.view(torch.uint8)[0].tolist()
    assert codes == [128 - 8, 0, 135 - 8]  # exponent field of the block's maximum, minus 8
    restored = data.float() * scale.float().repeat_interleave(32, -1)
    assert restored[0, 0] == 3.0 and restored[0, 1] == -0.25
    assert restored[0, 64] == 448.0, (
        "500 / 2**0 saturates: the shared exponent is floored, not rounded up"
    )
    assert not restored[0, 32:64].any()


def exact(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The prologue in float64 on the dequantised operands, without requantisation in between."""
    wq = call["weight_quant_mode"]

    def wide(name: str, token: torch.Tensor | None, channel: torch.Tensor) -> torch.Tensor:
        tensor = call[name]
        value = (
            hifloat8.decode(tensor) if tensor.dtype == torch.uint8 else tensor.float()
        ).double()
        if wq == 3:
            spread = (token if token is not None else channel.t()).float().double()
            return value * spread.repeat_interleave(32, -1 if token is not None else 0)
        return value * (token.double() if token is not None else channel.double())

    x = wide("token_x", call["dequant_scale_x"], call["dequant_scale_x"])
    w = {
        k: wide(f"weight_{k}", None, call[f"dequant_scale_w_{k}"])
        for k in ("dq", "uq_qr", "dkv_kr")
    }
    n, d, hckv = call["weight_uk"].shape
    cos, sin = call["rope_cos"].double(), call["rope_sin"].double()

    def norm(y: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double()

    def rope(y: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = torch.cat((y[..., 0::2], y[..., 1::2]), -1)
        first, second = y.chunk(2, -1)
        return y * c + torch.cat((-second, first), -1) * s

    c_q = norm(x @ w["dq"], call["rmsnorm_gamma_cq"])
    heads = (c_q @ w["uq_qr"]).view(len(x), n, -1)
    both = x @ w["dkv_kr"]
    return {
        "c_q": c_q,
        "query": torch.einsum("tnd,ndk->tnk", heads[..., :d], call["weight_uk"].double()),
        "query_rope": rope(heads[..., d:], cos[:, None], sin[:, None]),
        "ckv": norm(both[:, :hckv], call["rmsnorm_gamma_ckv"]),
        "kr": rope(both[:, hckv:], cos, sin),
    }


@pytest.mark.parametrize(("wq", "kv"), A5)
def test_against_the_exact_prologue(wq: int, kv: int) -> None:
    call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, lead=(16,)) | {
        "query_norm_flag": True
    }
    wanted = exact(call)
    query, query_rope, query_scale, c_q, c_q_scale, kv_out, kr_out = (
        reference.npu_mla_prolog_v3_functional(**call)
    )
    step = 0.05 if wq != 5 else 0.15  # relative error of the 8-bit formats over a row

    def decode(x: torch.Tensor) -> torch.Tensor:
        return hifloat8.decode(x) if x.dtype == torch.uint8 else x.float()

    scale = c_q_scale.float().repeat_interleave(32, -1) if wq == 3 else c_q_scale
    assert error(decode(c_q) * scale, wanted["c_q"]) < step
    if kv == 1:
        assert error(decode(query) * query_scale, wanted["query"]) < 2 * step
        back = query_scale / call["quant_scale_ckv"]
        assert error(query_rope.float() * back, wanted["query_rope"]) < 2 * step
    else:
        assert (
            error(query, wanted["query"]) < step and error(query_rope, wanted["query_rope"]) < step
        )
    rows = kv_out.flatten(0, 2)[call["cache_index"]]
    if kv == 3:
        hckv, rope_end = SMALL["Hckv"], SMALL["Hckv"] + 2 * SMALL["Dr"]
        tile_scale = rows[:, rope_end:].contiguous().view(torch.float32)
        assert error(decode(rows[:, :hckv].contiguous()) * tile_scale, wanted["ckv"]) < step
        assert error(rows[:, hckv:rope_end].contiguous().view(torch.bfloat16), wanted["kr"]) < 0.01
        assert kr_out.numel() == 0
    else:
        factor = call["quant_scale_ckv"] if kv == 1 else torch.ones(1)
        assert error(decode(rows) / factor, wanted["ckv"]) < step
        assert error(kr_out.flatten(0, 2)[call["cache_index"]], wanted["kr"]) < 0.01
    shapes = meta.infer("npu_mla_prolog_v3_functional", **call)
    results = (query, query_rope, query_scale, c_q, c_q_scale, kv_out, kr_out)
    assert [(tuple(r.shape), r.dtype) for r in results] == shapes
