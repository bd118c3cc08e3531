"""The MLA prologue, one function per step of the operator document.

Shapes: T tokens, He hidden, Hcq query rank, Hckv KV rank, N heads, D nope dim, Dr rope dim. ``activation`` is
the bfloat16 of the device (or float32/float64 in a validation run); "work" is float32 (float64).
Kernel sources named in the docstrings are those of the A2/A3 kernel (`mla_prolog/op_kernel/arch22`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.reference import quantize
from mla_fusion.reference.numerics import interleave_rope, matmul, rms_norm, working_dtype


def matmul_cq(
    token_x: Tensor, weight_dq: Tensor, dequant_scale_x: Tensor | None, dequant_scale_w_dq: Tensor | None
) -> Tensor:
    """``x W_dq -> [T, Hcq]``: activation dtype; work dtype, unrounded, when int8
    (`service_matmul_arch22.h`).
    """
    return _projection(token_x, weight_dq, dequant_scale_x, dequant_scale_w_dq)


def rms_norm_cq(cq: Tensor, gamma: Tensor, epsilon: float, qc_qr_scale: float) -> Tensor:
    """``qc_qr_scale * RMSNorm(cq)``, work dtype; its bfloat16 rounding is query_norm
    (`service_rms_norm_arch22.h`).
    """
    return rms_norm(cq, gamma, epsilon, qc_qr_scale)


def dynamic_quant_cq(normed: Tensor, smooth_scales_cq: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(int8 [T, Hcq], scale [T, 1])`` per token: ``v = c_q*smooth; q = v*(127/max|v|)``.

    The int8 tensor is the query_norm output, the scale dequant_scale_q_norm (`service_rms_norm_arch22.h`).
    """
    smoothed = normed if smooth_scales_cq is None else normed * smooth_scales_cq.to(normed.dtype)
    quantised, scale = quantize.dynamic_scale(smoothed)
    return quantize.to_int8(quantised), scale.float()


def matmul_qc_qr(
    c_q: Tensor,
    weight_uq_qr: Tensor,
    scale_token: Tensor | None,
    scale_channel: Tensor | None,
    d: int,
    dr: int,
) -> tuple[Tensor, Tensor]:
    """``c_q W_uq_qr -> q_nope [T, N, D], q_pe [T, N, Dr]``; columns run per head ``[D nope | Dr rope]``."""
    heads = _projection(c_q, weight_uq_qr, scale_token, scale_channel)
    return heads.unflatten(-1, (heads.shape[-1] // (d + dr), d + dr)).split((d, dr), -1)


def matmul_qn(q_nope: Tensor, weight_uk: Tensor) -> Tensor:
    """``query[:, n] = q_nope[:, n] W_uk[n] -> [T, N, Hckv]``; a dequantised q_nope is rounded before it."""
    return matmul(q_nope.to(weight_uk.dtype).transpose(0, 1), weight_uk).transpose(0, 1)


def rope_qr(q_pe: Tensor, rope_cos: Tensor, rope_sin: Tensor, activation: torch.dtype) -> Tensor:
    """RoPE of every head, ``[T, N, Dr]``; a dequantised q_pe enters unrounded
    (`service_rotary_position_embedding`).
    """
    return interleave_rope(q_pe, rope_cos.unsqueeze(1), rope_sin.unsqueeze(1), activation)


def quant_query(query: Tensor) -> tuple[Tensor, Tensor]:
    """int8 query and its scale ``[T, N, 1]`` per token and head
    (`service_dynamic_quant_qn_mul_qr_arch22.h`).
    """
    quantised, scale = quantize.dynamic_scale(query.to(working_dtype(query.dtype)))
    return quantize.to_int8_through_half(quantised), scale.float()


def mul_qr(query_rope: Tensor, quant_scale_ckv: Tensor, dequant_scale_q_nope: Tensor) -> Tensor:
    """``query_rope * (quant_scale_ckv[0] / dequant_scale_q_nope)``, rounded again.

    The attention kernel multiplies the whole score by dequant_scale_q_nope / quant_scale_ckv, so the rope
    part is brought to the same scale (MulQr, `service_dynamic_quant_qn_mul_qr_arch22.h`).
    """
    work = working_dtype(query_rope.dtype)
    factor = quant_scale_ckv.reshape(-1)[0].to(work) / dequant_scale_q_nope.to(work)
    return (query_rope.to(work) * factor).to(query_rope.dtype)


def matmul_ckv_kr(
    token_x: Tensor, weight_dkv_kr: Tensor, scale_token: Tensor | None, scale_channel: Tensor | None, dr: int
) -> tuple[Tensor, Tensor]:
    """``x W_dkv_kr -> ckv [T, Hckv], kr [T, Dr]``; columns ``[Hckv | Dr]``."""
    both = _projection(token_x, weight_dkv_kr, scale_token, scale_channel)
    return both.split((both.shape[-1] - dr, dr), -1)


def rms_norm_ckv(ckv: Tensor, gamma: Tensor, epsilon: float, kc_scale: float) -> Tensor:
    """``kc_scale * RMSNorm(ckv)``, work dtype, not yet cast to the cache's dtype; kr is not normed."""
    return rms_norm(ckv, gamma, epsilon, kc_scale)


def quant_ckv_per_tensor(ckv: Tensor, quant_scale_ckv: Tensor) -> Tensor:
    """``int8(sat(rint(ckv * scale[0])))``: the scale multiplies; of a [1, Hckv] tensor one float is read."""
    return quantize.to_int8(ckv * quant_scale_ckv.reshape(-1)[0].to(ckv.dtype))


def quant_per_channel(x: Tensor, quant_scale: Tensor) -> Tensor:
    """``int8(sat(rint(x * scale[1, n])))`` per channel; the rope half arrives rounded to the activation
    dtype.
    """
    work = working_dtype(x.dtype)
    return quantize.to_int8(x.to(work) * quant_scale.to(work))


def quant_ckv_per_tile(ckv: Tensor, kr: Tensor, k_nope_clip_alpha: Tensor, tile_size: int) -> Tensor:
    """The combined cache row ``[T, Hckv + 2*Dr + 4*Hckv/tile]`` in bytes: int8 ckv | rope | fp32 scales."""
    quantised, scale = quantize.per_tile(ckv, k_nope_clip_alpha, tile_size)
    return quantize.tile_row(quantised, kr, scale)


def _projection(
    x: Tensor, weight: Tensor, scale_token: Tensor | None, scale_channel: Tensor | None
) -> Tensor:
    if x.dtype != torch.int8:
        return matmul(x, weight)
    assert scale_token is not None and scale_channel is not None
    return quantize.dequant(quantize.int8_matmul(x, weight), scale_token, scale_channel)
