"""Packs and unpacks rows of per-tile quantised caches (kv_cache_quant_mode 3).

A row is ``quantised ckv | rope part | float32 scales``, in the dtype of the quantised part. It has
512 + 128 + 16 = 656 bytes for Hckv 512, Dr 64 and tiles of 128 (`mla_prolog_tiling_check.cpp`,
`kernel_mla_prolog_split_n_arch22.h`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.paging.ragged import refuse
from mla_fusion.reference import hifloat8, quantize

_BYTE_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn)
_SCALE_BYTES = 4


def pack_rows(ckv: Tensor, kr: Tensor, scale: Tensor) -> Tensor:
    """Returns rows ``[.., Hckv + 2*Dr + 4*Hckv/tile]`` in ckv's dtype.

    ckv    [.., Hckv] int8, float8_e4m3fn, or uint8: hifloat8
    kr     [.., Dr] of two bytes
    scale  [.., Hckv/tile] float32
    """
    if ckv.dtype not in _BYTE_DTYPES:
        refuse("ckv", "int8, uint8 or float8_e4m3fn", ckv.dtype)
    if kr.element_size() != 2 or not kr.is_floating_point():
        refuse("kr", "bfloat16 or float16", kr.dtype)
    if scale.dtype != torch.float32:
        refuse("scale", "torch.float32", scale.dtype)
    for name, tensor in (("kr", kr), ("scale", scale)):
        if tensor.shape[:-1] != ckv.shape[:-1]:
            refuse(name, f"leading sizes {list(ckv.shape[:-1])}, as ckv", list(tensor.shape))
    if scale.shape[-1] == 0 or ckv.shape[-1] % scale.shape[-1]:
        refuse("scale", f"a number of tiles that divides {ckv.shape[-1]}", scale.shape[-1])
    return quantize.tile_row(ckv.view(torch.int8), kr, scale).view(ckv.dtype)


def unpack_rows(
    rows: Tensor, *, hckv: int = 512, dr: int = 64, tile: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of rows: ``(ckv [.., hckv], kr [.., dr], scale [.., hckv/tile])``.

    ``rows`` may be a whole cache ``[BlockNum, BlockSize, 1, 656]`` or any rows of it.
    """
    if rows.dtype not in _BYTE_DTYPES:
        refuse("rows", "int8, uint8 or float8_e4m3fn", rows.dtype)
    if tile < 1 or hckv % tile:
        refuse("tile", f"a divisor of hckv {hckv}", tile)
    width = hckv + 2 * dr + _SCALE_BYTES * (hckv // tile)
    if rows.dim() == 0 or rows.shape[-1] != width:
        refuse("rows", f"[.., {width}] for hckv {hckv}, dr {dr}, tile {tile}", list(rows.shape))
    if rows.numel() and rows.stride(-1) != 1:
        refuse("rows", "rows of adjacent bytes", f"a last stride of {rows.stride(-1)}")
    ckv, kr, scale = rows.tensor_split((hckv, hckv + 2 * dr), -1)
    return ckv, kr.view(torch.bfloat16), scale.view(torch.float32)


def numbers_of_rows(rows: Tensor, *, hckv: int, dr: int, tile: int) -> Tensor:
    """Returns the numbers in rows, of any strides, as ``[.., hckv + dr]`` float32."""
    latent, rope = dequantise_rows(rows.contiguous(), hckv=hckv, dr=dr, tile=tile)
    return torch.cat([latent, rope.float()], -1)


def dequantise_rows(
    rows: Tensor, *, hckv: int = 512, dr: int = 64, tile: int = 128
) -> tuple[Tensor, Tensor]:
    """Returns ``(ckv [.., hckv] float32, kr [.., dr] bfloat16)``: each tile is multiplied by its
    scale; uint8 is hifloat8.
    """
    ckv, kr, scale = unpack_rows(rows, hckv=hckv, dr=dr, tile=tile)
    values = hifloat8.decode(ckv) if ckv.dtype == torch.uint8 else ckv.float()
    return (values.unflatten(-1, (hckv // tile, tile)) * scale.unsqueeze(-1)).flatten(-2), kr
