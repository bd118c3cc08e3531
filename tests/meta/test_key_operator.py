"""The contract of npu_kv_rmsnorm_rope_cache: what each SoC and release takes or refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_fusion import meta
from mla_fusion.tools.selftest.samples import calls, sample_key

OP = "npu_kv_rmsnorm_rope_cache_v2"


def call(mode: str = "PA_BNSD", int8: bool = False, **changes: Any) -> dict[str, Any]:
    return sample_key(mode, int8) | changes


@pytest.mark.parametrize("cann", meta.RELEASES)
@pytest.mark.parametrize("soc", meta.SOCS)
def test_what_the_self_test_runs_is_taken_where_the_operator_is(soc: str, cann: str) -> None:
    there = soc != "A5" or meta.RELEASES.index(cann) >= meta.RELEASES.index("8.5")
    for scenario in (one for one in calls(soc, cann) if one.op == OP):
        if there:
            meta.check(scenario.op, soc=soc, cann=cann, values=True, **scenario.make())
        else:
            with pytest.raises(meta.ContractError, match=r"CANN 8\.5") as refused:
                meta.check(scenario.op, soc=soc, cann=cann, **scenario.make())
            assert refused.value.code == "soc"


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


# code -> the call, changes of soc and cann
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rank.kv": (call(kv=bf16(8, 576)), {}),
    "shape.kv": (call(kv=bf16(1, 1, 8, 640)), {}),
    "dtype.kv": (call(kv=torch.zeros(1, 1, 8, 576)), {}),
    "dtype.gamma": (call(gamma=torch.ones(512)), {}),
    "dtype.cos": (call(cos=torch.ones(1, 1, 8, 64)), {}),
    "shape.sin": (call(sin=bf16(1, 1, 7, 64)), {}),
    "rank.cos": (call(cos=bf16(8, 64)), {}),
    "shape.index": (call(index=torch.arange(7)), {}),
    "dtype.index": (call(index=torch.arange(8, dtype=torch.int32)), {}),
    "rank.index": (call("Norm", index=torch.arange(8)), {}),
    "shape.ckv_cache": (call(ckv_cache=bf16(4, 32, 2, 512)), {}),
    "dtype.k_cache": (call(k_cache=torch.zeros(4, 32, 1, 64, dtype=torch.float16)), {}),
    "required.c_kv_scale": (call(ckv_cache=torch.zeros(4, 32, 1, 512, dtype=torch.int8)), {}),
    "shape.k_rope_scale": (call(int8=True, k_rope_scale=torch.ones(1)), {}),
    "rank.c_kv_scale": (call(int8=True, c_kv_scale=torch.ones(1, 512)), {}),
    "quant.k_rope_offset": (call(int8=True, k_rope_offset=torch.ones(64)), {}),
    "quant.norm": (call("Norm", int8=True), {}),
    "cache_mode.unknown": (call(cache_mode="PA_BSND"), {}),
    "v": (call(v=bf16(1, 1, 8, 128)), {}),
    "dims.c": (call(gamma=bf16(256), kv=bf16(1, 1, 8, 320), ckv_cache=bf16(4, 32, 1, 256)), {}),
    "dims.blocksize": (call(k_cache=bf16(4, 24, 1, 64), ckv_cache=bf16(4, 24, 1, 512)), {}),
    "dims.blocknum": (
        # eight sequences of one token
        call(kv=bf16(8, 1, 1, 576), cos=bf16(8, 1, 1, 64), sin=bf16(8, 1, 1, 64)),
        {"cann": "latest"},
    ),
    "contiguous.ckv_cache": (call(ckv_cache=bf16(4, 32, 1, 1024)[..., :512]), {}),
    "values.index.range": (call(index=torch.arange(121, 129)), {}),
    "values.index.duplicate": (call(index=torch.tensor([5, -1, 5, -1, 0, 1, 2, 3])), {}),
    "required.gamma": (call(gamma=None), {}),
    "argument.unknown": (call(gammas=None), {}),
    "type.epsilon": (call(epsilon="small"), {}),
    "type.kv": (call(kv=bf16(1, 1, 8, 576).to_sparse()), {}),
    "cann": (call(), {"cann": "10.0"}),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    given, where = REFUSED[code]
    with pytest.raises(meta.ContractError) as refused:
        meta.check(OP, **({"soc": "A3", "cann": "9.1", "values": True} | where), **given)
    assert refused.value.code == code, str(refused.value)


def test_the_newest_release_alone_counts_blocks_by_sequence() -> None:
    meta.check(OP, soc="A3", cann="9.1", **REFUSED["dims.blocknum"][0])


def test_a5_takes_other_widths() -> None:
    meta.check(OP, soc="A5", cann="9.1", **REFUSED["dims.c"][0])


def test_one_row_of_a_table_serves_a_sequence_and_negative_slots_are_skipped() -> None:
    index = torch.tensor([-1, -7, 0, 1, 2, 3, 4, 5])
    meta.check(OP, values=True, **call(cos=bf16(1, 1, 1, 64), sin=bf16(1, 1, 1, 64), index=index))
