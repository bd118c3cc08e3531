"""Cache layouts and per-tile rows, against the reference kernel's own writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_fusion.meta import ContractError

from mla_fusion import paging
from mla_fusion.reference import npu_mla_prolog_v3
from mla_fusion.reference.cache import write
from tests.samples import sample_call

DTYPES = [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float32]


def random(*sizes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = torch.randint(-100, 100, sizes, generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.float32).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 4),
    st.sampled_from([16, 32]),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_nz_and_back(dtype: torch.dtype, blocks: int, size: int, fractals: int, seed: int) -> None:
    cache = random(blocks, size, 1, 32 * fractals, dtype=dtype, seed=seed)
    nz = paging.nd_to_nz(cache)
    assert nz.shape == cache.shape and torch.equal(bits(paging.nz_to_nd(nz)), bits(cache))
    if blocks:  # the reference kernel writes the same elements in NZ mode
        rows = cache.view(-1, cache.shape[-1])
        slot = torch.arange(len(rows))
        written = torch.zeros_like(cache)
        write(written, rows, "PA_NZ", slot.shape, slot, None, "kv_cache")
        assert torch.equal(bits(written), bits(nz))


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from([torch.int8, torch.float8_e4m3fn, torch.uint8]),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_rows_packed_and_unpacked(dtype: torch.dtype, tokens: int, seed: int) -> None:
    ckv = random(tokens, 1, 512, dtype=torch.int8, seed=seed).view(dtype)
    kr = random(tokens, 1, 64, dtype=torch.bfloat16, seed=seed)
    scale = random(tokens, 1, 4, dtype=torch.float32, seed=seed)
    rows = paging.pack_rows(ckv, kr, scale)
    assert rows.shape == (tokens, 1, 656) and rows.dtype == dtype
    for back, given_ in zip(paging.unpack_rows(rows), (ckv, kr, scale), strict=True):
        assert torch.equal(bits(back), bits(given_))
    if tokens:
        assert paging.unpack_rows(rows)[1].data_ptr() == rows.data_ptr() + 512


def test_rows_of_the_reference_kernel() -> None:
    dims = dict(He=256, Hcq=96, N=2, D=32, Dr=64, Hckv=512, BlockNum=2, BlockSize=16, Nkv=1)
    call = sample_call(weight_quant_mode=2, kv_cache_quant_mode=3, dims=dims, lead=(5,))
    plain = sample_call(weight_quant_mode=2, kv_cache_quant_mode=0, dims=dims, lead=(5,))
    call["k_nope_clip_alpha"] = torch.ones(1)
    index = torch.arange(5)
    same = ("kv_cache", "kr_cache", "weight_quant_mode", "kv_cache_quant_mode", "cache_index")
    plain |= {name: call[name] for name in plain if name in call and name not in (*same, *MODES)}
    npu_mla_prolog_v3(**call | {"cache_index": index})
    npu_mla_prolog_v3(**plain | {"cache_index": index})
    ckv, kr = paging.dequantise_rows(call["kv_cache"][0, :5, 0])
    wanted = plain["kv_cache"][0, :5, 0].float()
    assert torch.equal(kr, plain["kr_cache"][0, :5, 0])
    assert (ckv - wanted).abs().max() <= wanted.abs().max() / 127


MODES = ("query_quant_mode", "ckvkr_repo_mode", "quant_scale_repo_mode", "tile_size")
ROW = torch.zeros(2, 656, dtype=torch.int8)
CKV, KR, SCALE = (
    torch.zeros(2, 512, dtype=torch.int8),
    torch.zeros(2, 64).bfloat16(),
    torch.zeros(2, 4),
)
BAD: list[tuple[str, Any]] = [
    ("cache", lambda: paging.nd_to_nz(torch.zeros(2, 16, 512))),
    ("cache", lambda: paging.nz_to_nd(torch.zeros(2, 16, 1, 9))),
    ("rows", lambda: paging.unpack_rows(ROW[:, :600])),
    ("rows", lambda: paging.unpack_rows(ROW.float())),
    ("rows", lambda: paging.unpack_rows(ROW.repeat(1, 2)[:, ::2])),
    ("tile", lambda: paging.unpack_rows(ROW, tile=100)),
    ("ckv", lambda: paging.pack_rows(CKV.float(), KR, SCALE)),
    ("kr", lambda: paging.pack_rows(CKV, KR.float(), SCALE)),
    ("kr", lambda: paging.pack_rows(CKV, KR[:1], SCALE)),
    ("scale", lambda: paging.pack_rows(CKV, KR, SCALE.double())),
    ("scale", lambda: paging.pack_rows(CKV, KR, SCALE[:, :3])),
]


@pytest.mark.parametrize(("argument", "call"), BAD)
def test_bad_input_names_its_argument(argument: str, call: Any) -> None:
    with pytest.raises(ContractError) as refusal:
        call()
    assert refusal.value.argument == argument
