"""CPU kernels of the npu operators that quantise rows: per token, per block of a row, or by the
caller's scales.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_fusion.meta import number_formats
from mla_fusion.reference.formats import BY_MODE, mx_quant
from mla_fusion.reference.numerics import working_dtype
from mla_fusion.reference.quantize import peak, to_int8


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns ``(numbers, float32 scale)`` per token: ``scale = max|x*smooth|/127``, ``y =
    round(x*smooth/scale)`` in int8.

    With ``dst_type`` float8_e4m3fn 448 takes the place of 127, with hifloat8 (which comes as uint8)
    32768. Raises ValueError for group_index, for any other dst_type and for a quant_mode other than
    "pertoken".
    """
    form = number_formats.of_dst_type(dst_type)
    if group_index is not None or quant_mode != "pertoken" or form is None:
        raise ValueError(
            "npu_dynamic_quant: the CPU kernel quantises per token, without group_index, to int8 "
            "(dst_type None or 1), float8_e4m3fn (24 or 292) or hifloat8 (290)"
        )
    x = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    quantised, scale = BY_MODE[form.full].dynamic_quant(x)
    return quantised, scale.squeeze(-1).contiguous()


def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns ``(float8_e4m3fn, e8m0 scales as uint8 [.., ceil(n/64), 2])``: one power of two for
    32 neighbours in a row.

    ``scale = 2**(floor(log2(max|block|)) - 8)``, ``y = round(x / scale)`` saturating at 448, as the
    prologue quantises c_q in weight_quant_mode 3. Raises ValueError for any other axis, rounding,
    dst_type, block or way to the scale.
    """
    is_last_axis = axis % input.dim() == input.dim() - 1
    form = (round_mode, block_size, scale_alg or 0, dst_type_max, max_low_bound)
    is_plain = is_last_axis and form == ("rint", number_formats.BLOCK, 0, 0.0, 0.0)
    if not is_plain or number_formats.of_dst_type(dst_type, in_blocks=True) is None:
        raise ValueError(
            "npu_dynamic_mx_quant: the CPU kernel quantises blocks of 32 along the last axis to "
            "float8_e4m3fn (dst_type 24 or 292; rint, scale_alg 0, no bounds)"
        )
    width = input.shape[-1]
    data, codes = mx_quant(pad(input.float(), (0, -width % (2 * number_formats.BLOCK))))
    return data[..., :width].contiguous(), codes.view(torch.uint8).unflatten(-1, (-1, 2))


def npu_dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns ``(int8 [.., M, N], float32 scale [.., M, ceil(N/128)])`` for ``x [M, N]`` or ``[B,
    M, N]``.

    ``scale = max(max|block|/127, min_scale)`` over 128 neighbours in a row, ``y = round(x/scale)``:
    all that A2 and A3 have. On A5 ``scale = min(max|block|/maximum, 1/min_scale)``, with dst_type
    float8_e4m3fn and the maximum 448, or with hifloat8, 32768 and round_mode "round". Raises
    ValueError for another rank, block, rounding or dst_type.
    """
    form = number_formats.of_dst_type(dst_type)
    is_plain = (row_block_size, col_block_size, dst_type_max) == (1, 128, 0.0)
    if x.dim() not in (2, 3) or not is_plain or form is None or round_mode != form.block_rounding:
        raise ValueError(
            "npu_dynamic_block_quant: the CPU kernel quantises blocks of 1 x 128 of a 2-D or 3-D "
            "tensor to int8 or float8_e4m3fn (rint), or to hifloat8 (round)"
        )
    width = x.shape[-1]
    blocks = pad(x.float(), (0, -width % col_block_size)).unflatten(-1, (-1, col_block_size))
    kernel = BY_MODE[form.full]
    if form is number_formats.INT8:
        scale = (peak(blocks) / kernel.maximum).clamp(min=min_scale)
    else:
        scale = peak(blocks) * (1 / kernel.maximum)
        scale = scale.clamp(max=1 / min_scale if min_scale else torch.inf)
    rows = kernel.round(blocks / scale).flatten(-2)[..., :width]
    return rows.contiguous(), scale.squeeze(-1).contiguous()


_QINT8 = (1, 12)  # torch.int8 and torch.qint8 among the numbers of scalar types


def npu_quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """Returns ``int8(sat(round(input / scales + zero_points)))``; without ``div_mode``, with
    ``input * scales``.

    ``scales`` has a single value, or a value for each index of ``axis``. Raises ValueError for a
    dtype other than int8.
    """
    if dtype not in _QINT8:
        raise ValueError(
            f"npu_quantize: the CPU kernel quantises to int8 (dtype 1 or 12), not {dtype}"
        )
    shape = [1] * input.dim()
    shape[axis] = -1
    x, scale = (value.to(working_dtype(input.dtype)) for value in (input, scales.reshape(shape)))
    x = x / scale if div_mode else x * scale
    return to_int8(x if zero_points is None else x + zero_points.to(x.dtype).reshape(shape))
