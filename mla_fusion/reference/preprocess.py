"""ATB's MlaPreprocess on the CPU, with the roundings of `mla_preprocess_mix_bf16.cce`.

What sets it apart from MlaProlog: its own input RMSNorm with a bias, one concatenated
down-projection with columns ``[ckv | k_rope | q]``, a rounding to the activation dtype right after
every dequantisation, epsilon fixed at 1e-6, RoPE that rotates halves (weights de-interleaved
beforehand), an int32 slotmapping in which exactly -1 skips, and a static query scale per head that
multiplies while the cache scale divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta import preprocess as contract
from mla_fusion.meta.preprocess import EPSILON
from mla_fusion.reference import cache, quantize
from mla_fusion.reference.functional import kernel
from mla_fusion.reference.norm_rope import npu_rotary_mul
from mla_fusion.reference.numerics import matmul, rms_norm


@kernel(contract.ATB)
def mla_preprocess(given: Any) -> tuple[Tensor, ...]:
    """``(q_out0, kv_cache, q_out1, kv_cache_rope)``; writes both caches and returns them, as the
    ``.out`` form.

    Arguments as `torch_npu.atb.npu_mla_preprocess`: input [T, H], wdqkv [C+R+Q, H] and wuq
    [N*(D+R), Q] transposed (or their FRACTAL_NZ storage), wuk [N, D, C]. q_out0 is [T, N, C] (int8
    in int8_nzcache), q_out1 [T, N, R]; "kvcache" gives [T, N, C+R] and an empty q_out1. The torch
    form without ``out`` returns freshly allocated caches of which only the written rows are
    defined. Weights of the input's dtype switch RmsNormQuant off: the input is multiplied as it is,
    without norm, quantisation or descale, and the second norm adds no beta1 (the operation's own
    test, `test_mla_preprocess_aclnn.py`). Raises ContractError.
    """
    call = contract.Preprocess(vars(given))
    call.bind_tensors()
    call.check_slots()
    full, form, kind = call.full, call.form, given.input.dtype
    c, r, d, n, q = (call.dims[axis] for axis in "CRDNQ")
    if given.wdqkv.dtype == torch.int8:
        hidden, beta1_or_none = rms_norm_bias(given.input, given.gamma0, given.beta0), given.beta1
    else:  # what is not quantised is not normed either
        hidden, beta1_or_none = given.input.float(), None
    down = linear(full, hidden, "wdqkv", "0")
    ckv, k_rope, c_q = down.split((c, r, q), -1)
    q_norm = rms_norm_bias(c_q, given.gamma1, beta1_or_none)
    up = linear(full, q_norm, "wuq", "1")
    q_nope, q_rope = up.unflatten(-1, (n, d + r)).split((d, r), -1)
    # [N, D, C], of FRACTAL_NZ storage [N, C/16, D, 16] too
    wuk = given.wuk if given.wuk.dim() == 3 else given.wuk.transpose(1, 2).flatten(2)
    query = matmul(q_nope.transpose(0, 1), wuk).transpose(0, 1)
    q_rope = npu_rotary_mul(q_rope, given.cos.unsqueeze(1), given.sin.unsqueeze(1))
    k_rope = npu_rotary_mul(k_rope, given.cos, given.sin)
    wide = rms_norm(ckv, given.gamma2, EPSILON)
    latent = wide.to(kind)
    if form.kr is None:
        scatter(given.kv_cache, torch.cat((latent, k_rope), -1), given.slotmapping, nz=form.nz)
        return (
            torch.cat((query, q_rope), -1),
            given.kv_cache,
            given.input.new_empty(0),
            given.kv_cache_rope,
        )
    if form.int8:
        query = to_int8(query.float() * full["q_nope_scale"].float().unsqueeze(-1))
        latent = to_int8(wide * (1.0 / full["ctkv_scale"].float()))
    scatter(given.kv_cache, latent, given.slotmapping, nz=form.nz)
    scatter(given.kv_cache_rope, k_rope, given.slotmapping, nz=form.nz)
    return query.contiguous(), given.kv_cache, q_rope, given.kv_cache_rope


def rms_norm_bias(x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """``x * (1/sqrt(sum(x^2 * 1/n) + 1e-6)) * gamma + beta`` in float32, unrounded: times the
    reciprocal.
    """
    wide = x.float()
    mean_square = (wide.square() * (1.0 / x.shape[-1])).sum(-1, keepdim=True)
    normed = wide * (1.0 / (mean_square + EPSILON).sqrt()) * gamma.float()
    return normed if beta is None else normed + beta.float()


def linear(full: Mapping[str, Any], normed: Tensor, name: str, stage: str) -> Tensor:
    """Quantise, multiply by the weight [n, k] (or its FRACTAL_NZ storage [1, k/C0, n, C0])
    transposed, dequantise, and round to the input's dtype.

    Per tensor: ``int8(x * (1/scale) + offset)``, int32 bias, descale per channel. Per token:
    ``scale = max|x|/127``, descale per channel times scale. A weight of the activation dtype is
    multiplied as it is.
    """
    weight, channel, dtype = full[name], full[f"descale{stage}"], full["input"].dtype
    if weight.dim() == 4:
        weight = weight[0].transpose(0, 1).flatten(1)
    if weight.dtype != torch.int8:
        return matmul(normed.to(dtype), weight.t())
    if channel.dtype != torch.float32:  # of float16: int64 whose low 32 bits are the float32
        channel = channel.contiguous().view(torch.int32)[::2].contiguous().view(torch.float32)
    if full["quant_mode"] == contract.STATIC:
        scale, offset = full[f"quant_scale{stage}"].float(), full[f"quant_offset{stage}"].float()
        quantised = to_int8(normed * (1.0 / scale) + offset)
        total = quantize.int8_matmul(quantised, weight.t()) + full[f"bias{stage}"]
        return (total.float() * channel).to(dtype)
    scale = normed.abs().amax(-1, keepdim=True) / 127.0
    quantised = to_int8(normed * (1.0 / scale))
    return (quantize.int8_matmul(quantised, weight.t()).float() * channel * scale).to(dtype)


def to_int8(x: Tensor) -> Tensor:
    """float32 -> half (nearest) -> clamp [-128, 127] -> int8 (half to even); NaN of an all-zero
    row: 0.
    """
    return x.to(torch.float16).nan_to_num(nan=0.0).clamp(-128, 127).round().to(torch.int8)


def scatter(target: Tensor, rows: Tensor, slots: Tensor, *, nz: bool) -> None:
    """Row t to ``slots[t]`` of a cache [BlockNum, BlockSize, 1, W], or NZ [BlockNum, W/C0,
    BlockSize, C0]; -1 skips.
    """
    if nz:
        target = target.view(target.shape[0], target.shape[2], 1, -1)
    block, offset = cache.token_slots(slots.to(torch.int64), target.shape[1])
    cache.write_paged(target, block, offset, rows, nz=nz, argument="kv_cache")


def npu_mla_preprocess(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Results on copies of the caches. torch_npu returns fresh caches too, in which only the new
    rows are defined; here the other rows are those of the arguments.
    """
    call = meta.bind(contract.OP, args, options)
    caches = (name for name in contract.CACHES if isinstance(call.get(name), Tensor))
    copies = {name: call[name].clone() for name in caches}
    return mla_preprocess(**call | copies)


def npu_mla_preprocess_out(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Writes q_out0, q_out1 and the new rows of kv_cache_out0 and kv_cache_out1, usually the caches
    themselves.
    """
    outs = tuple(options.pop(name) for name in contract.RESULTS)
    q_out0, kv_out, q_out1, kr_out = outs
    call = meta.bind(contract.OP, args, options)
    query, _, query_rope, _ = mla_preprocess(
        **call | dict(zip(contract.CACHES, (kv_out, kr_out), strict=True))
    )
    q_out0.copy_(query)
    if query_rope.numel():
        q_out1.copy_(query_rope)
    return outs
