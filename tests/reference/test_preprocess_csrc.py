"""vllm-ascend's fork of mla_preprocess: against ATB's, its own rules, and the kernels that
exist.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mla_fusion import meta
from mla_fusion.reference import mla_preprocess_csrc, npu_mla_preprocess
from mla_fusion.reference.preprocess import rms_norm_bias
from mla_fusion.reference.sample_preprocess import LEGAL, SMALL, sample_preprocess

OP = "mla_preprocess_csrc"
BF16, FP16 = torch.bfloat16, torch.float16
CACHES = ("kvcache", "krope_ctkv", "int8_nzcache", "nzcache")
QUANTS = ("per_tensor_quant_asymm", "per_token_quant_symm", "no_quant")
STATIC, DYNAMIC, NO_QUANT = QUANTS
# what the device has kernels for, as its own test lists them
SUPPORTED = [
    ("kvcache", STATIC, BF16),
    ("kvcache", DYNAMIC, BF16),
    ("kvcache", STATIC, FP16),
    ("krope_ctkv", STATIC, BF16),
    ("krope_ctkv", DYNAMIC, BF16),
    ("krope_ctkv", NO_QUANT, BF16),
    ("krope_ctkv", STATIC, FP16),
    ("int8_nzcache", DYNAMIC, BF16),
    ("nzcache", STATIC, BF16),
    ("nzcache", DYNAMIC, BF16),
]


def sample(
    cache_mode: str = "krope_ctkv",
    quant_mode: str = STATIC,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> Any:
    return sample_preprocess(
        OP, cache_mode=cache_mode, quant_mode=quant_mode, dtype=dtype, **options
    )


def legal(
    cache_mode: str = "krope_ctkv", quant_mode: str = STATIC, dtype: torch.dtype = BF16
) -> dict[str, Any]:
    call = sample(cache_mode, quant_mode, dtype, dims=LEGAL)
    metas = {id(v): v.to("meta") for v in call.values() if isinstance(v, torch.Tensor)}
    return {name: metas.get(id(value), value) for name, value in call.items()}


def sized(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def refused(call: dict[str, Any]) -> meta.ContractError:
    with pytest.raises(meta.ContractError) as refusal:
        meta.check(OP, **call)
    return refusal.value


@pytest.mark.parametrize("cache_mode", CACHES)
@pytest.mark.parametrize("quant_mode", [STATIC, DYNAMIC])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_without_an_input_norm_it_is_atb_after_the_input_norm(
    cache_mode: str, quant_mode: str, dtype: torch.dtype
) -> None:
    """ATB with gamma0 = 1 on rows of RMS 1 norms nothing but the epsilon away; small integers
    survive it exactly.
    """
    fork = sample(cache_mode, quant_mode, dtype)
    signs = (
        torch.randint(0, 2, fork["hiddenState"].shape, generator=torch.Generator().manual_seed(3))
        * 2
        - 1
    )
    fork["hiddenState"] = signs.to(dtype)
    atb = sample_preprocess(cache_mode=cache_mode, quant_mode=quant_mode, dtype=dtype)
    ones = torch.ones(SMALL["H"]).to(dtype)
    atb |= {"input": fork["hiddenState"], "gamma0": ones, "beta0": torch.zeros_like(ones)}
    q0, kv, q1, kr, _ = mla_preprocess_csrc(**fork)
    for ours, theirs in zip((q0, kv, q1, kr), npu_mla_preprocess(**atb), strict=True):
        if theirs.numel():
            error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()
            assert error < 0.02, error


def test_results_are_the_arguments_and_the_input_caches_are_not_written() -> None:
    call = sample()
    call |= {
        "kv_cache_out0": call["kv_cache"].clone(),
        "kv_cache_out1": call["kv_cache_rope"].clone(),
    }
    before = call["kv_cache"].clone()
    results = mla_preprocess_csrc(**call)
    names = ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1", "inner_out")
    assert all(result is call[name] for result, name in zip(results, names, strict=True))
    assert torch.equal(call["kv_cache"], before) and not torch.equal(call["kv_cache_out0"], before)
    assert meta.infer(OP, **call) == [(tuple(r.shape), r.dtype) for r in results]


@pytest.mark.parametrize("quant_mode", QUANTS)
def test_inner_out_is_the_normed_query_with_its_beta_before_quantisation(quant_mode: str) -> None:
    call = sample(quant_mode=quant_mode) | {"wdqkv": torch.zeros(160, 128).to(BF16)}
    call["wdqkv"][96:, :64] = torch.eye(64)  # the q columns pick the first hidden channels
    call |= {
        "quant_mode": "no_quant",
        "wuq": sample(quant_mode="no_quant")["wuq"],
        "enable_inner_out": True,
    }
    inner = mla_preprocess_csrc(**call)[4]
    wanted = rms_norm_bias(call["hiddenState"][:, :64], call["gamma1"], None).to(BF16)
    assert torch.equal(inner, wanted), "no_quant reads beta1 and does not add it"
    quantised = sample() | {"enable_inner_out": True}
    plain = sample() | {"enable_inner_out": True, "beta1": torch.zeros(64).to(BF16)}
    shift = mla_preprocess_csrc(**quantised)[4].float() - mla_preprocess_csrc(**plain)[4].float()
    assert torch.allclose(shift, quantised["beta1"].float().expand_as(shift), atol=0.02)
    untouched = sample()
    assert not mla_preprocess_csrc(**untouched)[4].any()


def test_no_quant_multiplies_the_hidden_states_as_they_are() -> None:
    call = sample(quant_mode="no_quant")
    wide = {name: value.double() for name, value in call.items() if isinstance(value, torch.Tensor)}
    down = wide["hiddenState"] @ wide["wdqkv"].T
    q = down[:, 96:]
    q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide["gamma1"]
    heads = (q @ wide["wuq"].T).view(5, 2, 64)
    query = torch.einsum("tnd,ndc->tnc", heads[..., :32], wide["wuk"])
    found = mla_preprocess_csrc(**call)[0].double()
    assert (found - query).abs().max() / query.abs().max() < 0.02


@pytest.mark.parametrize("cache_mode", ["kvcache", "krope_ctkv", "nzcache"])
def test_without_cos_and_sin_nothing_is_rotated(cache_mode: str) -> None:
    rotated = sample(cache_mode) | {
        "cos": torch.ones(5, 32).to(BF16),
        "sin": torch.zeros(5, 32).to(BF16),
    }
    plain = sample(cache_mode) | {"cos": None, "sin": None}
    for one, other in zip(
        mla_preprocess_csrc(**rotated), mla_preprocess_csrc(**plain), strict=True
    ):
        assert torch.equal(one, other)


def test_every_spelling_of_a_cache_is_the_same_memory() -> None:
    """Physical NZ, logical NZ with a head axis, ND without one, and blocks apart in a larger
    buffer.
    """
    physical = sample("nzcache")
    logical = sample("nzcache")
    for name, width in (("kv_cache", 64), ("kv_cache_rope", 32)):
        logical[name] = logical[name].view(3, 128, 1, width)
        logical["kv_cache_out0" if name == "kv_cache" else "kv_cache_out1"] = logical[name]
    for one, other in zip(
        mla_preprocess_csrc(**physical), mla_preprocess_csrc(**logical), strict=True
    ):
        assert torch.equal(one.flatten(), other.flatten())
    flat, apart = sample(), sample()
    for name, out in (("kv_cache", "kv_cache_out0"), ("kv_cache_rope", "kv_cache_out1")):
        flat[name] = flat[out] = flat[name].squeeze(2)
        strided = torch.stack((apart[name], apart[name]), 1)[:, 0]
        assert not strided.is_contiguous()
        apart[name] = apart[out] = strided
    for one, other in zip(mla_preprocess_csrc(**flat), mla_preprocess_csrc(**apart), strict=True):
        assert torch.equal(one.flatten(), other.flatten())


def test_minus_one_skips() -> None:
    call = sample() | {"slotmapping": torch.tensor([3, -1, 5, -1, 0], dtype=torch.int32)}
    before = call["kv_cache"].clone()
    kv = mla_preprocess_csrc(**call)[1]
    assert (kv != before).flatten(2).any(-1).flatten().nonzero().flatten().tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("cache_mode", "quant_mode", "dtype"), list(itertools.product(CACHES, QUANTS, (BF16, FP16)))
)
def test_check_takes_what_has_a_kernel(
    cache_mode: str, quant_mode: str, dtype: torch.dtype
) -> None:
    call = legal(cache_mode, quant_mode, dtype)
    if (cache_mode, quant_mode, dtype) in SUPPORTED:
        meta.check(OP, soc="A2", **call)
        inner = call | {"enable_inner_out": True}
        if dtype == BF16 and quant_mode != NO_QUANT:
            meta.check(OP, **inner)
        else:
            assert refused(inner).code == "inner_out.kernel"
    else:
        assert refused(call).code in ("quant_mode.kernel", "cache_mode.kernel")


STRIDED = torch.empty(2, 16, 1, 1024, dtype=BF16, device="meta")[..., ::2]
REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("required.hiddenState", {"hiddenState": None}),
    ("required.inner_out", {"inner_out": None}),
    ("argument.unknown", {"gamma0": sized(7168)}),
    ("type.enable_inner_out", {"enable_inner_out": 1}),
    ("type.cos", {"cos": "cos"}),
    ("quant_mode.unknown", {"quant_mode": "per_tensor"}),
    ("quant_mode.unknown", {"quant_mode": "per_token_quant_asymm"}),
    ("cache_mode.kernel", {"cache_mode": "int8_nzcache"}),
    ("dtype.hiddenState", {"hiddenState": sized(4, 7168, dtype=torch.float32)}),
    ("dtype.wdqkv", {"wdqkv": sized(2112, 7168)}),
    ("shape.wuq", {"wuq": sized(385, 1536, dtype=torch.int8)}),
    ("rank.wuk", {"wuk": sized(2, 32, 128, 16)}),
    ("required.beta1", {"beta1": None}),
    ("required.descale0", {"descale0": None}),
    ("required.bias1", {"bias1": None}),
    ("required.sin", {"sin": None}),
    ("required.cos", {"cos": None}),
    ("shape.cos", {"cos": sized(4, 32)}),
    ("dtype.slotmapping", {"slotmapping": sized(4, dtype=torch.int64)}),
    ("rank.kv_cache", {"kv_cache": sized(2, 16, 2, 512)}),
    ("shape.kv_cache", {"kv_cache": sized(2, 16, 1, 256)}),
    ("contiguous.kv_cache", {"kv_cache": STRIDED}),
    ("contiguous.q_out0", {"q_out0": sized(4, 512, 2).transpose(1, 2)}),
    ("shape.q_out0", {"q_out0": sized(4, 2, 576)}),
    ("shape.q_out1", {"q_out1": sized(4, 2, 16)}),
    ("shape.inner_out", {"inner_out": sized(4, 1535), "enable_inner_out": True}),
    ("shape.kv_cache_out0", {"kv_cache_out0": sized(3, 16, 1, 512)}),
    ("dtype.kv_cache_out1", {"kv_cache_out1": sized(2, 16, 1, 64, dtype=FP16)}),
    (
        "dims.r",
        {name: sized(2, 16, 1, 32) for name in ("kv_cache_rope", "kv_cache_out1")}
        | {"cos": None, "sin": None},
    ),
]


@pytest.mark.parametrize(("code", "change"), REFUSALS)
def test_refusals_have_stable_codes(code: str, change: dict[str, Any]) -> None:
    call = legal() | change
    if code == "dims.r":
        call |= {
            "wdqkv": sized(2080, 7168, dtype=torch.int8),
            "wuq": sized(320, 1536, dtype=torch.int8),
            "descale0": sized(2080, dtype=torch.float32),
            "descale1": sized(320, dtype=torch.float32),
            "bias0": sized(2080, dtype=torch.int32),
            "bias1": sized(320, dtype=torch.int32),
            "q_out1": sized(4, 2, 32),
        }
    error = refused(call)
    assert error.code == code and OP in str(error) and "vllm-ascend" in str(error)


def test_limits_of_the_device() -> None:
    for where, code in (({"soc": "A5"}, "soc"), ({"cann": "7.0"}, "cann")):
        with pytest.raises(meta.ContractError) as refusal:
            meta.check(OP, **where, **legal())
        assert refusal.value.code == code
    many = sample(dims=LEGAL | {"T": 1025, "BlockNum": 70})
    with pytest.raises(meta.ContractError, match=r"T 1\.\.1024"):
        meta.check(OP, **many)
    with pytest.raises(meta.ContractError) as refusal:
        meta.check(
            OP,
            values=True,
            **sample(dims=LEGAL) | {"slotmapping": torch.tensor([0, 0, 1, 2]).int()},
        )
    assert refusal.value.code == "values.slotmapping.duplicate"


def test_both_operators_have_a_name_and_the_order_of_their_schemas() -> None:
    assert meta.signature("mla_preprocess") == meta.signature("npu_mla_preprocess")
    call = sample()
    wanted = [result.clone() for result in mla_preprocess_csrc(**call)]
    scales = [
        call.get(f"{name}{stage}")
        for stage in "01"
        for name in ("quant_scale", "quant_offset", "bias")
    ]
    names = (
        "hiddenState wdqkv descale0 gamma1 beta1 wuq descale1 gamma2 cos sin wuk kv_cache "
        "kv_cache_rope slotmapping"
    )
    results = [
        call[name] for name in ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1", "inner_out")
    ]
    args = [
        *(call[name] for name in names.split()),
        *scales,
        None,
        None,
        "krope_ctkv",
        STATIC,
        False,
        *results,
    ]
    for one, other in zip(mla_preprocess_csrc(*args), wanted, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(meta.ContractError) as refusal:
        meta.bind(OP, tuple(args[:4]), {"gamma1": args[3]})
    assert refusal.value.code == "argument.unknown"
