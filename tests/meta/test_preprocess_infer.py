"""`mla_preprocess`: results and argument order as torch_npu's own meta function has them."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from mla_fusion import meta, offline, reference


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    offline.activate()
    from torch_npu.op_plugin.atb import _atb_meta_registrations

    return _atb_meta_registrations


def sized(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


CACHES = {
    "krope_ctkv": (sized(9, 128, 1, 512), sized(9, 128, 1, 64)),
    "int8_nzcache": (sized(9, 16, 128, 32, dtype=torch.int8), sized(9, 4, 128, 16)),
    "nzcache": (sized(9, 32, 128, 16), sized(9, 4, 128, 16)),
}


def test_arguments_stand_in_the_order_of_torch_npu(theirs: ModuleType) -> None:
    required, optional = meta.signature("mla_preprocess")
    names = list(inspect.signature(theirs.npu_mla_preprocess_meta).parameters)
    assert names == [*required, *optional]
    assert names == list(inspect.signature(reference.mla_preprocess).parameters)


@pytest.mark.parametrize("heads", [2, 128])
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("mode", CACHES)
def test_torch_npu_infers_the_same(theirs: ModuleType, mode: str, tokens: int, heads: int) -> None:
    (kv, kr), up = CACHES[mode], heads * 192
    call = dict(
        input=sized(tokens, 7168), gamma0=sized(7168), beta0=sized(7168),
        wdqkv=sized(1, 224, 2112, 32, dtype=torch.int8), descale0=sized(2112, dtype=torch.float32),
        gamma1=sized(1536), beta1=sized(1536), wuq=sized(1, 48, up, 32, dtype=torch.int8),
        descale1=sized(up, dtype=torch.float32), gamma2=sized(512), cos=sized(tokens, 64),
        sin=sized(tokens, 64),
        wuk=sized(heads, 128, 512), kv_cache=kv, kv_cache_rope=kr,
        slotmapping=sized(tokens, dtype=torch.int32), cache_mode=mode,
        ctkv_scale=sized(1), q_nope_scale=sized(heads),
    )  # fmt: skip
    meta.check("mla_preprocess", **call)
    found = [(tuple(t.shape), t.dtype) for t in theirs.npu_mla_preprocess_meta(**call)]
    assert found == meta.infer("mla_preprocess", **call)
