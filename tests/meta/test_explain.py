"""`explain_call`: scenario, tiling key and costs against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_fusion import meta
from mla_fusion.tools.selftest.samples import sample_call

V3 = "npu_mla_prolog_v3"
DIMS = {"He": 7168, "Hcq": 1536, "N": 16, "D": 128, "Dr": 64, "Hckv": 512}
PAGES = {"BlockNum": 64, "BlockSize": 128, "Nkv": 1}


def call(
    wq: int = 0, kv: int = 0, tokens: int = 8, blocks: int = 64, **options: Any
) -> dict[str, Any]:
    small = DIMS | PAGES | {"BlockNum": 1, "BlockSize": 16}
    made = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, dims=small, lead=(tokens,))
    for name in ("kv_cache", "kr_cache"):
        cache = made[name]
        if cache.dim() == 4:
            made[name] = torch.empty(
                blocks, 128, 1, cache.shape[-1], dtype=cache.dtype, device="meta"
            )
    return made | options


def test_the_unquantised_decode_step_of_deepseek_v3() -> None:
    found = meta.explain_call(V3, **call())
    # products: He*Hcq + Hcq*N*(D+Dr) + N*D*Hckv + He*(Hckv+Dr)
    macs = 11_010_048 + 4_718_592 + 1_048_576 + 4_128_768
    assert macs == 20_905_984 and found.fused.flops == 2 * 8 * macs == 334_495_744
    assert found.fused.weight_bytes == 2 * macs + 2 * (1536 + 512) == 41_816_064
    # x, sin and cos, cache_index; query, query_rope
    assert found.fused.activation_bytes == 114_688 + 2_048 + 64 + 131_072 + 16_384
    assert found.fused.cache_bytes == 8 * (1024 + 128)
    assert found.fused.bytes == 42_089_536 and found.fused.intensity == pytest.approx(
        7.947, abs=1e-3
    )
    assert found.unfused.flops == found.fused.flops and found.unfused.kernels == 10
    assert found.unfused.weight_bytes == found.fused.weight_bytes
    # intermediates by step: 139264 49152 73728 163840 34816 123904 16384 4096, caches 16448 2112
    assert found.unfused.activation_bytes == 605_184 and found.unfused.cache_bytes == 18_560


def test_quantised_weights_and_caches_are_counted_by_their_bytes() -> None:
    found = meta.explain_call(V3, **call(2, 1, query_norm_flag=True))
    int8 = 11_010_048 + 4_718_592 + 4_128_768
    scales = 4 * (1536 + 3072 + 576)
    assert found.fused.weight_bytes == int8 + 2 * 1_048_576 + scales + 4_096 + 4
    assert found.fused.cache_bytes == 8 * (512 + 128)
    # x and its scale, rope, index; query int8, query_rope, per-head scales, query_norm and its
    # scale
    given = 8 * 7168 + 8 * 4 + 2_048 + 64
    assert (
        found.fused.activation_bytes
        == given + 8 * 16 * 512 + 16_384 + 8 * 16 * 4 + 8 * 1536 + 8 * 4
    )
    names = [step.name for step in found.steps]
    assert found.unfused.kernels == len(names) == 14
    assert {"quantise c_q", "quantise query", "rescale query_rope", "quantise cache rows"} < set(
        names
    )
    tiles = meta.explain_call(V3, **call(2, 3))
    assert tiles.fused.cache_bytes == 8 * 656 and tiles.unfused.kernels == 11


@pytest.mark.parametrize(
    ("wq", "kv", "mode", "cann", "fields", "key"),
    [
        (0, 0, "PA_BSND", "8.3", (1, 1, 0, 0, 0, 0), 0x11),
        (0, 0, "PA_BSND", "8.5", (1, 1, 0, 0, 0, 0, 0, 0, 7), 0x1C0011),
        (0, 0, "PA_BSND", "latest", (1, 1, 0, 0, 0, 0, 0, 0, 1, 7), 0x3C0011),
        (1, 0, "PA_BSND", "8.3", (1, 2, 0, 1, 0, 0), 0x421),
        (1, 0, "PA_BSND", "9.0", (1, 2, 1, 1, 0, 0, 0, 0, 7), 0x1C0461),
        (1, 2, "PA_NZ", "8.3", (2, 2, 1, 1, 0, 0), 0x462),
        (1, 2, "PA_NZ", "9.1", (2, 2, 2, 1, 0, 0, 0, 0, 7), 0x1C04A2),
        (1, 2, "PA_NZ", "latest", (2, 2, 2, 1, 0, 0, 0, 0, 1, 7), 0x3C04A2),
        (2, 3, "PA_BSND", "latest", (1, 2, 6, 1, 0, 0, 0, 0, 1, 7), 0x3C05A1),
    ],
)
def test_tiling_key_of_each_release(
    wq: int, kv: int, mode: str, cann: str, fields: tuple[int, ...], key: int
) -> None:
    found = meta.explain_call(V3, cann=cann, **call(wq, kv, cache_mode=mode)).tiling_key
    assert tuple(field.value for field in found.fields) == fields and found.value == key
    places = [(field.low, field.high) for field in found.fields]
    assert places[:6] == [(0, 3), (4, 5), (6, 9), (10, 10), (11, 11), (12, 13)]
    older = [(14, 15), (16, 17), (18, 25)]
    assert places[6:] == {"8.3": [], "latest": [*older[:2], (18, 18), (19, 26)]}.get(cann, older)
    assert found["SCENARIO"].value == (2 if wq else 1)


def test_tiling_key_of_many_tokens_of_mxfp8_is_split_by_tokens() -> None:
    wide = call(3, 0, tokens=8192, blocks=64) | {
        "weight_uk": torch.empty(128, 128, 512, dtype=torch.bfloat16, device="meta"),
        "weight_uq_qr": torch.empty(1536, 128 * 192, dtype=torch.float8_e4m3fn, device="meta"),
        "dequant_scale_w_uq_qr": torch.empty(
            128 * 192, 48, dtype=torch.float8_e8m0fnu, device="meta"
        ),
    }
    for cann, split in (("9.1", 1), ("latest", 1)):
        found = meta.explain_call(V3, soc="A5", cann=cann, **wide).tiling_key
        assert found["SPLIT_M_MODE"].value == split
    assert meta.explain_call(V3, soc="A5", cann="9.0", **wide).tiling_key["SPLIT_M_MODE"].value == 0


def test_empty_tensors() -> None:
    assert (
        meta.explain_call(V3, cann="9.1", **call(blocks=0)).tiling_key.value == 0x1C0011 | 1 << 12
    )
    neither = meta.explain_call(V3, cann="9.1", **call(tokens=0, blocks=0))
    assert neither.tiling_key["EMPTY_TENSOR_MODE"].value == 2
    nothing = meta.explain_call(V3, cann="9.1", **call(1, 2, tokens=0))
    assert nothing.tiling_key.value == 0x1C2000 and "EMPTY_TENSOR_MODE = 2" in str(nothing)
    with pytest.raises(meta.ContractError, match="tokens"):
        meta.explain_call(V3, **call(tokens=0))


def test_the_report_names_everything() -> None:
    text = str(meta.explain_call(V3, **call(1, 2)))
    for part in (
        "per channel",
        "QUANT_MODE = 2",
        "He 7168",
        "0x3c04a1",
        "1 launches",
        "12 launches",
        "FLOP/byte",
    ):
        assert part in text, text


def test_refusals() -> None:
    with pytest.raises(meta.ContractError, match="A3") as refusal:
        meta.explain_call(V3, **call(3, 0))
    assert refusal.value.code == "quant.weight_quant_mode"
    older = {
        k: v
        for k, v in call().items()
        if k in sum(map(tuple, meta.signature("npu_mla_prolog_v2")), ())
    }
    assert meta.explain_call("npu_mla_prolog_v2", **older).fused.activation_bytes == 264_256
