"""CPU kernels of the npu operators that quantise rows to int8: per token, per block of a row, by given scales."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.reference.numerics import working_dtype
from mla_fusion.reference.quantize import dynamic_scale, to_int8


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``(int8, float32 scale)`` per token: ``scale = max|x*smooth|/127``, ``y = round(x*smooth/scale)``.

    Raises ValueError for group_index, for a dst_type other than int8 and for a quant_mode other than
    "pertoken".
    """
    if group_index is not None or quant_mode != "pertoken" or dst_type not in (None, 1):
        raise ValueError(
            "npu_dynamic_quant: the CPU kernel quantises per token to int8 (dst_type None or 1), without group_index"
        )
    x = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    quantised, scale = dynamic_scale(x)
    return to_int8(quantised), scale.squeeze(-1).contiguous()


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
    """``(int8 [.., M, N], float32 scale [.., M, ceil(N/128)])`` of ``x [M, N]`` or ``[B, M, N]``.

    ``scale = max(max|block|/127, min_scale)`` over 128 neighbours in a row, ``y = round(x/scale)``: all that A2 and
    A3 have. Raises ValueError for another rank, block, rounding or dst_type.
    """
    if x.dim() not in (2, 3) or (round_mode, dst_type, row_block_size, col_block_size) != ("rint", 1, 1, 128):
        raise ValueError(
            "npu_dynamic_block_quant: the CPU kernel quantises blocks of 1 x 128 of a 2-D or 3-D tensor to int8 (rint)"
        )
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -width % col_block_size)).unflatten(-1, (-1, col_block_size))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=min_scale)
    return to_int8(blocks / scale).flatten(-2)[..., :width].contiguous(), scale.squeeze(-1).contiguous()


_QINT8 = (1, 12)  # torch.int8 and torch.qint8 among the numbers of scalar types


def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """``int8(sat(round(input / scales + zero_points)))``; without ``div_mode``, ``input * scales``.

    ``scales`` has one value, or one for each index of ``axis``. Raises ValueError for a dtype other than int8.
    """
    if dtype not in _QINT8:
        raise ValueError(f"npu_quantize: the CPU kernel quantises to int8 (dtype 1 or 12), not {dtype}")
    shape = [1] * input.dim()
    shape[axis] = -1
    x, scale = (value.to(working_dtype(input.dtype)) for value in (input, scales.reshape(shape)))
    x = x / scale if div_mode else x * scale
    return to_int8(x if zero_points is None else x + zero_points.to(x.dtype).reshape(shape))
