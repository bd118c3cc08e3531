"""`mf.meta.check`: codes and texts of refusals, releases, symbolic sizes, contents, and cost."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_fusion.meta import layout
from mla_fusion.meta.limits import taken_by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_fusion import meta
from mla_fusion.tools.selftest.samples import DEEPSEEK_V3, sample_call
from tests.samples import SMALL

V3 = "npu_mla_prolog_v3"
F32, I32, I64 = torch.float32, torch.int32, torch.int64
A23 = [(0, 0), (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)]
A5 = [(wq, kv) for wq in (3, 4, 5) for kv in (0, 1, 3)]
DIMS = DEEPSEEK_V3 | {"He": 1024, "N": 1}  # the smallest sizes the operator takes


def on_meta(call: dict[str, Any]) -> dict[str, Any]:
    return {
        k: torch.empty_like(v, device="meta") if isinstance(v, torch.Tensor) else v
        for k, v in call.items()
    }


def sized(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


_SAMPLES: dict[tuple[int, int], dict[str, Any]] = {}


def legal(wq: int = 0, kv: int = 0) -> dict[str, Any]:
    if (wq, kv) not in _SAMPLES:
        call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, dims=DIMS)
        _SAMPLES[wq, kv] = on_meta(call)
    return dict(_SAMPLES[wq, kv])


def refused(call: dict[str, Any], op: str = V3, **where: Any) -> meta.ContractError:
    with pytest.raises(meta.ContractError) as refusal:
        meta.check(op, **where, **call)
    return refusal.value


@pytest.mark.parametrize(("wq", "kv"), A23 + A5)
def test_every_scenario_is_taken_where_it_exists(wq: int, kv: int) -> None:
    call = legal(wq, kv)
    if wq < 3:
        meta.check(V3, soc="A2", **call)
        meta.check(V3, soc="A3", **call)
    else:
        assert refused(call, soc="A3").code == "quant.weight_quant_mode"
    meta.check(V3 + "_functional", soc="A5", **call)


def he(size: int) -> dict[str, Any]:
    return {
        "token_x": sized(8, size),
        "weight_dq": sized(size, 1536),
        "weight_dkv_kr": sized(size, 576),
    }


def hckv(size: int) -> dict[str, Any]:
    weights = {"weight_uk": sized(1, 128, size), "weight_dkv_kr": sized(1024, size + 64)}
    return weights | {"rmsnorm_gamma_ckv": sized(size), "kv_cache": sized(64, 128, 1, size)}


def heads(n: int, d: int = 128) -> dict[str, Any]:
    return {"weight_uk": sized(n, d, 512), "weight_uq_qr": sized(1536, n * (d + 64))}


def lengths(*ends: int) -> dict[str, Any]:
    return {"actual_seq_len": torch.tensor(ends, dtype=I32)}


ROWS = (("kv_cache", 512), ("kr_cache", 64))
Change = dict[str, Any]
REFUSALS: list[tuple[str, tuple[int, int], Change, str]] = [
    ("dims.he", (0, 0), he(1000), "He one of 1024"),
    ("shape.weight_dq", (0, 0), {"weight_dq": sized(2048, 1536)}, "He = 1024"),
    ("shape.weight_uq_qr", (0, 0), {"weight_uq_qr": sized(1536, 193)}, "N*D+N*Dr = 192"),
    ("dims.n", (0, 0), heads(129), "N 1..128"),
    ("dims.d", (0, 0), heads(1, 64), "one of 128, 192"),
    ("dims.hckv", (0, 0), hckv(256), "Hckv 512"),
    ("dims.blocksize", (0, 0), {n: sized(64, 24, 1, w) for n, w in ROWS}, "16..1024, a multiple "
        "of 16"),
    ("dims.nkv", (0, 0), {n: sized(64, 128, 2, w) for n, w in ROWS}, "Nkv 1"),
    ("shape.kr_cache", (0, 0), {"kr_cache": sized(63, 128, 1, 64)}, "BlockNum = 64"),
    ("rank.kv_cache", (0, 0), {"kv_cache": sized(64, 128, 512)}, "3-D [64, 128, 512]"),
    ("dtype.token_x", (0, 0), {"token_x": sized(8, 1024, dtype=torch.float16)}, "torch.bfloat16"),
    ("dtype.kv_cache", (0, 0), {"kv_cache": sized(64, 128, 1, 512, dtype=torch.float16)},
     "torch.float16"),
    ("dtype.cache_index", (0, 0), {"cache_index": sized(8, dtype=I32)}, "torch.int64"),
    ("shape.cache_index", (0, 0), {"cache_index": sized(7, dtype=I64)}, "T = 8"),
    ("required.cache_index", (0, 0), {"cache_index": None}, "PA_BSND"),
    ("required.token_x", (0, 0), {"token_x": None}, "a tensor"),
    ("forbidden.actual_seq_len", (0, 0), {"actual_seq_len": sized(2, dtype=I32)}, "nothing"),
    ("forbidden.smooth_scales_cq", (0, 0), {"smooth_scales_cq": sized(1, 1536, dtype=F32)},
     "quant_mode 0"),
    ("forbidden.quant_scale_ckv", (2, 3), {"quant_scale_ckv": sized(1, dtype=F32)},
     "kv_cache_quant_mode 3"),
    ("required.k_nope_clip_alpha", (2, 3), {"k_nope_clip_alpha": None}, "kv_cache_quant_mode 3"),
    ("required.dequant_scale_x", (2, 0), {"dequant_scale_x": None}, "weight_quant_mode 2"),
    ("rank.dequant_scale_x", (2, 0), {"dequant_scale_x": sized(8, dtype=F32)}, "tokens"),
    ("rank.smooth_scales_cq", (2, 0), {"smooth_scales_cq": sized(1536, dtype=F32)}, "1-D"),
    ("quant.combination", (2, 0), {"kv_cache_quant_mode": 2}, "one of 0, 1, 3"),
    ("quant.weight_quant_mode", (0, 0), {"weight_quant_mode": 7}, "found 7"),
    ("quant.query_quant_mode", (2, 1), {"query_quant_mode": 0}, "expected 1"),
    ("quant.ckvkr_repo_mode", (2, 3), {"ckvkr_repo_mode": 0}, "expected 1"),
    ("quant.quant_scale_repo_mode", (0, 0), {"quant_scale_repo_mode": 1}, "expected 0"),
    ("quant.tile_size", (0, 0), {"tile_size": 64}, "expected 128"),
    ("shape.kr_cache", (2, 3), {"kr_cache": sized(1)}, "empty"),
    ("cache_mode.unknown", (0, 0), {"cache_mode": "PA"}, "'PA'"),
    ("cache_mode.quant", (2, 3), {"cache_mode": "PA_NZ"}, "PA_BSND, BSND, TND"),
    ("cache_mode.rank", (0, 0), {"cache_mode": "BSND", "cache_index": None}, "3-D"),
    ("rank.token_x", (0, 0), {"token_x": sized(2, 2, 2, 1024)}, "4-D"),
    ("argument.unknown", (0, 0), {"kv_caches": None}, "kv_caches"),
    ("type.token_x", (0, 0), {"token_x": [1.0]}, "list"),
    ("type.rope_sin", (0, 0), {"rope_sin": torch.zeros(8, 64).to_sparse()}, "torch.sparse_coo"),
    ("type.cache_mode", (0, 0), {"cache_mode": 3}, "a str"),
    ("type.weight_quant_mode", (0, 0), {"weight_quant_mode": "2"}, "an int"),
    ("type.query_norm_flag", (0, 0), {"query_norm_flag": 1}, "True or False"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "scenario", "change", "text"), REFUSALS)
def test_refusals_have_a_stable_code_and_say_why(
    code: str, scenario: tuple[int, int], change: dict[str, Any], text: str
) -> None:
    error = refused(legal(*scenario) | change)
    assert error.code == code and text in str(error) and V3 in str(error) and "\n" not in str(error)
    assert isinstance(error, ValueError) and error.argument in str(error)


def test_a_refusal_carries_its_parts() -> None:
    error = refused(legal() | {"weight_dq": sized(2048, 1536)})
    assert (error.argument, error.found) == ("weight_dq", "[2048, 1536]")
    assert error.expected == "[He = 1024, Hcq = 2048]" or "He = 1024" in error.expected
    assert (
        error.dims["He"] == 1024
        and error.dims["T"] == 8
        and error.source == "mla_prolog_tiling_check.cpp"
    )


@pytest.mark.parametrize(
    ("where", "change", "code"),
    [
        ({"cann": "8.3"}, {}, "dims.he"),
        ({"cann": "8.5"}, {}, None),
        ({"cann": "8.5", "soc": "A5"}, {}, "quant.weight_quant_mode"),
        ({"cann": "9.0", "soc": "A5"}, {}, "dims.he"),
        ({"cann": "8.3", "soc": "A5"}, {}, "quant.weight_quant_mode"),
        ({"cann": "9.0", "soc": "A5"}, {"cache_mode": "PA_BLK_NZ"}, "cache_mode.release"),
        ({"cann": "8.2"}, {"cache_mode": "TND"}, "cache_mode.release"),
        ({"cann": "9.0"}, heads(3), "dims.n"),
        ({"cann": "latest"}, heads(3), None),
        ({"cann": "7.0"}, {}, "cann"),
        ({"soc": "910B"}, {}, "soc"),
        ({"cann": ["8.5"]}, {}, "cann"),
        ({"cann": torch.zeros(2)}, {}, "cann"),
        ({"soc": torch.zeros(2)}, {}, "soc"),
        ({"path": "compiled"}, {}, "path"),
        ({"path": torch.zeros(2)}, {}, "path"),
    ],
)
def test_releases_and_socs(where: dict[str, Any], change: dict[str, Any], code: str | None) -> None:
    call = legal() | change
    if code is None:
        meta.check(V3, **where, **call)
    else:
        assert refused(call, **where).code == code


@pytest.mark.parametrize(
    ("where", "change", "text"),
    [
        ({"cann": "8.3"}, {}, "He 1024, which A3 takes after CANN 8.3"),
        ({"cann": "9.0"}, heads(3), "N 3, which A3 takes after CANN 9.1"),
        ({}, he(1000), "He 1000, which no release takes"),
    ],
)
def test_a_refused_size_names_the_release_that_takes_it(
    where: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    assert refused(legal() | change, **where).found == text


def test_when_a_size_is_taken_follows_the_newest_rule() -> None:
    """A release in between may take less, and the newest less than all before."""
    assert taken_by(V3, "S", 4, "A5, CANN 8.5") == "which A5 takes after CANN 8.5"
    assert taken_by(V3, "tokens", 0, "A3, CANN latest") == "which A3 takes up to CANN 9.1"


def test_older_versions_of_the_operator() -> None:
    call = {
        k: v
        for k, v in legal().items()
        if k in meta.signature("npu_mla_prolog_v2")[1] or k in spec_names()
    }
    meta.check("npu_mla_prolog", **call)
    meta.check("npu_mla_prolog_v2", **call)
    assert refused(call, op="npu_mla_prolog", soc="A5").code == "quant.weight_quant_mode"
    assert (
        refused(call | {"cache_mode": "PA_BLK_NZ"}, op="npu_mla_prolog_v2").code
        == "cache_mode.release"
    )
    assert (
        refused(call | {"weight_quant_mode": 0}, op="npu_mla_prolog_v2").code == "argument.unknown"
    )
    assert refused(call, op="npu_mla_prolog_v9").code == "op"


def spec_names() -> tuple[str, ...]:
    return meta.signature("npu_mla_prolog_v2")[0]


def test_limits_can_be_asked_for() -> None:
    limits = meta.limits(V3, "A3", "8.5")
    assert str(limits.dims["Hcq"]) == "1536" and 2048 not in limits.dims["Hcq"]
    assert 16 in limits.dims["N"] and 3 not in limits.dims["N"] and (2, 1) in limits.quant_modes
    assert str(meta.limits(V3).dims["N"]) == "1..128"


def test_symbolic_sizes_are_neither_guarded_nor_specialised() -> None:
    env = ShapeEnv()
    call = legal()
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) as mode:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        def fake(tensor: torch.Tensor, dynamic: int) -> torch.Tensor:
            sizes = [
                DimDynamic.DYNAMIC if axis == dynamic else DimDynamic.STATIC
                for axis in range(tensor.dim())
            ]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            return mode.from_tensor(tensor, symbolic_context=context, static_shapes=False)

        for name in ("token_x", "rope_sin", "rope_cos", "cache_index", "kv_cache", "kr_cache"):
            call[name] = fake(call[name], 0)
        assert isinstance(call["token_x"].shape[0], torch.SymInt)
        before = len(env.guards)
        meta.check(V3, **call)
        shapes = meta.infer(V3, **call)
        assert len(env.guards) == before
        assert shapes[0][0][0].node.expr == call["token_x"].shape[0].node.expr
        error = refused(call | {"weight_dq": sized(2048, 1536)})
        assert error.code == "shape.weight_dq"


def strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


ROW = 16 * 512  # of a cache block
BLOCKS_APART = {
    "kv_cache": strided((64, 16, 1, 512), (2 * ROW, 512, 512, 1)),
    "kr_cache": strided((64, 16, 1, 64), (2 * 16 * 64, 64, 64, 1)),
}
ROWS_APART = {
    "kv_cache": strided((64, 16, 1, 512), (2 * ROW, 1024, 1024, 1)),
    "kr_cache": sized(64, 16, 1, 64),
}
HEADS_FIRST = {"kv_cache": sized(64, 1, 16, 512).transpose(1, 2), "kr_cache": sized(64, 16, 1, 64)}
ONE = sized(1, 16, 1, 64)
OVERLAPPING = {
    "kv_cache": strided((64, 16, 1, 512), (512, 512, 512, 1)),
    "kr_cache": sized(64, 16, 1, 64),
}


@pytest.mark.parametrize(
    ("change", "cann", "code"),
    [
        (BLOCKS_APART, "latest", None),
        (BLOCKS_APART, "9.1", "contiguous.kv_cache"),
        (ROWS_APART, "latest", "contiguous.kv_cache"),
        (OVERLAPPING, "latest", "contiguous.kv_cache"),
        # the host compares the stride of an axis of size 1 too
        (HEADS_FIRST, "latest", "contiguous.kv_cache"),
        (HEADS_FIRST, "9.1", None),
        ({"kv_cache": sized(0, 16, 1, 512), "kr_cache": sized(0, 16, 1, 64)}, "latest", None),
        (
            {"kv_cache": sized(0, 16, 1, 512), "kr_cache": sized(0, 16, 1, 128)[..., ::2]},
            "9.1",
            None,
        ),
        (
            {"kv_cache": sized(0, 16, 1, 512), "kr_cache": sized(0, 16, 1, 128)[..., ::2]},
            "latest",
            "contiguous.kr_cache",
        ),
        (
            {"kv_cache": strided((1, 16, 1, 512), (2 * ROW, 512, 512, 1)), "kr_cache": ONE},
            "latest",
            None,
        ),
        (
            {"kv_cache": strided((1, 16, 1, 512), (0, 512, 512, 1)), "kr_cache": ONE},
            "latest",
            "contiguous.kv_cache",
        ),
        ({"kv_cache": strided((1, 16, 1, 512), (0, 512, 512, 1)), "kr_cache": ONE}, "9.1", None),
        ({"kv_cache": sized(1, 16, 1, 512), "kr_cache": sized(2, 16, 1, 64)[::2]}, "9.1", None),
        ({"weight_dq": sized(1536, 1024).t()}, "latest", "contiguous.weight_dq"),
        ({"token_x": sized(8, 2048)[:, :1024]}, "latest", "contiguous.token_x"),
        ({"rope_sin": sized(8, 128)[:, 64:]}, "latest", "contiguous.rope_sin"),
        ({"cache_index": sized(8, 2, dtype=I64)[:, 0]}, "latest", "contiguous.cache_index"),
    ],
)
def test_what_is_not_contiguous(change: dict[str, Any], cann: str, code: str | None) -> None:
    call = legal() | change
    if code is None:
        meta.check(V3, cann=cann, **call)
    else:
        error = refused(call, cann=cann)
        assert error.code == code and "strides" in error.found


def test_older_versions_copy_a_cache_whose_blocks_lie_apart() -> None:
    names = {*spec_names(), *meta.signature("npu_mla_prolog_v2")[1]}
    call = {name: value for name, value in (legal() | BLOCKS_APART).items() if name in names}
    assert refused(call, op="npu_mla_prolog_v2").code == "contiguous.kv_cache"


def test_in_a_compiled_graph_only_what_is_written_must_be_contiguous() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        transposed = torch.empty(1536, 1024, dtype=torch.bfloat16).t()
        apart = torch.empty(64, 128, 1, 1024, dtype=torch.bfloat16)[..., ::2]
    meta.check(V3, **legal() | {"weight_dq": transposed})
    assert refused(legal() | {"kv_cache": apart}).code == "contiguous.kv_cache"


def test_tensors_on_different_devices() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        far = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda")
    here = torch.zeros(8, 64, dtype=torch.bfloat16)
    error = refused(legal() | {"rope_sin": here, "rope_cos": far})
    assert (error.code, error.found) == ("device.rope_cos", "cuda:0") and "cpu" in error.expected


def test_weights_on_an_npu_must_be_fractal_nz(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {(1024, 1536): 2, (1536, 192): 29, (1024, 576): 29}
    monkeypatch.setattr(layout, "npu_format", lambda tensor: formats[tuple(tensor.shape)])
    error = refused(legal())
    assert error.code == "format.weight_dq" and "npu_format_cast(weight_dq, 29)" in error.expected
    formats[1024, 1536] = 29
    meta.check(V3, **legal())


def test_the_format_of_a_tensor_is_asked_of_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def get_npu_format(tensor: object) -> int:
            return 29

    assert layout.npu_format(torch.zeros(2)) is None
    tensor = SimpleNamespace(device=SimpleNamespace(type="npu"))
    monkeypatch.setitem(sys.modules, "torch_npu", Module)
    assert layout.npu_format(tensor) == 29  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert layout.npu_format(tensor) is None  # type: ignore[arg-type]


def real(mode: str = "PA_BSND", lead: tuple[int, ...] = (8,)) -> dict[str, Any]:
    call = on_meta(sample_call(cache_mode=mode, lead=lead, dims=DIMS))
    data = sample_call(cache_mode=mode, lead=lead, dims=SMALL)
    block_num = {"kv_cache": sized(6, 16, 1, 512), "kr_cache": sized(6, 16, 1, 64)}
    return call | block_num | {k: data[k] for k in ("cache_index", "actual_seq_len") if k in data}


@pytest.mark.parametrize(
    ("mode", "lead", "change", "code"),
    [
        ("PA_BSND", (8,), {}, None),
        ("PA_BSND", (3,), {"cache_index": torch.tensor([-1, -1, 95])}, None),
        ("PA_BSND", (3,), {"cache_index": torch.tensor([0, 1, 96])}, "values.cache_index.range"),
        ("PA_NZ", (3,), {"cache_index": torch.tensor([0, 1, 1])}, "values.cache_index.duplicate"),
        ("PA_BLK_BSND", (20,), {}, None),
        ("PA_BLK_BSND", (20,), {"cache_index": torch.tensor([6, 1])}, "values.cache_index.range"),
        ("PA_BLK_NZ", (20,), lengths(10, 10), "values.actual_seq_len"),
        ("PA_BLK_NZ", (20,), lengths(21, 20), "values.actual_seq_len"),
        ("PA_BLK_NZ", (20,), lengths(20) | {"cache_index": torch.tensor([1])},
         "values.cache_index.blocks"),
        ("PA_BSND", (8,), {"cache_index": sized(8, dtype=I64)}, "values.meta"),
    ],
)  # fmt: skip
def test_contents_that_the_device_does_not_check(
    mode: str, lead: tuple[int, ...], change: dict[str, Any], code: str | None
) -> None:
    call = real(mode, lead) | change
    meta.check(V3, **call)
    if code is None:
        meta.check(V3, values=True, **call)
    else:
        assert refused(call, values=True).code == code
