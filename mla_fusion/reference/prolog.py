"""CPU kernels of the MLA prologues. They round as the A2/A3 kernel does, and as the A5 kernel for
its own formats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.prolog import V1, V2, V3, Operator
from mla_fusion.reference import cache
from mla_fusion.reference.formats import format_of
from mla_fusion.reference.functional import kernel, on_copies
from mla_fusion.reference.numerics import (
    interleave_rope,
    matmul,
    nz_weight_to_nd,
    rms_norm,
    working_dtype,
)
from mla_fusion.reference.quantize import tile_row, to_int8


def projection(
    form: Any, x: Tensor, weight: Tensor, token_scale: Any, channel_scale: Tensor | None
) -> Tensor:
    """Returns ``x W``, rounded to the activation dtype, or dequantised and unrounded.

    `service_matmul_arch22.h`; int8 products are exact int32 sums, scaled per token, then per
    channel (not on A5).
    """
    if channel_scale is None:
        return matmul(x, nz_weight_to_nd(weight))
    return form.product(x, nz_weight_to_nd(weight), token_scale, channel_scale)


@kernel(V3)
def npu_mla_prolog_v3(call: Any) -> tuple[Tensor, ...]:
    """Writes both caches and returns ``(query, query_rope, dequant_scale_q_nope, query_norm,
    dequant_scale_q_norm)``.

    Arguments as `torch_npu.npu_mla_prolog_v3`. Leading dims ``lead`` are ``[T]`` or ``[B, S]``, as
    token_x has them: query ``lead + [N, Hckv]``, query_rope ``lead + [N, Dr]``, query_norm ``lead +
    [Hcq]``, dequant_scale_q_nope ``[T, N, 1]``, dequant_scale_q_norm ``[T, 1]``; outputs the call
    does not ask for have shape ``[0]``, as torch_npu gives them from CANN 8.5 on. The kernel writes
    only the rows that cache_index names.

    The kernel takes float32 and float64 tensors too, and then rounds nothing to bfloat16 (the NPU
    takes bfloat16). It takes sizes outside the operator's published tables. Shapes that disagree
    raise ContractError. int8 rounds as on A2 and A3, inside ``reference.chip("A5")`` as on A5.
    """
    meta.check_structure(V3.name, vars(call))
    lead, activation = call.token_x.shape[:-1], call.rmsnorm_gamma_cq.dtype
    n, d, hckv = call.weight_uk.shape
    dr = call.rope_sin.shape[-1]
    x, sin, cos = (t.flatten(0, -2) for t in (call.token_x, call.rope_sin, call.rope_cos))
    work = working_dtype(activation)
    form: Any = format_of(call.weight_quant_mode)  # None without quantisation

    cq = projection(form, x, call.weight_dq, call.dequant_scale_x, call.dequant_scale_w_dq)
    # its rounding is the query_norm of the unquantised kernel (`service_rms_norm_arch22.h`)
    normed = rms_norm(cq, call.rmsnorm_gamma_cq, call.rmsnorm_epsilon_cq, call.qc_qr_scale)
    c_q, scale_c_q = normed.to(activation), torch.empty(0, dtype=torch.float32)
    if form is not None:
        # query_norm is smoothed too (`service_rms_norm_arch22.h`)
        smooth = call.smooth_scales_cq
        smoothed = normed if smooth is None else normed * smooth.to(normed.dtype)
        c_q, scale_c_q = form.dynamic_quant(smoothed)
    heads = projection(form, c_q, call.weight_uq_qr, scale_c_q, call.dequant_scale_w_uq_qr)
    # columns run per head [D nope | Dr rope]
    q_nope, q_pe = heads.unflatten(-1, (n, d + dr)).split((d, dr), -1)
    # a dequantised q_nope is rounded before the product, a dequantised q_pe enters unrounded
    # (`service_rotary_position_embedding`)
    query = matmul(q_nope.to(call.weight_uk.dtype).transpose(0, 1), call.weight_uk).transpose(0, 1)
    query_rope = interleave_rope(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), activation)
    dequant_scale_q_nope = torch.empty(0, dtype=torch.float32)

    dkv_kr = call.weight_dkv_kr, call.dequant_scale_x, call.dequant_scale_w_dkv_kr
    ckv, kr = projection(form, x, *dkv_kr).split((hckv, dr), -1)
    ckv = rms_norm(ckv, call.rmsnorm_gamma_ckv, call.rmsnorm_epsilon_ckv, call.kc_scale)
    kr = interleave_rope(kr, cos, sin, activation)
    if call.kv_cache_quant_mode == 0:
        ckv = ckv.to(activation)
    elif call.kv_cache_quant_mode == 1:
        # the kernel reads the first float of a [1, Hckv] tensor
        cache_scale = call.quant_scale_ckv.reshape(-1)[0].to(work)
        query, dequant_scale_q_nope = form.quant_query(query.to(work))
        # Attention multiplies the whole score by dequant_scale_q_nope / quant_scale_ckv, so the
        # rope part is brought to the same scale (`service_dynamic_quant_qn_mul_qr_arch22.h`).
        factor = cache_scale / dequant_scale_q_nope.to(work)
        query_rope = (query_rope.to(work) * factor).to(activation)
        ckv = form.round(ckv * cache_scale)
    elif call.kv_cache_quant_mode == 2:
        ckv = to_int8(ckv * call.quant_scale_ckv.to(work))
        kr = to_int8(kr.to(work) * call.quant_scale_ckr.to(work))
    else:
        # a row in bytes: quantised latent, rope, fp32 scales
        codes, scale = form.per_tile(ckv, call.k_nope_clip_alpha, call.tile_size)
        ckv = tile_row(codes.view(torch.int8), kr, scale).view(codes.dtype)
    where = call.cache_mode, lead, call.cache_index, call.actual_seq_len
    cache.write(call.kv_cache, ckv, *where, "kv_cache")
    cache.write(call.kr_cache, kr, *where, "kr_cache")

    return (
        query.contiguous().view(*lead, n, hckv),
        query_rope.view(*lead, n, dr),
        dequant_scale_q_nope,
        c_q.view(*lead, c_q.shape[-1]) if call.query_norm_flag else c_q.new_empty(0),
        scale_c_q if call.query_norm_flag else scale_c_q.new_empty(0),
    )


npu_mla_prolog_v3_functional = on_copies(V3, npu_mla_prolog_v3)


# v1 and v2: v3's arithmetic, the scenario read off the dtypes, older results. Both schemas are
# pure, yet the device writes the caches in place (v2 even returns the very same tensors). Here the
# inputs are written too and the results are copies of them: what a pure schema returns may not
# share memory with its arguments, and a caller reading either sees the updated cache.


@kernel(V1)
def npu_mla_prolog(call: Any) -> tuple[Tensor, ...]:
    """Returns ``(query, query_rope, kv_cache, kr_cache)``; arguments as
    `torch_npu.npu_mla_prolog`.
    """
    return _prolog(V1, call)[:4]


@kernel(V2)
def npu_mla_prolog_v2(call: Any) -> tuple[Tensor, ...]:
    """Returns ``(query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope)``. The last is
    ``[1]`` when absent.
    """
    return _prolog(V2, call)


def _prolog(operator: Operator, call: Any) -> tuple[Tensor, ...]:
    meta.check_structure(operator.name, vars(call))
    wq, kv = meta.implied_quant_modes(vars(call))
    query, query_rope, scale, _, _ = npu_mla_prolog_v3(
        **vars(call), weight_quant_mode=wq, kv_cache_quant_mode=kv, query_quant_mode=int(kv == 1)
    )
    if kv != 1:
        scale = torch.zeros(1, dtype=torch.float32)
    return query, query_rope, call.kv_cache.clone(), call.kr_cache.clone(), scale
