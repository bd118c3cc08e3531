"""ATB mla_preprocess against a float64 formula: its roundings, cache modes and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_fusion import meta
from mla_fusion.reference import mla_preprocess
from tests.samples import LEGAL_PREPROCESS as FULL
from tests.samples import SMALL_PREPROCESS as SMALL
from tests.samples import sample_preprocess

OP = "mla_preprocess"
BF16, FP16 = torch.bfloat16, torch.float16
CACHES = {"kvcache": 16, "krope_ctkv": 16, "int8_nzcache": 128, "nzcache": 128}


def sample(
    cache_mode: str = "krope_ctkv",
    quant_mode: str = "per_token_quant_symm",
    dtype: torch.dtype = BF16,
    **options: Any,
) -> dict[str, Any]:
    return sample_preprocess(cache_mode=cache_mode, quant_mode=quant_mode, dtype=dtype, **options)


def formula(call: dict[str, Any], dims: dict[str, int] = SMALL) -> dict[str, torch.Tensor]:
    """The operation in float64 with the quantisation errors left in: only integers are rounded."""
    wide = {k: v.double() for k, v in call.items() if isinstance(v, torch.Tensor)}
    for name in ("descale0", "descale1"):
        if call[name].dtype == torch.int64:
            wide[name] = call[name].to(torch.int32).view(torch.float32).double()
    static = call["quant_mode"].startswith("per_tensor")

    def norm(x: torch.Tensor, gamma: torch.Tensor, beta: float | torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gamma + beta

    def project(x: torch.Tensor, weight: str, stage: str) -> torch.Tensor:
        if static:
            x = (
                (x / wide["quant_scale" + stage] + wide["quant_offset" + stage])
                .round()
                .clamp(-128, 127)
            )
            return (x @ wide[weight].T + wide["bias" + stage]) * wide["descale" + stage]
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() @ wide[weight].T * wide["descale" + stage] * scale

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        for i in range(half):
            out[..., i] = x[..., i] * cos[..., i] - x[..., half + i] * sin[..., i]
            out[..., half + i] = (
                x[..., half + i] * cos[..., half + i] + x[..., i] * sin[..., half + i]
            )
        return out

    c, r, d, n = dims["C"], dims["R"], dims["D"], dims["N"]
    down = project(norm(wide["input"], wide["gamma0"], wide["beta0"]), "wdqkv", "0")
    ckv, kr, q = down[:, :c], down[:, c : c + r], down[:, c + r :]
    up = project(norm(q, wide["gamma1"], wide["beta1"]), "wuq", "1").view(-1, n, d + r)
    query = torch.einsum("tnd,ndc->tnc", up[..., :d], wide["wuk"])
    cos, sin = wide["cos"], wide["sin"]
    return {
        "query": query,
        "query_rope": rope(up[..., d:], cos[:, None], sin[:, None]),
        "latent": norm(ckv, wide["gamma2"], 0.0),
        "key_rope": rope(kr, cos, sin),
    }


def rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Written rows of an ND cache [B, bs, 1, W] or an NZ one [B, W/C0, bs, C0]."""
    nd = cache if cache.shape[2] == 1 else cache.permute(0, 2, 1, 3)
    return nd.reshape(nd.shape[0] * nd.shape[1], -1)[slots.long()]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 0.02, error


@pytest.mark.parametrize("cache_mode", CACHES)
@pytest.mark.parametrize("quant_mode", ["per_token_quant_symm", "per_tensor_quant_asymm"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_cache_and_quant_mode(cache_mode: str, quant_mode: str, dtype: torch.dtype) -> None:
    call = sample(cache_mode, quant_mode, dtype)
    wanted, before = formula(call), {k: call[k].clone() for k in ("kv_cache", "kv_cache_rope")}
    q0, kv, q1, kr = mla_preprocess(**call)
    slots = call["slotmapping"]
    assert kv is call["kv_cache"] and kr is call["kv_cache_rope"]
    if cache_mode == "kvcache":
        close(q0, torch.cat((wanted["query"], wanted["query_rope"]), -1))
        close(rows(kv, slots), torch.cat((wanted["latent"], wanted["key_rope"]), -1))
        assert q1.numel() == 0
        return
    close(q1, wanted["query_rope"])
    close(rows(kr, slots), wanted["key_rope"])
    if cache_mode == "int8_nzcache":
        scaled = wanted["query"] * call["q_nope_scale"].double().unsqueeze(-1)
        assert (q0.double() - scaled.round().clamp(-128, 127)).abs().max() <= 2
        latent = (wanted["latent"] / call["ctkv_scale"].double()).round().clamp(-128, 127)
        assert q0.dtype == torch.int8 and (rows(kv, slots).double() - latent).abs().max() <= 2
    else:
        close(q0, wanted["query"])
        close(rows(kv, slots), wanted["latent"])
    block = CACHES[cache_mode]
    others = torch.tensor([s for s in range(SMALL["BlockNum"] * block) if s not in slots.tolist()])
    assert torch.equal(rows(kv, others), rows(before["kv_cache"], others))
    assert torch.equal(rows(kr, others), rows(before["kv_cache_rope"], others))


def test_unquantised_weights_switch_both_rms_norm_quants_off() -> None:
    """The input is multiplied as it is, and the second norm adds no beta1: what the operation's own
    test expects.
    """
    call = sample(weight=BF16)
    q0, _, q1, _ = mla_preprocess(**call)
    down = call["input"] @ call["wdqkv"].T
    q = down[:, 96:].double()
    q_norm = (q / (q.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * call["gamma1"]).to(BF16)
    up = (q_norm @ call["wuq"].T).view(-1, 2, 64)
    close(q0, torch.einsum("tnd,ndc->tnc", up[..., :32].double(), call["wuk"].double()))
    low, high = up[..., 32:].double().chunk(2, -1)
    turned = torch.cat((-high, low), -1) * call["sin"][:, None]
    close(q1, up[..., 32:].double() * call["cos"][:, None] + turned)
    other = call | {
        "gamma0": call["gamma0"] * 3,
        "beta0": call["beta0"] + 1,
        "beta1": call["beta1"] + 1,
    }
    assert torch.equal(mla_preprocess(**other)[0], q0)


def test_minus_one_skips_and_other_slots_are_refused() -> None:
    call = sample()
    call["slotmapping"] = torch.tensor([3, -1, 5, -1, 0], dtype=torch.int32)
    before = call["kv_cache"].clone()
    _, kv, _, _ = mla_preprocess(**call)
    changed = (kv != before).flatten(2).any(-1).flatten().nonzero().flatten()
    assert changed.tolist() == [0, 3, 5]
    for bad, code in ((-2, "range"), (48, "range"), (0, "duplicate")):
        slots = torch.tensor([3, bad, 5, -1, 0], dtype=torch.int32)
        with pytest.raises(meta.ContractError) as refusal:
            mla_preprocess(**call | {"slotmapping": slots})
        assert refusal.value.code == f"values.slotmapping.{code}"


def test_fractal_nz_weights_are_the_same_weights() -> None:
    call = sample()
    plain = mla_preprocess(**call | {"kv_cache": call["kv_cache"].clone()})
    stored = dict(call)
    for name, c0 in (("wdqkv", 32), ("wuq", 32)):
        n, k = call[name].shape
        stored[name] = call[name].view(n, k // c0, c0).transpose(0, 1).contiguous()[None]
    n, d, c = call["wuk"].shape
    stored["wuk"] = call["wuk"].view(n, d, c // 16, 16).transpose(1, 2).contiguous()
    for a, b in zip(mla_preprocess(**stored), plain, strict=True):
        assert torch.equal(a, b)


def legal(
    cache_mode: str = "krope_ctkv", quant_mode: str = "per_tensor_quant_asymm"
) -> dict[str, Any]:
    call = sample(cache_mode, quant_mode, dims=FULL)
    return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}


CALL = legal()


def sized(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def test_values_cannot_be_read_off_a_meta_tensor() -> None:
    with pytest.raises(meta.ContractError) as refusal:
        meta.check(OP, values=True, **CALL)
    assert refusal.value.code == "values.meta"


def on_cuda(*sizes: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(sizes, dtype=BF16, device="cuda")


NO_HEADS = {"descale1": sized(0, dtype=torch.float32), "quant_mode": "per_token_quant_symm"}


def other_hidden(
    quant_mode: str, h: int = 2048, weight: torch.dtype = torch.int8
) -> dict[str, Any]:
    """What differs in a call of another hidden size, or with weights of another dtype."""
    shapes = {"input": sized(4, h), "gamma0": sized(h), "beta0": sized(h), "quant_mode": quant_mode}
    return shapes | {"wdqkv": sized(2112, h, dtype=weight), "wuq": sized(384, 1536, dtype=weight)}


def test_only_static_quantisation_takes_other_hidden_sizes_and_unquantised_weights() -> None:
    static, dynamic = "per_tensor_quant_asymm", "per_token_quant_symm"
    meta.check(OP, **legal() | other_hidden(static))
    meta.check(OP, **legal() | other_hidden(static, 7168, BF16))
    for change in (other_hidden(dynamic), other_hidden(dynamic, 7168, BF16)):
        with pytest.raises(meta.ContractError) as refusal:
            meta.check(OP, **legal() | change)
        assert refusal.value.code == "quant_mode.kernel"


REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("required.input", {"input": None}),
    ("argument.unknown", {"epsilon": 1e-6}),
    ("type.input", {"input": [1.0]}),
    ("dtype.input", {"input": sized(4, 7168, dtype=torch.float32)}),
    ("shape.gamma0", {"gamma0": sized(7167)}),
    ("shape.wdqkv", {"wdqkv": sized(2111, 7168, dtype=torch.int8)}),
    ("shape.wdqkv", {"wdqkv": sized(1, 224, 2112, 16, dtype=torch.int8)}),
    ("dtype.wuq", {"wuq": sized(384, 1536, dtype=torch.int32)}),
    ("dtype.descale0", {"descale0": sized(2112, dtype=torch.int64)}),
    ("required.quant_scale0", {"quant_scale0": None}),
    ("required.bias1", {"bias1": sized(0, dtype=torch.int32)}),
    ("dtype.slotmapping", {"slotmapping": sized(4, dtype=torch.int64)}),
    ("shape.slotmapping", {"slotmapping": sized(5, dtype=torch.int32)}),
    ("shape.cos", {"cos": sized(3, 64)}),
    ("cache_mode.unknown", {"cache_mode": "PA_BSND"}),
    ("quant_mode.unknown", {"quant_mode": 0}),
    ("dtype.kv_cache", {"kv_cache": sized(2, 16, 1, 512, dtype=torch.int8)}),
    ("rank.kv_cache_rope", {"kv_cache_rope": sized(0)}),
    ("contiguous.kv_cache", {"kv_cache": sized(2, 16, 1, 1024)[..., ::2]}),
    ("device.gamma0", {"input": torch.zeros(4, 7168, dtype=BF16), "gamma0": on_cuda(7168)}),
    ("type.cos", {"cos": torch.zeros(4, 64, dtype=BF16).to_sparse()}),
    ("dims.n", {"wuk": sized(0, 128, 512), "wuq": sized(0, 1536, dtype=torch.int8), **NO_HEADS}),
    ("dims.blocksize", {"kv_cache": sized(2, 144, 1, 512), "kv_cache_rope": sized(2, 144, 1, 64)}),
]


@pytest.mark.parametrize(("code", "change"), REFUSALS)
def test_refusals_have_stable_codes(code: str, change: dict[str, Any]) -> None:
    with pytest.raises(meta.ContractError) as refusal:
        meta.check(OP, **legal() | change)
    assert refusal.value.code == code and OP in str(refusal.value)


def test_limits_of_the_device() -> None:
    small = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in sample().items()}
    for where, call, code in (
        ({"soc": "A5"}, legal(), "soc"),
        ({"cann": "7.0"}, legal(), "cann"),
        ({}, small, "dims.q"),
        ({}, small | {"cache_mode": "int8_nzcache"}, "required.ctkv_scale"),
        (
            {},
            legal() | {"kv_cache": sized(2, 16, 1, 576), "cache_mode": "kvcache"},
            "cache_mode.torch",
        ),
    ):
        with pytest.raises(meta.ContractError) as refusal:
            meta.check(OP, **where, **call)
        assert refusal.value.code == code
    many = sample(dims=FULL | {"T": 1025, "BlockNum": 70})
    with pytest.raises(meta.ContractError, match=r"T 1\.\.1024"):
        meta.check(OP, **many)
