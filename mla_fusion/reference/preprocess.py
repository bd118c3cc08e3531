"""ATB's MlaPreprocess on the CPU, with the roundings of `mla_preprocess_mix_bf16.cce`.

It differs from MlaProlog by its own input RMSNorm with a bias, a concatenated
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
from mla_fusion.reference.functional import clones, kernel
from mla_fusion.reference.norm_rope import npu_rotary_mul
from mla_fusion.reference.numerics import matmul, rms_norm, rows_of_nz


@kernel(contract.ATB)
def mla_preprocess(inputs: Any) -> tuple[Tensor, ...]:
    """Returns ``(q_out0, kv_cache, q_out1, kv_cache_rope)``. It writes both caches, as the ``.out``
    form does.

    Arguments as `torch_npu.atb.npu_mla_preprocess`: input [T, H], wdqkv [C+R+Q, H] and wuq
    [N*(D+R), Q] transposed (or their FRACTAL_NZ storage), wuk [N, D, C]. q_out0 is [T, N, C] (int8
    in int8_nzcache), q_out1 [T, N, R]; "kvcache" gives [T, N, C+R] and an empty q_out1. The torch
    form without ``out`` returns freshly allocated caches of which only the written rows are
    defined. Weights of the input's dtype switch RmsNormQuant off: the input is multiplied as it is,
    without norm, quantisation or descale, and the second norm adds no beta1 (the operation's own
    test, `test_mla_preprocess_aclnn.py`). Raises ContractError.
    """
    call = contract.Preprocess(vars(inputs))
    call.bind_tensors()
    call.check_slots()
    full, form = call.full, call.form
    c, r, d, n, q = (call.dims[axis] for axis in "CRDNQ")
    hidden, beta1 = inputs.input.float(), None
    if inputs.wdqkv.dtype == torch.int8:
        hidden, beta1 = rms_norm_bias(inputs.input, inputs.gamma0, inputs.beta0), inputs.beta1
    ckv, k_rope, c_q = linear(full, hidden, "wdqkv", "0").split((c, r, q), -1)
    up = linear(full, rms_norm_bias(c_q, inputs.gamma1, beta1), "wuq", "1")
    q_nope, q_rope = up.unflatten(-1, (n, d + r)).split((d, r), -1)
    # [N, D, C], of FRACTAL_NZ storage [N, C/16, D, 16] too
    wuk = inputs.wuk if inputs.wuk.dim() == 3 else rows_of_nz(inputs.wuk)
    query = matmul(q_nope.transpose(0, 1), wuk).transpose(0, 1)
    q_rope = npu_rotary_mul(q_rope, inputs.cos.unsqueeze(1), inputs.sin.unsqueeze(1))
    k_rope = npu_rotary_mul(k_rope, inputs.cos, inputs.sin)
    normed = rms_norm(ckv, inputs.gamma2, EPSILON)
    latent = normed.to(inputs.input.dtype)
    if form.int8:
        query = to_int8(query.float() * inputs.q_nope_scale.float().unsqueeze(-1))
        latent = to_int8(normed * (1.0 / inputs.ctkv_scale.float()))
    if form.kr is None:
        query, latent = torch.cat((query, q_rope), -1), torch.cat((latent, k_rope), -1)
        q_rope = inputs.input.new_empty(0)
    else:
        scatter(inputs.kv_cache_rope, k_rope, inputs.slotmapping, form.nz)
    scatter(inputs.kv_cache, latent, inputs.slotmapping, form.nz)
    return query.contiguous(), inputs.kv_cache, q_rope, inputs.kv_cache_rope


def rms_norm_bias(x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Returns ``x * (1/sqrt(sum(x^2 * 1/n) + 1e-6)) * gamma + beta`` in float32, unrounded."""
    wide = x.float()
    mean_square = (wide.square() * (1.0 / x.shape[-1])).sum(-1, keepdim=True)
    normed = wide * (1.0 / (mean_square + EPSILON).sqrt()) * gamma.float()
    return normed if beta is None else normed + beta.float()


def linear(full: Mapping[str, Any], normed: Tensor, name: str, stage: str) -> Tensor:
    """Returns the quantised input times the transposed weight [n, k] (or its FRACTAL_NZ storage
    [1, k/C0, n, C0]), dequantised and rounded to the input's dtype.

    Per tensor: ``int8(x * (1/scale) + offset)``, int32 bias, descale per channel. Per token:
    ``scale = max|x|/127``, descale per channel times scale. A weight of the activation dtype is
    multiplied as it is.
    """
    weight, channel, dtype = full[name], full[f"descale{stage}"], full["input"].dtype
    if weight.dim() == 4:
        weight = rows_of_nz(weight[0])
    if weight.dtype != torch.int8:
        return matmul(normed.to(dtype), weight.t())
    if channel.dtype != torch.float32:  # of float16: int64 whose low 32 bits are the float32
        channel = channel.contiguous().view(torch.int32)[::2].contiguous().view(torch.float32)
    if full["quant_mode"] == contract.STATIC:
        scale, offset = full[f"quant_scale{stage}"].float(), full[f"quant_offset{stage}"].float()
        quantised = to_int8(normed * (1.0 / scale) + offset)
        total = quantize.int8_matmul(quantised, weight.t()) + full[f"bias{stage}"]
        return (total.float() * channel).to(dtype)
    scale = quantize.peak(normed) / 127.0
    quantised = to_int8(normed * (1.0 / scale))
    return (quantize.int8_matmul(quantised, weight.t()).float() * channel * scale).to(dtype)


def to_int8(x: Tensor) -> Tensor:
    """Returns float32 -> half (nearest) -> int8 (half to even), saturated; NaN of an all-zero row
    becomes 0.
    """
    return quantize.to_int8(x.to(torch.float16))


def scatter(target: Tensor, rows: Tensor, slots: Tensor, is_nz: bool) -> None:
    """Writes row t to ``slots[t]`` of a cache [BlockNum, BlockSize, 1, W], or NZ [BlockNum, W/C0,
    BlockSize, C0]. Slot -1 skips the row.
    """
    mode = "PA_BSND"
    if is_nz:
        mode, target = "PA_NZ", target.view(target.shape[0], target.shape[2], 1, -1)
    cache.write(target, rows, mode, slots.shape, slots.to(torch.int64), None, "kv_cache")


def npu_mla_preprocess(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Returns the results on copies of the caches.

    torch_npu returns fresh caches too, in which only the new rows are defined. Here the other rows
    are those of the arguments.
    """
    arguments = meta.bind(contract.OP, args, options)
    return mla_preprocess(**arguments | clones(arguments, contract.CACHES))


def npu_mla_preprocess_out(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Writes q_out0, q_out1 and the new rows of kv_cache_out0 and kv_cache_out1, usually the caches
    themselves, and returns these four.
    """
    outs = tuple(options.pop(name) for name in contract.RESULTS)
    arguments = meta.bind(contract.OP, args, options)
    caches = dict(zip(contract.CACHES, outs[1::2], strict=True))
    results = mla_preprocess(**arguments | caches)
    for out, result in zip(outs[::2], results[::2], strict=True):
        if result.numel():
            out.copy_(result)
    return outs
