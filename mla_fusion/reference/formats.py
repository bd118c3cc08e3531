"""Defines the number formats of weight_quant_mode: products, dynamic quantisation, cache rows.

int8 follows the kernel of the chip (:func:`chip`; the operator's arguments do not name it):
`mla_prolog/op_kernel/arch22` on A2 and A3, `arch35` on A5. mxfp8, fp8 and hifloat8 exist
on A5 only, where products come out as float32 and a channel scale is applied before a token scale.

What A5 does differently with int8 (`vf_dequant.h`, `vf_dynamic_quant.h`): the channel scale comes
first; dynamic quantisation of c_q and of the query takes ``scale = max|x| * (1/127)`` and ``x /
scale`` where A2 and A3 take ``max|x| / 127`` and ``x * (127/max|x|)``; and it casts to half towards
odd, then half to even, which together round once. A2 and A3 cast the query to half to nearest and
then half away from zero, which rounds twice. Per tensor, per channel and per tile the arithmetic is
the same on all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_fusion.machine import SOCS, set_inside
from mla_fusion.meta.errors import known_name
from mla_fusion.meta.number_formats import BLOCK
from mla_fusion.reference import hifloat8, quantize

_TILE_FLOOR = 1e-4  # the A5 kernel keeps a tile's maximum above this (`vf_dynamic_quant.h`)
_INT8_MAXIMUM, _FP8_MAXIMUM = 127.0, 448.0
Rounding = Callable[[Tensor], Tensor]
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Format:
    """One quantised format.

    maximum        the largest number of the format
    round          returns numbers in the format, saturated
    product        (x, weight, token scale, channel scale): returns the dequantised float32 product
    dynamic_quant  returns quantised rows, and their float32 scales along a last axis of size 1
    quant_query    the same for the query
    per_tile       (x, alpha, tile): returns quantised rows and the float32 scale of each tile
    """

    maximum: float
    round: Rounding
    product: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    dynamic_quant: Quantise
    quant_query: Quantise
    per_tile: Callable[[Tensor, Any, int], tuple[Tensor, Tensor]]


# -- int8, A2/A3


def _int8_product(x: Tensor, weight: Tensor, token: Tensor, channel: Tensor) -> Tensor:
    # the token scale comes first on A2 and A3 (`mla_prolog_vector_comm_arch22.h`), the channel
    # scale on A5 (`vf_dequant.h`)
    return quantize.int8_matmul(x, weight).float() * token * channel


def _int8_dynamic(to_int8: Rounding) -> Quantise:
    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``x * (127 / m)`` and ``m / 127``, with ``m = max|x|`` over the last axis."""
        peak = quantize.peak(x)
        maximum = torch.full_like(peak, _INT8_MAXIMUM)  # torch divides a number by a reciprocal
        return to_int8(x * (maximum / peak)), (peak / maximum).float()

    return quantise


INT8 = Format(
    _INT8_MAXIMUM,
    quantize.to_int8,
    _int8_product,
    _int8_dynamic(quantize.to_int8),
    _int8_dynamic(quantize.to_int8_through_half),
    quantize.per_tile,
)


# -- fp8 and hifloat8 with channel and token scales, A5


def to_fp8(x: Tensor) -> Tensor:
    """Returns float8_e4m3fn, rounded half to even and saturated at 448."""
    return x.float().clamp(-_FP8_MAXIMUM, _FP8_MAXIMUM).to(torch.float8_e4m3fn)


def _dynamic(encode: Rounding, maximum: float) -> Quantise:
    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``x / scale`` and ``scale = max|x| * (1/maximum)`` over the last axis. A row of
        zeros gives zeros.
        """
        x = x.float()
        scale = quantize.peak(x) * (1.0 / maximum)
        return encode((x / scale).nan_to_num(nan=0.0)), scale

    return quantise


def _scaled(encode: Rounding, decode: Rounding, maximum: float) -> Format:
    def product(x: Tensor, weight: Tensor, token: Tensor, channel: Tensor) -> Tensor:
        return (decode(x) @ decode(weight)) * channel * token

    def per_tile(x: Tensor, alpha: Tensor | None, tile: int) -> tuple[Tensor, Tensor]:
        tiles = x.float().unflatten(-1, (-1, tile))
        scale = quantize.peak(tiles).clamp(min=_TILE_FLOOR) * (1.0 / maximum)
        return encode(tiles / scale).flatten(-2), scale.squeeze(-1)

    dynamic = _dynamic(encode, maximum)
    return Format(maximum, encode, product, dynamic, dynamic, per_tile)


FP8 = _scaled(to_fp8, Tensor.float, _FP8_MAXIMUM)
HIFLOAT8 = _scaled(hifloat8.encode, hifloat8.decode, hifloat8.MAXIMUM)


# -- int8, A5


_INT8_DYNAMIC_A5 = _dynamic(quantize.to_int8, _INT8_MAXIMUM)
INT8_A5 = replace(
    INT8,
    product=lambda x, weight, token, channel: _int8_product(x, weight, channel, token),
    dynamic_quant=_INT8_DYNAMIC_A5,
    quant_query=_INT8_DYNAMIC_A5,
)


# -- mxfp8, A5


def _spread(scale: Tensor) -> Tensor:
    """Returns a float32 factor for each element, from an e8m0 scale for each block of 32."""
    return scale.float().repeat_interleave(BLOCK, -1)


def _mx_product(x: Tensor, weight: Tensor, token: Tensor, channel: Tensor) -> Tensor:
    """Returns the product. Blocks run along k in both operands, and the weight's scales are stored
    ``[n, k/32]``.
    """
    return (x.float() * _spread(token)) @ (weight.float() * _spread(channel).t())


def mx_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``(fp8, e8m0 [.., n/32])``, with the block exponent ``max(exponent field of max|x|,
    8) - 8`` (`vf_dynamic_quant.h`).

    The input is rounded to bfloat16 first. A block of zeros has scale code 0, and a block with inf
    or NaN has 0xFF.
    """
    # to bfloat16, half-way cases away from zero (CAST_ROUND)
    bits = x.float().contiguous().view(torch.int32) + 0x8000
    rounded = (bits & -0x10000).view(torch.float32)
    blocks = rounded.unflatten(-1, (-1, BLOCK))
    field = (blocks.abs().contiguous().view(torch.int32) >> 23).amax(-1)
    code = torch.where(field == 0xFF, field, field.clamp(min=8) - 8)
    factor = torch.exp2((127 - code).double()).unsqueeze(-1)
    data = to_fp8((blocks.double() * factor).float()).flatten(-2)
    return data, code.to(torch.uint8).view(torch.float8_e8m0fnu)


MXFP8 = replace(FP8, product=_mx_product, dynamic_quant=mx_quant)

# by weight_quant_mode
BY_MODE = {1: INT8, 2: INT8, 3: MXFP8, 4: FP8, 5: HIFLOAT8}
_BY_MODE_ON_A5 = BY_MODE | {1: INT8_A5, 2: INT8_A5}


_current = ContextVar("mla_fusion.reference.chip", default="A3")


def chip(soc: str) -> AbstractContextManager[None]:
    """Returns a context in which the reference kernels round as ``soc`` ("A2", "A3", "A5") does.
    Outside they round as A3.

    A2 and A3 run the same kernel. On A5 int8 is dequantised per channel first, and dynamic
    quantisation divides by its scale and rounds once, half to even
    (see above); the formats that only A5 has are the same inside and outside.
    Raises ContractError ``soc``.
    """
    return set_inside(_current, known_name("soc", soc, SOCS))


def format_of(weight_quant_mode: int) -> Format | None:
    """Returns the number format of a weight_quant_mode on the chip of `chip`, None for mode 0."""
    by_mode = _BY_MODE_ON_A5 if _current.get() == "A5" else BY_MODE
    return by_mode.get(weight_quant_mode)
