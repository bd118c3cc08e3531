"""The MLA prologue, one function per step of the operator document.

Shapes: T tokens, He hidden, Hcq query rank, Hckv KV rank, N heads, D nope dim, Dr rope dim.
``activation`` is the bfloat16 of the device (or float32/float64 in a validation run); "work" is
float32 (float64). ``form`` is the number format of weight_quant_mode
(`mla_fusion.reference.formats`), None without quantisation. Kernel sources named in the docstrings
are those of the A2/A3 kernel (`mla_prolog/op_kernel/arch22`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.reference import quantize
from mla_fusion.reference.formats import Format
from mla_fusion.reference.numerics import interleave_rope, matmul, working_dtype


def projection(
    form: Format | None,
    x: Tensor,
    weight: Tensor,
    scale_token: Tensor | None,
    scale_channel: Tensor | None,
) -> Tensor:
    """``x W``, rounded to the activation dtype, or dequantised and unrounded.

    `service_matmul_arch22.h`; int8 products are exact int32 sums, scaled per token, then per
    channel (not on A5).
    """
    if form is None or scale_channel is None:
        return matmul(x, weight)
    assert scale_token is not None  # comes with the channel's
    return form.product(x, weight, scale_token, scale_channel)


def dynamic_quant_cq(
    form: Format, normed: Tensor, smooth_scales_cq: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(quantised [T, Hcq], scale)`` per token of ``c_q * smooth``; int8: ``q = v*(127/max|v|)``,
    scale [T, 1].

    The quantised tensor is the query_norm output, smoothing included, the scale
    dequant_scale_q_norm (`service_rms_norm_arch22.h`); mxfp8 has one scale per 32 elements.
    """
    smoothed = normed if smooth_scales_cq is None else normed * smooth_scales_cq.to(normed.dtype)
    return form.dynamic_quant(smoothed)


def matmul_qc_qr(
    form: Format | None,
    c_q: Tensor,
    weight_uq_qr: Tensor,
    scale_token: Tensor | None,
    scale_channel: Tensor | None,
    d: int,
    dr: int,
) -> tuple[Tensor, Tensor]:
    """``c_q W_uq_qr -> q_nope [T, N, D], q_pe [T, N, Dr]``; columns run per head ``[D nope | Dr
    rope]``.
    """
    heads = projection(form, c_q, weight_uq_qr, scale_token, scale_channel)
    q_nope, q_pe = heads.unflatten(-1, (heads.shape[-1] // (d + dr), d + dr)).split((d, dr), -1)
    return q_nope, q_pe


def matmul_qn(q_nope: Tensor, weight_uk: Tensor) -> Tensor:
    """``query[:, n] = q_nope[:, n] W_uk[n] -> [T, N, Hckv]``; a dequantised q_nope is rounded
    before it.
    """
    return matmul(q_nope.to(weight_uk.dtype).transpose(0, 1), weight_uk).transpose(0, 1)


def rope_qr(q_pe: Tensor, rope_cos: Tensor, rope_sin: Tensor, activation: torch.dtype) -> Tensor:
    """RoPE of every head, ``[T, N, Dr]``; a dequantised q_pe enters unrounded
    (`service_rotary_position_embedding`).
    """
    return interleave_rope(q_pe, rope_cos.unsqueeze(1), rope_sin.unsqueeze(1), activation)


def quant_query(form: Format, query: Tensor) -> tuple[Tensor, Tensor]:
    """Quantised query and its scale ``[T, N, 1]`` per token and head.

    int8 is rounded twice, to half and then to int8 (`service_dynamic_quant_qn_mul_qr_arch22.h`), on
    A5 once.
    """
    return form.quant_query(query.to(working_dtype(query.dtype)))


def mul_qr(query_rope: Tensor, quant_scale_ckv: Tensor, dequant_scale_q_nope: Tensor) -> Tensor:
    """``query_rope * (quant_scale_ckv[0] / dequant_scale_q_nope)``, rounded again.

    The attention kernel multiplies the whole score by dequant_scale_q_nope / quant_scale_ckv, so
    the rope part is brought to the same scale (MulQr, `service_dynamic_quant_qn_mul_qr_arch22.h`).
    """
    work = working_dtype(query_rope.dtype)
    factor = quant_scale_ckv.reshape(-1)[0].to(work) / dequant_scale_q_nope.to(work)
    return (query_rope.to(work) * factor).to(query_rope.dtype)


def quant_ckv_per_tensor(form: Format, ckv: Tensor, quant_scale_ckv: Tensor) -> Tensor:
    """``saturate(round(ckv * scale[0]))``: the scale multiplies; of a [1, Hckv] tensor one float is
    read.
    """
    return form.per_tensor(ckv * quant_scale_ckv.reshape(-1)[0].to(ckv.dtype))


def quant_per_channel(x: Tensor, quant_scale: Tensor) -> Tensor:
    """``int8(sat(rint(x * scale[1, n])))`` per channel; the rope half arrives rounded to the
    activation dtype.
    """
    work = working_dtype(x.dtype)
    return quantize.to_int8(x.to(work) * quant_scale.to(work))


def quant_ckv_per_tile(
    form: Format, ckv: Tensor, kr: Tensor, k_nope_clip_alpha: Tensor | None, tile_size: int
) -> Tensor:
    """The combined cache row in bytes, ``[T, Hckv + 2*Dr + 4*Hckv/tile]``: quantised ckv | rope |
    fp32 scales.

    The caller views it as the cache's one-byte dtype.
    """
    quantised, scale = form.per_tile(ckv, k_nope_clip_alpha, tile_size)
    return quantize.tile_row(quantised.view(torch.int8), kr, scale).view(quantised.dtype)
