"""The MLA prologue v3 on the CPU: roundings of the A2/A3 kernel, and of the A5 kernel for its own
formats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.prolog import V3
from mla_fusion.reference import cache, steps
from mla_fusion.reference.chips import current_chip
from mla_fusion.reference.formats import format_of
from mla_fusion.reference.functional import kernel, on_copies
from mla_fusion.reference.numerics import nz_weight_to_nd, rms_norm


@kernel(V3)
def npu_mla_prolog_v3(call: Any) -> tuple[Tensor, ...]:
    """``(query, query_rope, dequant_scale_q_nope, query_norm, dequant_scale_q_norm)``; writes both
    caches.

    Arguments as `torch_npu.npu_mla_prolog_v3`. Leading dims ``lead`` are ``[T]`` or ``[B, S]``, as
    token_x has them: query ``lead + [N, Hckv]``, query_rope ``lead + [N, Dr]``, query_norm ``lead +
    [Hcq]``, dequant_scale_q_nope ``[T, N, 1]``, dequant_scale_q_norm ``[T, 1]``; outputs the call
    does not ask for have shape ``[0]``, as torch_npu gives them from CANN 8.5 on. Only rows named
    by cache_index are written.

    float32 and float64 tensors are taken too and computed without bfloat16 rounding (the NPU takes
    bfloat16). Sizes outside the operator's published tables are computed as well; shapes that
    disagree raise ContractError. int8 rounds as on A2 and A3, inside ``reference.chip("A5")`` as on
    A5.
    """
    meta.check_structure(V3.name, vars(call))
    lead, activation = call.token_x.shape[:-1], call.rmsnorm_gamma_cq.dtype
    n, d, hckv = call.weight_uk.shape
    dr = call.rope_sin.shape[-1]
    x = call.token_x.reshape(-1, call.token_x.shape[-1])
    sin, cos = call.rope_sin.reshape(-1, dr), call.rope_cos.reshape(-1, dr)
    w_dq, w_uq_qr, w_dkv_kr = map(
        nz_weight_to_nd, (call.weight_dq, call.weight_uq_qr, call.weight_dkv_kr)
    )
    absent = torch.empty(0, dtype=torch.float32)
    form = format_of(call.weight_quant_mode, current_chip())

    cq = steps.projection(form, x, w_dq, call.dequant_scale_x, call.dequant_scale_w_dq)
    # its rounding is the query_norm of the unquantised kernel (`service_rms_norm_arch22.h`)
    normed = rms_norm(
        cq, call.rmsnorm_gamma_cq, float(call.rmsnorm_epsilon_cq), float(call.qc_qr_scale)
    )
    if form is None:
        c_q, scale_c_q = normed.to(activation), torch.empty(0, dtype=torch.float32)
    else:
        c_q, scale_c_q = steps.dynamic_quant_cq(form, normed, call.smooth_scales_cq)
    q_nope, q_pe = steps.matmul_qc_qr(
        form, c_q, w_uq_qr, scale_c_q, call.dequant_scale_w_uq_qr, d, dr
    )
    query = steps.matmul_qn(q_nope, call.weight_uk)
    query_rope = steps.rope_qr(q_pe, cos, sin, activation)
    dequant_scale_q_nope = absent
    if call.kv_cache_quant_mode == 1:
        assert form is not None
        query, dequant_scale_q_nope = steps.quant_query(form, query)
        query_rope = steps.mul_qr(query_rope, call.quant_scale_ckv, dequant_scale_q_nope)

    both = steps.projection(form, x, w_dkv_kr, call.dequant_scale_x, call.dequant_scale_w_dkv_kr)
    ckv, kr = both.split((hckv, dr), -1)
    ckv = rms_norm(
        ckv, call.rmsnorm_gamma_ckv, float(call.rmsnorm_epsilon_ckv), float(call.kc_scale)
    )
    kr = steps.rope_qr(kr.unsqueeze(1), cos, sin, activation).squeeze(1)
    if call.kv_cache_quant_mode == 0:
        ckv = ckv.to(activation)
    elif call.kv_cache_quant_mode == 1:
        assert form is not None
        ckv = steps.quant_ckv_per_tensor(form, ckv, call.quant_scale_ckv)
    elif call.kv_cache_quant_mode == 2:
        ckv, kr = (
            steps.quant_per_channel(ckv, call.quant_scale_ckv),
            steps.quant_per_channel(kr, call.quant_scale_ckr),
        )
    else:
        assert form is not None
        ckv = steps.quant_ckv_per_tile(form, ckv, kr, call.k_nope_clip_alpha, call.tile_size)
    where = call.cache_mode, lead, call.cache_index, call.actual_seq_len
    cache.write(call.kv_cache, ckv, *where, "kv_cache")
    cache.write(call.kr_cache, kr, *where, "kr_cache")

    return (
        query.contiguous().view(*lead, n, hckv),
        query_rope.view(*lead, n, dr),
        dequant_scale_q_nope,
        c_q.view(*lead, c_q.shape[-1]) if call.query_norm_flag else absent.to(c_q.dtype, copy=True),
        scale_c_q if call.query_norm_flag else absent.to(scale_c_q.dtype, copy=True),
    )


npu_mla_prolog_v3_functional = on_copies(V3, npu_mla_prolog_v3)
