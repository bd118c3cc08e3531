"""What one release, SoC or path takes and another does not: for each rule a call on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_fusion import meta
from mla_fusion.tools.selftest.samples import DEEPSEEK_V3, as_operator
from tests.meta.stricter import STRICTER, Stricter, stricter
from tests.samples import call_on_meta

V3 = "npu_mla_prolog_v3"
DIMS = DEEPSEEK_V3 | {"N": 2, "BlockNum": 4, "BlockSize": 16}
BF16, I8, F32 = torch.bfloat16, torch.int8, torch.float32
A5 = {"soc": "A5"}
Change = dict[str, Any]


def sized(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def legal(wq: int = 0, kv: int = 0, lead: tuple[int, ...] = (8,), mode: str = "PA_BSND") -> Change:
    return call_on_meta(
        weight_quant_mode=wq, kv_cache_quant_mode=kv, cache_mode=mode, lead=lead, dims=DIMS
    )


def code_of(call: Change, op: str = V3, **where: str) -> str | None:
    """The code that a call is refused with, None where it is taken."""
    try:
        meta.check(op, **where, **call)  # type: ignore[arg-type]
    except meta.ContractError as error:
        assert error.argument in str(error)
        return error.code
    return None


STORED = {"weight_dq": sized(96, 448, 16, 16)}  # [Hcq/16, He/16, 16, 16]
NORMED = {"query_norm_flag": True}
NO_TOKENS = legal(lead=(0,)) | {"cache_index": sized(0, dtype=torch.int64)}
LONG_BATCH = legal(lead=(65537, 1))
EMPTY = {
    name: {"kr_cache": sized(*shape)} for name, shape in (("2-D", (1, 0)), ("3-D", (0, 16, 1)))
}
EMPTY |= {str(kind)[6:]: {"kr_cache": sized(0, dtype=kind)} for kind in (I8, F32, torch.int32)}
ROW = {"quant_scale_ckv": sized(1, 512, dtype=F32)}
BLOCKS = legal(lead=(20,), mode="PA_BLK_BSND")
BLOCK_ROWS = BLOCKS | {"cache_index": sized(2, 1, dtype=torch.int64)}
BLOCK_NUMBER = BLOCKS | {"cache_index": sized(dtype=torch.int64)}
MANY_ENDS = BLOCKS | {"actual_seq_len": sized(65537, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("call", "where", "eager", "graph"),
    [
        # 4-D storage of weight_dq: GE's inference of the shapes reads Hcq off it
        (legal() | STORED, {"cann": "latest"}, None, "rank.weight_dq"),
        (legal() | STORED, {"cann": "9.1"}, None, "rank.weight_dq"),
        (legal() | STORED, {"cann": "9.0"}, None, None),
        (legal() | STORED | NORMED, {"cann": "9.0"}, None, "rank.weight_dq"),
        (legal() | STORED | NORMED, {"cann": "8.5"}, None, "rank.weight_dq"),
        (legal() | STORED | NORMED, {"cann": "8.3"}, None, None),
        # no tokens
        (NO_TOKENS, {"cann": "latest"}, "dims.tokens", "dims.tokens"),
        (NO_TOKENS, {"cann": "9.1"}, None, None),
        # many batches
        (LONG_BATCH, {"cann": "latest"}, "dims.b", "dims.b"),
        (LONG_BATCH, {"cann": "8.5"}, "dims.b", "dims.b"),
        (MANY_ENDS, {"cann": "9.0"}, "dims.b", "dims.b"),
        # the empty kr_cache of a per-tile call
        (legal(1, 3) | EMPTY["2-D"], {"cann": "9.1"}, None, "rank.kr_cache"),
        (legal(1, 3) | EMPTY["2-D"], {"cann": "9.0"}, None, None),
        (legal(1, 3) | EMPTY["2-D"], A5, "rank.kr_cache", "rank.kr_cache"),
        (legal(3, 3) | EMPTY["3-D"], A5 | {"cann": "9.0"}, "rank.kr_cache", "rank.kr_cache"),
        (legal(3, 3) | EMPTY["3-D"], A5 | {"cann": "9.1"}, None, None),
        (legal(1, 3) | EMPTY["float32"], {}, "dtype.kr_cache", "dtype.kr_cache"),
        (legal(2, 3) | EMPTY["int32"], {"cann": "8.5"}, "dtype.kr_cache", "dtype.kr_cache"),
        (legal(2, 3) | EMPTY["int8"], {}, None, None),
        (legal(1, 3) | EMPTY["int8"], A5, None, None),
        (legal(2, 3) | EMPTY["int8"], A5, "dtype.kr_cache", "dtype.kr_cache"),
        (legal(3, 3) | EMPTY["int8"], A5 | {"cann": "9.0"}, "dtype.kr_cache", "dtype.kr_cache"),
        # the rank of cache_index where it lists blocks
        (BLOCK_ROWS, {"cann": "8.5"}, None, None),
        (BLOCK_NUMBER, {"cann": "8.5"}, None, None),
        (BLOCK_ROWS, {"cann": "9.0"}, "rank.cache_index", "rank.cache_index"),
        # no scenario passes there
        (
            legal(3, 0, (8, 1)),
            A5 | {"cann": "8.5"},
            "quant.weight_quant_mode",
            "quant.weight_quant_mode",
        ),
        (legal(3, 0, (8, 1)), A5 | {"cann": "9.0"}, None, None),
        # 8.3: no per-tile caches, a row for the per-tensor scale, the scenario is read off the
        # dtypes
        (legal(1, 3), {"cann": "8.3"}, "quant.combination", "quant.combination"),
        (legal(2, 1), {"cann": "8.3"}, "rank.quant_scale_ckv", "rank.quant_scale_ckv"),
        (legal(2, 1) | ROW, {"cann": "8.3"}, None, None),
        (legal(2, 1) | ROW, {"cann": "8.5"}, "rank.quant_scale_ckv", "rank.quant_scale_ckv"),
        (legal(2, 0) | {"weight_quant_mode": 1}, {"cann": "8.3"}, "quant.dtypes", "quant.dtypes"),
        (
            legal() | {"kv_cache_quant_mode": 0, "tile_size": 64},
            {"cann": "8.3"},
            "quant.tile_size",
            "quant.tile_size",
        ),
    ],
)
def test_what_a_release_or_a_path_takes(
    call: Change, where: dict[str, str], eager: str | None, graph: str | None
) -> None:
    assert (code_of(call, **where), code_of(call, path="eager", **where)) == (eager, eager)
    assert code_of(call, path="graph", **where) == graph


V2 = "npu_mla_prolog_v2"
APART = {"kv_cache": sized(4, 16, 1, 1024)[..., ::2]}
ON_PURPOSE = {
    "older-on-A5": (V2, legal(), A5),
    "strided-cache": (V3, legal() | APART, {"cann": "9.1"}),
    "older-cache-width": (V2, legal() | {"kv_cache": sized(4, 16, 1, 576)}, {}),
    "padded-weight": (V3, legal() | {"weight_dq": sized(7167, 1536)}, {}),
    "modes-not-read": (V3, legal() | {"query_quant_mode": 1}, {"cann": "8.3"}),
    "modes-past-32-bits": (V3, legal() | {"tile_size": 128 + 2**32}, {}),
}


@pytest.mark.parametrize("row", STRICTER, ids=lambda row: row.name)
def test_each_class_that_is_refused_on_purpose(row: Stricter) -> None:
    op, call, where = ON_PURPOSE[row.name]
    code = code_of(call if op == V3 else as_operator(op, call), op, **where)
    place = {"soc": "A3", "cann": "latest"} | where
    assert code is not None and row in stricter(op, code=code, **place)


def test_reasons_say_what_the_limit_is() -> None:
    older = as_operator("npu_mla_prolog_v2", legal())
    for op, call, where, text in (
        ("npu_mla_prolog_v2", older, A5, "torch_npu's meta functions refuse it"),
        (V3, legal(3, 0), A5 | {"cann": "8.5"}, "no float8_e8m0fnu for the dequant_scale_q_norm"),
        (V3, legal() | STORED, {"path": "graph"}, "2-D [He, Hcq] on A3, CANN latest in a graph"),
        (
            V3,
            legal() | {"kr_cache": sized(4, 16, 1, 128)[..., ::2]},
            {"cann": "9.1"},
            "written to others do not arrive",
        ),
    ):
        with pytest.raises(meta.ContractError) as refusal:
            meta.check(op, **where, **call)
        assert text in str(refusal.value)


def test_older_versions_compare_strides_of_axes_of_size_1_in_the_newest_release() -> None:
    call = as_operator("npu_mla_prolog_v2", legal()) | {
        "kv_cache": sized(4, 1, 16, 512).transpose(1, 2)
    }
    assert code_of(call, "npu_mla_prolog_v2", cann="9.1") is None
    assert code_of(call, "npu_mla_prolog_v2") == "contiguous.kv_cache"


def test_results_of_releases_whose_inference_differs_from_torch_npu() -> None:
    call = legal(1, 0) | NORMED
    assert meta.infer(V3, cann="8.3", **call)[3:] == [((1,), I8), ((1,), F32)]
    assert meta.infer(V3, cann="8.3", path="eager", **call)[3:] == [((8, 1536), I8), ((8, 1), F32)]
    mxfp8, scale = legal(3, 0) | NORMED, torch.float8_e8m0fnu
    assert meta.infer(V3, cann="8.5", **mxfp8)[4] == ((8, 1), F32)
    assert meta.infer(V3, cann="8.5", path="eager", **mxfp8)[4] == ((8, 48), scale)
    assert meta.infer(V3, cann="9.0", **mxfp8)[4] == ((8, 48), scale)
    with pytest.raises(meta.ContractError, match="path"):
        meta.infer(V3, path="npu", **call)


def test_limits_name_the_traits_of_a_release() -> None:
    assert meta.limits(V3, "A5", "8.5").absent and not meta.limits(V3, "A5", "8.5").quant_modes
    assert (
        meta.limits(V3, "A3", "9.1", "graph").weight_dq_4d
        == ""
        != meta.limits(V3, "A3", "9.1").weight_dq_4d
    )
    assert not meta.limits(V3, "A3", "8.3").gives_query_norm and meta.limits(V3).gives_query_norm
