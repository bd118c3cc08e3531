"""The unquantised prologue against a float64 formula and against its own rounding points."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_fusion import reference
from tests.samples import SMALL, sample_call

EPS_CQ, EPS_CKV = 1e-6, 2e-6


def call(**options: Any) -> dict[str, Any]:
    return sample_call(**options) | {"rmsnorm_epsilon_cq": EPS_CQ, "rmsnorm_epsilon_ckv": EPS_CKV}


def half_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Element by element: pair i of the input gives elements i and h+i of the output."""
    half = x.shape[-1] // 2
    y = torch.empty_like(x)
    for i in range(half):
        y[..., i] = x[..., 2 * i] * cos[..., i] - x[..., 2 * i + 1] * sin[..., i]
        y[..., half + i] = (
            x[..., 2 * i + 1] * cos[..., half + i] + x[..., 2 * i] * sin[..., half + i]
        )
    return y


def prologue(arguments: dict[str, Any], cast: Any) -> dict[str, torch.Tensor]:
    """The prologue as textbook formulas in the arguments' precision; ``cast`` rounds."""
    a = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    x = a["token_x"].flatten(0, -2)
    cos, sin = a["rope_cos"].flatten(0, -2), a["rope_sin"].flatten(0, -2)
    n, d, hckv = a["weight_uk"].shape

    def norm(y: torch.Tensor, gamma: torch.Tensor, eps: float, scale: float) -> torch.Tensor:
        return cast(y / ((y * y).mean(-1, keepdim=True) + eps).sqrt() * gamma * scale)

    c_q = norm(cast(x @ a["weight_dq"]), a["rmsnorm_gamma_cq"], EPS_CQ, a.get("qc_qr_scale", 1.0))
    heads = cast(c_q @ a["weight_uq_qr"]).view(len(x), n, -1)
    query = cast(torch.einsum("tnd,ndk->tnk", heads[..., :d], a["weight_uk"]))
    query_rope = cast(half_rope(heads[..., d:], cos[:, None], sin[:, None]))
    both = cast(x @ a["weight_dkv_kr"])
    ckv = norm(both[:, :hckv], a["rmsnorm_gamma_ckv"], EPS_CKV, a.get("kc_scale", 1.0))
    kr = cast(half_rope(both[:, hckv:], cos, sin))
    return {"query": query, "query_rope": query_rope, "c_q": c_q, "ckv": ckv, "kr": kr}


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def ulps(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error in bfloat16 units in the last place of the row's largest element."""
    unit = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30) * 2.0**-8
    return float(((found.double() - wanted).abs() / unit).max())


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_float64_equals_the_formula(lead: tuple[int, ...]) -> None:
    arguments = call(lead=lead, dtype=torch.float64) | {
        "qc_qr_scale": 1.5,
        "kc_scale": 0.75,
        "query_norm_flag": True,
    }
    wanted = prologue(arguments, lambda y: y)
    query, query_rope, _, c_q, _, kv, kr = reference.npu_mla_prolog_v3_functional(**arguments)
    index = arguments["cache_index"].flatten()
    for found, name in (
        (query.flatten(0, -3), "query"),
        (query_rope.flatten(0, -3), "query_rope"),
        (c_q.flatten(0, -2), "c_q"),
        (kv.flatten(0, 2)[index], "ckv"),
        (kr.flatten(0, 2)[index], "kr"),
    ):
        torch.testing.assert_close(found, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_rounds_where_the_kernel_rounds(seed: int) -> None:
    arguments = call(lead=(16,), seed=seed) | {"query_norm_flag": True}
    wanted = prologue(arguments, to_bfloat16)
    query, query_rope, _, c_q, _, kv, kr = reference.npu_mla_prolog_v3_functional(**arguments)
    index = arguments["cache_index"]
    found = {"query": query, "query_rope": query_rope, "c_q": c_q}
    found |= {"ckv": kv.flatten(0, 2)[index], "kr": kr.flatten(0, 2)[index]}
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        # a float32 sum and a float64 sum may round to neighbouring bfloat16 values, and a
        # downstream matmul carries that on
        assert ulps(tensor, wanted[name]) <= 2.0, name
        assert (tensor.double() != wanted[name]).double().mean() < 0.05, name


def test_scale_of_one_is_not_applied_and_scale_enters_query_norm() -> None:
    arguments = call() | {"query_norm_flag": True}
    one = reference.npu_mla_prolog_v3_functional(**arguments)
    tiny = reference.npu_mla_prolog_v3_functional(
        **arguments | {"qc_qr_scale": 1.0 + 1e-8, "kc_scale": 1.0 - 1e-8}
    )
    double = reference.npu_mla_prolog_v3_functional(**arguments | {"qc_qr_scale": 2.0})
    for a, b in zip(one, tiny, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(double[3], one[3] * 2)
    assert torch.equal(double[0], one[0] * 2)


def test_negative_slots_are_skipped_and_other_rows_stay() -> None:
    arguments = call(lead=(6,))
    index = arguments["cache_index"].clone()
    index[2], index[4] = -1, -7
    kv, kr = reference.npu_mla_prolog_v3_functional(**arguments | {"cache_index": index})[5:]
    full_kv, full_kr = reference.npu_mla_prolog_v3_functional(**arguments)[5:]
    written = index[index >= 0]
    for out, full, before in (
        (kv, full_kv, arguments["kv_cache"]),
        (kr, full_kr, arguments["kr_cache"]),
    ):
        expected = before.clone().flatten(0, 2)
        expected[written] = full.flatten(0, 2)[written]
        assert torch.equal(out.flatten(0, 2), expected)


def test_of_duplicate_slots_the_last_wins() -> None:
    arguments = call(lead=(8,))
    index = torch.tensor([3, 9, 3, 9, 3, 1, 0, 2])
    kv = reference.npu_mla_prolog_v3_functional(**arguments | {"cache_index": index})[5]
    rows = reference.npu_mla_prolog_v3_functional(**arguments | {"cache_index": torch.arange(8)})[
        5
    ].flatten(0, 2)
    assert torch.equal(kv.flatten(0, 2)[torch.tensor([3, 9])], rows[torch.tensor([4, 3])])


@pytest.mark.parametrize(("mode", "lead"), [("TND", (5,)), ("BSND", (2, 3))])
def test_unpaged_caches_are_the_new_rows(mode: str, lead: tuple[int, ...]) -> None:
    paged = call(lead=lead)
    unpaged = call(lead=lead, cache_mode=mode)
    caches = {name: unpaged[name] for name in ("kv_cache", "kr_cache")}
    index = paged.pop("cache_index")
    kv, kr = reference.npu_mla_prolog_v3_functional(**paged, cache_index=index)[5:]
    out = reference.npu_mla_prolog_v3_functional(**paged | caches | {"cache_mode": mode})
    assert torch.equal(out[5].flatten(0, -2), kv.flatten(0, 2)[index.flatten()])
    assert torch.equal(out[6].flatten(0, -2), kr.flatten(0, 2)[index.flatten()])


def test_pa_nz_element_arithmetic() -> None:
    arguments = call(lead=(4,))
    nd = reference.npu_mla_prolog_v3_functional(**arguments)[5:]
    nz = reference.npu_mla_prolog_v3_functional(**arguments | {"cache_mode": "PA_NZ"})[5:]
    c0 = 16
    for flat_nd, out, before in zip(
        nd, nz, (arguments["kv_cache"], arguments["kr_cache"]), strict=True
    ):
        block_size, width = out.shape[1], out.shape[3]
        expected = before.clone().flatten()
        for slot in arguments["cache_index"].tolist():
            block, offset = divmod(slot, block_size)
            for j in range(width):
                element = (
                    block * block_size * width
                    + (j // c0) * (block_size * c0)
                    + offset * c0
                    + j % c0
                )
                expected[element] = flat_nd[block, offset, 0, j]
        assert torch.equal(out.flatten(), expected)


@pytest.mark.parametrize("lead", [(2, 20), (40,)])
@pytest.mark.parametrize("layout", ["BSND", "NZ"])
def test_blockwise_modes_place_each_sequence_from_its_first_block(
    layout: str, lead: tuple[int, ...]
) -> None:
    arguments = call(lead=lead, cache_mode=f"PA_BLK_{layout}")
    if len(lead) == 1:
        arguments["actual_seq_len"] = torch.tensor([3, 40], dtype=torch.int32)
        arguments["cache_index"] = torch.tensor([4, 0, 5, 2])
        lengths, blocks = [3, 37], [[4], [0, 5, 2]]
    else:
        arguments["cache_index"] = torch.tensor([[1, 3], [5, -1]])
        lengths, blocks = [20, 20], [[1, 3], [5, -1]]
    slots = []
    for length, ids in zip(lengths, blocks, strict=True):
        for position in range(length):
            block = ids[position // 16]
            slots.append(-1 if block < 0 else block * 16 + position % 16)
    token_wise = {k: v for k, v in arguments.items() if k != "actual_seq_len"}
    token_wise |= {"cache_index": torch.tensor(slots).view(lead), "cache_mode": f"PA_{layout}"}
    found = reference.npu_mla_prolog_v3_functional(**arguments)
    wanted = reference.npu_mla_prolog_v3_functional(**token_wise)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_empty_tensors() -> None:
    none = call(lead=(0,))
    out = reference.npu_mla_prolog_v3_functional(**none)
    assert out[0].shape == (0, 4, 64) and torch.equal(out[5], none["kv_cache"])
    no_blocks = call(lead=(3,), dims=SMALL | {"BlockNum": 0}) | {
        "cache_index": torch.tensor([0, 1, 2])
    }
    with_blocks = call(lead=(3,))
    shared = {name: with_blocks[name] for name in with_blocks if "cache" not in name}
    out = reference.npu_mla_prolog_v3_functional(**no_blocks | shared)
    assert torch.equal(out[0], reference.npu_mla_prolog_v3_functional(**with_blocks)[0])
    assert out[5].shape == (0, 16, 1, 64)


def test_weights_in_fractal_nz_storage() -> None:
    dims = SMALL | {"He": 256, "Hcq": 96}
    arguments = call(dims=dims)

    def to_nz(weight: torch.Tensor) -> torch.Tensor:
        k, n = weight.shape
        return weight.view(k // 16, 16, n // 16, 16).permute(2, 0, 1, 3).contiguous()

    stored = {
        name: to_nz(arguments[name]) for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
    }
    for a, b in zip(
        reference.npu_mla_prolog_v3_functional(**arguments),
        reference.npu_mla_prolog_v3_functional(**arguments | stored),
        strict=True,
    ):
        assert torch.equal(a, b)
