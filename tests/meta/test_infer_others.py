"""Results of the operators beside the prologue, as torch_npu's own meta functions have them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from mla_fusion.meta.attention import LAYOUTS
from mla_fusion.meta.signature import OPERATORS

from mla_fusion import meta, offline

KEY = "npu_kv_rmsnorm_rope_cache"
ATTENTION = "npu_fused_infer_attention_score_v2"


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    offline.activate()
    from torch_npu.op_plugin.meta import _meta_registrations

    return _meta_registrations


def sized(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def key_call(**changed: Any) -> dict[str, Any]:
    tables = {name: sized(3, 1, 2, 64) for name in ("cos", "sin")}
    caches = {"k_cache": sized(4, 16, 1, 64), "ckv_cache": sized(4, 16, 1, 512, dtype=torch.int8)}
    return dict(
        kv=sized(3, 1, 2, 576), gamma=sized(512), **tables, index=sized(6, dtype=torch.int64),
        c_kv_scale=sized(1, 512, dtype=torch.float32), **caches, cache_mode="PA_BNSD",
    ) | changed  # fmt: skip


def attention_call(layout: str, **changed: Any) -> dict[str, Any]:
    sizes = {"B": 3, "S": 2, "T": 6, "N": 16}

    def query(width: int) -> torch.Tensor:
        of_heads = {"D": width, "H": 16 * width}
        return sized(*((sizes | of_heads)[axis] for axis in layout.partition("_")[0]))

    caches = {name: sized(9, 1, 128, 512) for name in ("key", "value")}
    return dict(
        query=query(512), query_rope=query(64), **caches, key_rope=sized(9, 1, 128, 64),
        block_table=sized(3, 3, dtype=torch.int32), actual_seq_kvlen=[5, 6, 7],
        num_query_heads=16, num_key_value_heads=1, input_layout=layout, block_size=128,
    ) | changed  # fmt: skip


@pytest.mark.parametrize("suffix", ["_v2", "_v2_functional"])
def test_of_the_keys_side(theirs: ModuleType, suffix: str) -> None:
    found = getattr(theirs, f"{KEY}{suffix}_meta")(**key_call())
    assert meta.infer(KEY + suffix, **key_call()) == [(tuple(t.shape), t.dtype) for t in found]


def test_the_first_of_the_keys_side_gives_its_caches_first() -> None:
    *rows, kr, kv = meta.infer(f"{KEY}_v2_functional", **key_call())
    assert meta.infer(KEY, **key_call()) == [kr, kv, *rows]


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_attention(theirs: ModuleType, layout: str, lse: bool) -> None:
    call = attention_call(layout, return_softmax_lse=lse)
    found = theirs.npu_fused_infer_attention_score_v2_forward(**call)
    assert meta.infer(ATTENTION, **call) == [(tuple(t.shape), t.dtype) for t in found]


def test_of_attention_with_an_int8_query_over_nz_caches(theirs: ModuleType) -> None:
    caches = {name: sized(9, 1, 16, 128, 32, dtype=torch.int8) for name in ("key", "value")}
    query = {"query": sized(6, 16, 512, dtype=torch.int8)}
    call = attention_call("TND", **query, **caches)
    found = theirs.npu_fused_infer_attention_score_v2_forward(**call)
    wanted = [(tuple(t.shape), t.dtype) for t in found]
    assert meta.infer(ATTENTION, **call) == wanted
    assert wanted[0] == ((6, 16, 512), torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "call", "code"),
    [
        (f"{KEY}_v2", key_call(kv=sized(6, 576)), "rank.kv"),
        (f"{KEY}_v2", key_call(cos=None), "required.cos"),
        (ATTENTION, attention_call("TND", query_rope=None), "required.query_rope"),
        (ATTENTION, attention_call("TND", query=sized(3, 2, 16, 512)), "rank.query"),
        (ATTENTION, attention_call("TND", value=sized(9, 512)), "rank.value"),
        (ATTENTION, attention_call("TND", input_layout="NTD"), "input_layout"),
    ],
)
def test_refused(op: str, call: dict[str, Any], code: str) -> None:
    with pytest.raises(meta.ContractError) as refused:
        meta.infer(op, **call)
    assert refused.value.code == code


def test_every_operator_that_is_checked_has_results() -> None:
    for name, operator in OPERATORS.items():
        with pytest.raises(meta.ContractError) as refused:
            meta.infer(name)
        assert refused.value.code.startswith("required.") and operator.results
