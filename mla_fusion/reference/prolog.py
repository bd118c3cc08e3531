"""The MLA prologue v3 on the CPU: roundings of the A2/A3 kernel, and of the A5 kernel for its own
formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion import meta
from mla_fusion.meta.prolog import V3
from mla_fusion.reference import cache, steps
from mla_fusion.reference.chips import current_chip
from mla_fusion.reference.formats import format_of
from mla_fusion.reference.functional import on_copies
from mla_fusion.reference.numerics import nz_weight_to_nd, rms_norm


def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor | None = None,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    actual_seq_len: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    arguments = dict(locals())
    meta.check_structure("npu_mla_prolog_v3", arguments)
    lead, activation = token_x.shape[:-1], rmsnorm_gamma_cq.dtype
    n, d, hckv = weight_uk.shape
    dr = rope_sin.shape[-1]
    x = token_x.reshape(-1, token_x.shape[-1])
    sin, cos = rope_sin.reshape(-1, dr), rope_cos.reshape(-1, dr)
    w_dq, w_uq_qr, w_dkv_kr = map(nz_weight_to_nd, (weight_dq, weight_uq_qr, weight_dkv_kr))
    absent = torch.empty(0, dtype=torch.float32)
    form = format_of(weight_quant_mode, current_chip())

    cq = steps.projection(form, x, w_dq, dequant_scale_x, dequant_scale_w_dq)
    # its rounding is the query_norm of the unquantised kernel (`service_rms_norm_arch22.h`)
    normed = rms_norm(cq, rmsnorm_gamma_cq, float(rmsnorm_epsilon_cq), float(qc_qr_scale))
    if form is None:
        c_q, scale_c_q = normed.to(activation), torch.empty(0, dtype=torch.float32)
    else:
        c_q, scale_c_q = steps.dynamic_quant_cq(form, normed, smooth_scales_cq)
    q_nope, q_pe = steps.matmul_qc_qr(form, c_q, w_uq_qr, scale_c_q, dequant_scale_w_uq_qr, d, dr)
    query = steps.matmul_qn(q_nope, weight_uk)
    query_rope = steps.rope_qr(q_pe, cos, sin, activation)
    dequant_scale_q_nope = absent
    if kv_cache_quant_mode == 1:
        assert form is not None and quant_scale_ckv is not None
        query, dequant_scale_q_nope = steps.quant_query(form, query)
        query_rope = steps.mul_qr(query_rope, quant_scale_ckv, dequant_scale_q_nope)

    both = steps.projection(form, x, w_dkv_kr, dequant_scale_x, dequant_scale_w_dkv_kr)
    ckv, kr = both.split((hckv, dr), -1)
    ckv = rms_norm(ckv, rmsnorm_gamma_ckv, float(rmsnorm_epsilon_ckv), float(kc_scale))
    kr = steps.rope_qr(kr.unsqueeze(1), cos, sin, activation).squeeze(1)
    if kv_cache_quant_mode == 0:
        ckv = ckv.to(activation)
    elif kv_cache_quant_mode == 1:
        assert form is not None and quant_scale_ckv is not None
        ckv = steps.quant_ckv_per_tensor(form, ckv, quant_scale_ckv)
    elif kv_cache_quant_mode == 2:
        assert quant_scale_ckv is not None and quant_scale_ckr is not None
        ckv, kr = (
            steps.quant_per_channel(ckv, quant_scale_ckv),
            steps.quant_per_channel(kr, quant_scale_ckr),
        )
    else:
        assert form is not None
        ckv = steps.quant_ckv_per_tile(form, ckv, kr, k_nope_clip_alpha, tile_size)
    cache.write(kv_cache, ckv, cache_mode, lead, cache_index, actual_seq_len, "kv_cache")
    cache.write(kr_cache, kr, cache_mode, lead, cache_index, actual_seq_len, "kr_cache")

    return (
        query.contiguous().view(*lead, n, hckv),
        query_rope.view(*lead, n, dr),
        dequant_scale_q_nope,
        c_q.view(*lead, c_q.shape[-1]) if query_norm_flag else absent.to(c_q.dtype, copy=True),
        scale_c_q if query_norm_flag else absent.to(scale_c_q.dtype, copy=True),
    )


npu_mla_prolog_v3_functional = on_copies(V3, npu_mla_prolog_v3)
